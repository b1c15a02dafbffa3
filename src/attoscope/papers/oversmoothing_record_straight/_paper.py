"""The paper that the claims of this package belong to."""

from attoscope.papers.base import Paper

PAPER = Paper(
    slug="oversmoothing-record-straight",
    title="Setting the Record Straight on Transformer Oversmoothing",
    authors="Gbetondji J-S Dovonon, Michael M. Bronstein, Matt J. Kusner",
    year=2024,
    link="https://arxiv.org/abs/2401.04301",
)
