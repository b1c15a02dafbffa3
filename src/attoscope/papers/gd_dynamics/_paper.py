"""The paper that the claims of this package belong to.

Its theorems, constants and numbers were not at hand: only its abstract and figure captions. What is
measured here is derived here, so that it tests what the abstract claims; a claim's source says so.
"""

from attoscope.papers.base import Paper

PAPER = Paper(
    slug="gd-dynamics",
    title="Unraveling the Gradient Descent Dynamics of Transformers",
    authors="Bingqing Song, Boran Han, Shuai Zhang, Jie Ding, Mingyi Hong",
    year=2024,
    link="https://arxiv.org/abs/2411.07538",
)
