"""The paper that the claims of this package belong to."""

from attoscope.papers.base import Paper

PAPER = Paper(
    slug="deepscalelm",
    title="Transformers Get Stable: An End-to-End Signal Propagation Theory for Language Models "
    "(DeepScaleLM)",
    authors="Akhil Kedia, Mohd Abbas Zaidi, Sushil Khyalia, JungHo Jung, Harshith Goka, Haejun Lee",
    year=2024,
    link="https://arxiv.org/abs/2403.09635",
)
