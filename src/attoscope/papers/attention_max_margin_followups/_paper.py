"""The paper that the claims of this package belong to."""

from attoscope.papers.base import Paper

PAPER = Paper(
    slug="attention-max-margin-followups",
    title="Max-Margin Token Selection in Attention Mechanism, and the follow-ups",
    authors="Davoud Ataee Tarzanagh, Yingcong Li, Xuechen Zhang, Samet Oymak, and others",
    year=2023,
    link="https://arxiv.org/abs/2306.13596",
)
