"""Max-margin token selection in attention, and the papers that follow it: all claims."""

# Importing a module registers its claims; the order is that of the ledger.
# isort: off
from attoscope.papers.attention_max_margin_followups import fingerprint as fingerprint
from attoscope.papers.attention_max_margin_followups import joint as joint
from attoscope.papers.attention_max_margin_followups import next_token as next_token
from attoscope.papers.attention_max_margin_followups import rates as rates
from attoscope.papers.attention_max_margin_followups import mirror as mirror
from attoscope.papers.attention_max_margin_followups import recall as recall
from attoscope.papers.attention_max_margin_followups import noise as noise
from attoscope.papers.attention_max_margin_followups import decay as decay
from attoscope.papers.attention_max_margin_followups._paper import PAPER as PAPER
