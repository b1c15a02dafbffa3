"""The generators of arXiv 2308.16898, with the draws of the authors' code in their order.

Draws and normalisations are float32 from `torch.Generator().manual_seed(seed)`, cast to float64
at the end: the same seed gives the published instance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attoscope.errors import AttoscopeError
from attoscope.tasks.instances import Array, Instance, check_sizes

if TYPE_CHECKING:
    import torch


def unit_sphere(seed: int, n: int, T: int, d: int) -> Instance:
    """n sequences of T tokens on the unit sphere of R^d, random signs, unit queries and head.

    Order of draws: head, labels, tokens, queries. Source: arXiv 2308.16898, local convergence
    and rank experiments.
    """
    check_sizes(n=n, T=T, d=d)
    draw = _Draws(seed)
    head = draw.unit(d)
    labels = draw.signs(n)
    tokens = draw.unit(n, T, d)
    return _instance(tokens, draw.unit(n, d), labels, head)


def vis1() -> Instance:
    """The first published instance in the plane: two clouds of three tokens, seed 1.

    Optimal tokens (0, 2). Order of draws: head, tokens, queries.
    """
    draw = _Draws(1)
    head = draw.unit(2)
    tokens = 0.3 * draw.normal(2, 3, 2)
    tokens[0, :, 0] -= 1.0
    tokens[1, :, 0] += 1.0
    return _instance(tokens, draw.unit(2, 2), draw.ones(2), head)


def vis2() -> Instance:
    """The second published instance in the plane: one token on the right, four left, seed 3.

    Optimal tokens (0, 0). Order of draws: head, tokens, queries.
    """
    draw = _Draws(3)
    head = draw.unit(2)
    tokens = 0.5 * draw.normal(2, 5, 2)
    tokens[:, 0, 0] = 1.0
    tokens[0, 0, 1], tokens[1, 0, 1] = 0.5, -0.5
    tokens[:, 1:, 0] -= 1.0
    return _instance(tokens, draw.unit(2, 2), draw.ones(2), head)


def relu_head(seed: int, n: int, T: int, d: int) -> Instance:
    """Unit tokens and queries with the head `sum relu(a^T V)`, V (d, d) of Frobenius norm 1.

    Order of draws: V, tokens, labels, queries. Source: arXiv 2308.16898, nonlinear heads.
    """
    check_sizes(n=n, T=T, d=d)
    draw = _Draws(seed)
    head = draw.normal(d, d)
    head /= head.norm()
    tokens = draw.unit(n, T, d)
    labels = draw.signs(n)
    return _instance(tokens, draw.unit(n, d), labels, head)


def lambda_head(seed: int, n: int, T: int, d: int) -> Instance:
    """Tokens from singular vectors, labels +1, for the head `v^T a - strength ||a||^2`.

    T = d: the tokens of a sequence are orthonormal, and the best probabilities are
    sparsemax(v^T x_t / (2 strength)). T > d: the columns are orthonormal instead, as published.
    T < d, which the published code cannot run: right singular vectors, orthonormal tokens.
    `head` is v, of norm 1. Order of draws: v, tokens, queries.
    Source: arXiv 2308.16898, multi-token experiments.
    """
    check_sizes(n=n, T=T, d=d)
    draw = _Draws(seed)
    head = draw.unit(d)
    # Of torch, as published: other libraries give singular vectors of other signs.
    left, _, right = draw.torch.linalg.svd(draw.normal(n, T, d), full_matrices=False)
    # float32 vectors are orthonormal to seven digits; the nearest orthonormal ones are to sixteen.
    vectors = (left if T >= d else right).double().numpy()
    first, _, last = np.linalg.svd(vectors, full_matrices=False)
    return _instance(first @ last, draw.unit(n, d), draw.ones(n), head)


def equal_scores(instance: Instance, gap: float = 1.0) -> Instance:
    """The same data with every token shifted along v, so that v^T x takes the values +-gap/2.

    Scores become gap/2 at the optimal token of each sequence and -gap/2 at all others. Then
    training by gradient descent reaches the globally optimal direction from any start.

    Raises `AttoscopeError` for a head that is no vector, a head of zeros, or a gap that is not
    positive. Source: arXiv 2308.16898, Assumption B.2.
    """
    if not instance.linear:
        raise AttoscopeError(
            f"instance: got a head of shape {instance.head.shape}; expected a linear head, a vector"
        )
    if not gap > 0:
        raise AttoscopeError(f"gap: got {gap}; expected a positive number")
    head = instance.head[..., None, None, :]
    square = (head**2).sum(-1)
    if not square.all():
        raise AttoscopeError(
            "instance: got a head of zeros; expected a direction to shift along"
        )
    best = np.arange(instance.tokens.shape[-2]) == instance.optimal[..., None]
    goal = instance.labels[..., None] * np.where(best, gap / 2, -gap / 2)
    miss = goal - instance.labels[..., None] * instance.scores
    return replace(instance, tokens=instance.tokens + (miss / square)[..., None] * head)


class _Draws:
    """float32 draws from one generator, in the order they are asked for."""

    def __init__(self, seed: int) -> None:
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(int(seed))

    def normal(self, *shape: int) -> torch.Tensor:
        return self.torch.randn(*shape, generator=self.generator, dtype=self.torch.float32)

    def unit(self, *shape: int) -> torch.Tensor:
        x = self.normal(*shape)
        x /= x.norm(dim=-1, keepdim=True)
        return x

    def signs(self, n: int) -> torch.Tensor:
        return 2.0 * (self.normal(n) > 0) - 1.0

    def ones(self, n: int) -> torch.Tensor:
        return self.torch.ones(n)


def _instance(tokens: Any, queries: Any, labels: Any, head: Any) -> Instance:
    arrays: list[Array] = [
        np.asarray(part, dtype=np.float64) for part in (tokens, queries, labels, head)
    ]
    return Instance(*arrays)
