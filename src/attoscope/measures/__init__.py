"""One file per phenomenon: what it reads, its null, its rules for findings."""

from attoscope.measures.base import Measure as Measure
from attoscope.measures.base import Reading as Reading
from attoscope.measures.base import RowSampler as RowSampler
from attoscope.measures.base import Witness as Witness
from attoscope.measures.base import with_null as with_null
from attoscope.measures.rules import Rule as Rule
from attoscope.measures.rules import findings_of as findings_of
from attoscope.measures.selection import Selection as Selection
from attoscope.measures.smoothness import Smoothness as Smoothness
from attoscope.measures.stream import Stream as Stream


def first_measures(*, rows: int | None = 128, seed: int = 0) -> list[Measure]:
    """Selection, smoothness and stream, all with the same sample size (None: no sampling)."""
    return [
        Selection(rows=rows, seed=seed),
        Smoothness(tokens=rows, seed=seed),
        Stream(seed=seed),
    ]
