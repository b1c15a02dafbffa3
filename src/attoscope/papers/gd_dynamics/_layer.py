"""One attention layer with squared loss under plain gradient descent, many draws at once.

Every tensor has the draw as its first axis. `Q` and `K` are (draw, width, size), `V` is (draw,
width, value size) and `O` (draw, value size, out); one head, no normalisation, no residual stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from attoscope.papers.base import Run
from attoscope.remedies.gaussian import gaussian_weights

Array = NDArray[np.float64]
Weights = dict[str, Tensor]
KERNELS = ("softmax", "gaussian")
DERIVED = "derived here after the abstract of arXiv 2411.07538, not a theorem of the paper"


def seeds(run: Run, name: str, *, quick: int, paper: int) -> list[int]:
    """As many seeds as the scale of the run asks for, from its own."""
    size = run.pick(quick=quick, paper=paper)
    return [int(seed) for seed in run.rng(name).integers(2**31, size=size)]


def normal(rng: np.random.Generator, *shape: int) -> Float[Tensor, "*axes"]:
    """Standard normal numbers in float64."""
    return torch.from_numpy(rng.standard_normal(shape))


def stacked(draws: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Draws, each a dictionary of tensors, along a first axis."""
    return {name: torch.stack([each[name] for each in draws]) for name in draws[0]}


def orthonormal_tokens(
    rng: np.random.Generator, samples: int, tokens: int, width: int
) -> Float[Tensor, "sample token width"]:
    """Tokens that are orthonormal over all samples; needs width >= samples x tokens."""
    basis = torch.linalg.qr(normal(rng, width, samples * tokens))[0]
    tall: Tensor = basis.T.reshape(samples, tokens, width)
    return tall


def attention(
    kernel: str, x: Float[Tensor, "*lead sample token width"], weights: Weights
) -> Float[Tensor, "*draws sample token key"]:
    """Rows of attention weights: softmax, or the Gaussian kernel that is not normalised."""
    q, k = x @ weights["Q"][..., None, :, :], x @ weights["K"][..., None, :, :]
    rows: Tensor
    if kernel == "softmax":
        rows = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    else:
        each = gaussian_weights(q.flatten(0, -3)[:, None], k.flatten(0, -3)[:, None])
        rows = each[:, 0].unflatten(0, q.shape[:-2])
    return rows


def losses(
    kernel: str,
    x: Float[Tensor, "*lead sample token width"],
    y: Float[Tensor, "*lead sample token out"],
    weights: Weights,
) -> Float[Tensor, "*draws"]:
    """`1/2 sum_i |F(X_i) - y_i|^2` of every draw."""
    values = x @ (weights["V"] @ weights["O"])[..., None, :, :]
    left = attention(kernel, x, weights) @ values - y
    return left.square().sum((-3, -2, -1)) / 2


def descend(
    kernel: str, x: Tensor, y: Tensor, weights: Weights, trained: str, rate: float, steps: int
) -> tuple[Array, Array, Weights]:
    """Plain gradient descent on the matrices named in `trained`.

    Gives losses (step from 0 on, draw), the largest gradient entry of each draw at the end, and the
    weights then.
    """
    weights = dict(weights)
    path = np.empty((steps + 1, len(x)))
    for step in range(steps + 1):
        moved = [weights[name].detach().requires_grad_() for name in trained]
        weights |= dict(zip(trained, moved, strict=True))
        loss = losses(kernel, x, y, weights)
        path[step] = loss.detach().numpy()
        slopes = torch.autograd.grad(loss.sum(), moved)
        if step < steps:
            for name, slope in zip(trained, slopes, strict=True):
                weights[name] = weights[name].detach() - rate * slope
    largest = torch.stack([slope.abs().amax((1, 2)) for slope in slopes]).amax(0)
    return path, largest.numpy(), {name: w.detach() for name, w in weights.items()}


def thinned(path: Array, points: int = 60) -> list[dict[str, Any]]:
    """Steps and losses of a path, (step, draw), for a figure."""
    steps = np.unique(np.geomspace(1, len(path), points).astype(int) - 1)
    return [
        {"step": int(step) + 1, "draw": draw, "loss": max(float(path[step, draw]), 1e-32)}
        for step in steps
        for draw in range(min(path.shape[1], 5))
    ]
