"""Data of the experiments, drawn as the official code draws them, and a torch twin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping
import numpy as np
import torch

from attoscope.dynamics import AttentionData, LinearHead


@contextmanager
def as_users_run_it() -> Iterator[None]:
    """Without the checks of types that only these tests turn on."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def unit_sphere(seeds, n: int = 6, tokens: int = 8, d: int = 10) -> AttentionData:
    """Tokens, queries and head on the unit sphere, random labels; one trial per seed."""
    parts = []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        v = torch.randn(d, generator=g)
        y = torch.where(torch.randn(n, generator=g) > 0, 1.0, -1.0)
        x = torch.randn(n, tokens, d, generator=g)
        z = torch.randn(n, d, generator=g)
        parts.append([a.double().numpy() for a in (unit(x), unit(z), y, unit(v))])
    x, z, y, v = (np.stack(part) for part in zip(*parts, strict=True))
    return AttentionData.cross(x, z, y, LinearHead(v))


def vis1() -> AttentionData:
    """The official two-dimensional picture: two sequences of three tokens."""
    g = torch.Generator().manual_seed(1)
    v = unit(torch.randn(2, generator=g))
    x = 0.3 * torch.randn(2, 3, 2, generator=g)
    x[0] += torch.tensor([-1.0, 0.0])
    x[1] += torch.tensor([1.0, 0.0])
    z = unit(torch.randn(2, 2, generator=g))
    x, z, v = (a.double().numpy()[None] for a in (x, z, v))
    return AttentionData.cross(x, z, np.ones((1, 2)), LinearHead(v))


def angle(degrees: float, v=(1, 3)) -> AttentionData:
    """Two sequences whose Frobenius and nuclear solutions differ by half the queries' angle."""
    th = np.radians(degrees)
    tokens = [[[[1, 0], [0, 0]], [[0, 1], [0, 0]]]]
    queries = [[[1, 0], [np.cos(th), np.sin(th)]]]
    return AttentionData.cross(tokens, queries, [[1, 1]], LinearHead([list(v)]))


def random_data(
    seed: int = 0, trials: int = 3, n: int = 4, tokens: int = 5, d=(6, 4), head=None
):
    """Gaussian data with keys and queries of different widths."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((trials, n, tokens, d[0]))
    z = rng.standard_normal((trials, n, d[1]))
    y = rng.choice([-1.0, 1.0], (trials, n))
    return AttentionData.cross(x, z, y, head or LinearHead(rng.standard_normal((trials, d[0]))))


def torch_loss(data: AttentionData, weight: torch.Tensor, loss: str = "logistic"):
    """The mean loss per trial, written as one would in torch."""
    x = torch.tensor(data.values[:, data.sequence])
    keys = torch.tensor(data.tokens[:, data.sequence])
    z, y = torch.tensor(data.queries), torch.tensor(data.labels)
    logits = torch.einsum("rntd,rdq,rnq->rnt", keys, weight, z)
    logits = logits.masked_fill(~torch.tensor(data.allowed), -torch.inf)
    a = torch.einsum("rnt,rntd->rnd", logits.softmax(-1), x)
    head = data.head
    if hasattr(head, "V"):
        f = torch.einsum("rnd,rdh->rnh", a, torch.tensor(head.V)).relu().sum(-1)
    else:
        f = torch.einsum("rnd,rd->rn", a, torch.tensor(head.v))
        f = f - getattr(head, "strength", 0.0) * (a**2).sum(-1)
    u = y * f
    rows = {
        "logistic": torch.nn.functional.softplus(-u),
        "exponential": (-u).exp(),
        "linear": -u,
    }
    return rows[loss].mean(1)
