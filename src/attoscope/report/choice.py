"""Which readings stand in front; the others are one click away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attoscope.findings import Finding
from attoscope.measures.base import Reading

# Smoothness measures disagree in known regimes, so that they stand together; of readings that
# differ only in which tokens they leave out, one stands in front.
FRONT = frozenset(
    {
        "normalised_entropy",
        "first_share",
        "special_share",
        "margin",
        "head_write",
        "cosine",
        "absolute_cosine",
        "frequency_ratio",
        "rank_one_residual",
        "effective_rank",
        "dirichlet_energy",
        "norm",
        "massive_activation",
        "growth",
        "update_ratio",
    }
)
# In a terminal there is room for about four: one for each question.
TERMINAL = ("normalised_entropy", "first_share", "cosine", "effective_rank", "norm")
_FEWEST = 3


def in_front(readings: Sequence[Reading], findings: Iterable[Finding]) -> set[str]:
    """Names of those to show at once: the known ones, and all that a finding speaks of."""
    named = FRONT.union(f.reading for f in findings)
    chosen = {r.name for r in readings if r.name in named}
    return chosen if len(chosen) >= _FEWEST else {r.name for r in readings}


def foremost(names: Sequence[str], most: int) -> list[str]:
    """At most so many of the names, in the order given: one for each question first, then those
    that stand in front, then the others."""

    def rank(name: str) -> int:
        return 0 if name in TERMINAL else 1 if name in FRONT else 2

    chosen = set(sorted(names, key=rank)[:most])
    return [name for name in names if name in chosen]
