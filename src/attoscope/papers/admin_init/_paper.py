"""The paper that the claims of this package belong to."""

from attoscope.papers.base import Paper

PAPER = Paper(
    slug="admin-init",
    title="Understanding the Difficulty of Training Transformers (Admin)",
    authors="Liyuan Liu, Xiaodong Liu, Jianfeng Gao, Weizhu Chen, Jiawei Han",
    year=2020,
    link="https://arxiv.org/abs/2004.08249",
)
