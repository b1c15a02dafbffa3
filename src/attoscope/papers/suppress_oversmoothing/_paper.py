"""The paper that the claims of this package belong to."""

from attoscope.papers.base import Paper

PAPER = Paper(
    slug="suppress-oversmoothing",
    title="Improve Vision Transformers Training by Suppressing Over-smoothing",
    authors="Chengyue Gong, Dilin Wang, Meng Li, Vikas Chandra, Qiang Liu",
    year=2021,
    link="https://arxiv.org/abs/2104.12753",
)
