"""The paper that the claims of this package belong to."""

from attoscope.papers.base import Paper

PAPER = Paper(
    slug="transformers-as-svms",
    title="Transformers as Support Vector Machines",
    authors="Davoud Ataee Tarzanagh, Yingcong Li, Christos Thrampoulidis, Samet Oymak",
    year=2023,
    link="https://arxiv.org/abs/2308.16898",
)
