"""The paper that the claims of this package belong to."""

from attoscope.papers.base import Paper

PAPER = Paper(
    slug="neutreno",
    title="NeuTRENO: Mitigating Over-smoothing in Transformers via Regularized Nonlocal "
    "Functionals",
    authors="Tam Nguyen, Tan M. Nguyen, Richard G. Baraniuk",
    year=2023,
    link="https://arxiv.org/abs/2312.00751",
)
