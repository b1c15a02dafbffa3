"""Papers whose claims are programs: each is measured, judged and held against a control."""

from attoscope.papers.base import HOLDS as HOLDS
from attoscope.papers.base import Claim as Claim
from attoscope.papers.base import Control as Control
from attoscope.papers.base import Evidence as Evidence
from attoscope.papers.base import Fails as Fails
from attoscope.papers.base import Holds as Holds
from attoscope.papers.base import Paper as Paper
from attoscope.papers.base import Run as Run
from attoscope.papers.ledger import Ledger as Ledger
from attoscope.papers.ledger import Outcome as Outcome
from attoscope.papers.registry import ENTRIES as ENTRIES
from attoscope.papers.registry import Entry as Entry
from attoscope.papers.reproducing import reproduce as reproduce
