"""Stacks of fresh Gaussian weights, run forward and backward, and their measured moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from attoscope.prediction.propagation import SublayerPlan

Array = NDArray[np.float64]
Tokens = Float[Tensor, "batch token width"]
_ACTIVATIONS: dict[str, Any] = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "identity": lambda x: x
}  # fmt: skip


class Draws:
    """Random tensors of one seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        drawn: Tensor = torch.randn(shape, generator=self.generator, dtype=self.dtype)
        return drawn

    def weight(self, inputs: int, outputs: int, variance: float) -> Tensor:
        """A matrix for `x @ W`."""
        drawn: Tensor = variance**0.5 * self.normal(inputs, outputs)
        return drawn

    def alike(self, batch: int, length: int, width: int, r: float) -> Tokens:
        """Gaussian tokens of variance 1 and this correlation."""
        own, shared = self.normal(batch, length, width), self.normal(batch, 1, width)
        made: Tensor = (1 - r) ** 0.5 * own + r**0.5 * shared
        return made

    def dropped(self, x: Tensor, rate: float) -> Tensor:
        """Inverted dropout."""
        if rate == 0:
            return x
        kept = torch.rand(x.shape, generator=self.generator, dtype=x.dtype) >= rate
        return x * kept / (1 - rate)


def attend(
    draws: Draws, plan: SublayerPlan, x: Tokens, heads: int, key_heads: int
) -> Float[Tensor, "batch token value"]:
    """Attention's output before the output projection, with fresh weights."""
    batch, length, width = x.shape
    size, w = plan.hidden // heads, plan.weights

    def split(role: str, number: int) -> Tensor:
        made = x @ draws.weight(width, number * size, w[role])
        return made.view(batch, length, number, size).transpose(1, 2)

    q, k, v = split("query", heads), split("key", key_heads), split("value", key_heads)
    k, v = (t.repeat_interleave(heads // key_heads, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / size**0.5
    if plan.causal:
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = draws.dropped(scores.softmax(-1), plan.attention_dropout)
    return (weights @ v).transpose(1, 2).reshape(batch, length, heads * size)


def branch(draws: Draws, plan: SublayerPlan, x: Tokens, heads: int, key_heads: int) -> Tokens:
    """A residual branch with fresh weights, its dropout included."""
    w, width = plan.weights, plan.width
    if plan.kind == "attention":
        made = attend(draws, plan, x, heads, key_heads)
        made = made @ draws.weight(plan.hidden, width, w["output"])
    else:
        up = x @ draws.weight(width, plan.hidden, w["in"])
        curve = _ACTIVATIONS[plan.activation]
        gate = "gate" in w
        made = (
            curve(x @ draws.weight(width, plan.hidden, w["gate"])) * up if gate else curve(up)
        )
        made = made @ draws.weight(plan.hidden, width, w["out"])
    return draws.dropped(made, plan.dropout)


def moments(x: Tensor) -> tuple[float, float]:
    """Variance, and correlation of two different tokens, of (batch, token, width)."""
    x = x.detach().double()
    n, mean = x.shape[1], x.mean()
    variance = x.square().mean() - mean**2
    total = (x.sum(1).square() - x.square().sum(1)).mean() / (n * (n - 1)) - mean**2
    return float(variance), float(total / variance)


def simulate(
    plans: Sequence[SublayerPlan],
    *,
    seed: int,
    r0: float,
    rg: float,
    length: int,
    batch: int,
    heads: int,
    key_heads: int | None = None,
) -> dict[str, Array]:
    """One draw of a stack: the measured curves, named as in `SignalProfile`."""
    draws, width = Draws(seed), plans[0].width
    x = draws.alike(batch, length, width, r0).requires_grad_()
    stream, sums, branches = [x], [], []
    for plan in plans:
        x = stream[-1]
        made = branch(draws, plan, _norm(plan, x) if plan.norm == "pre" else x,
                      heads, key_heads or heads)  # fmt: skip
        total = plan.skip * x + plan.branch * made
        after = _norm(plan, total) * plan.gain**0.5 if plan.norm == "post" else total
        after.retain_grad()
        sums.append(moments(total))
        branches.append(moments(made))
        stream.append(after)
    stream[-1].backward(draws.alike(batch, length, width, rg))
    gradients = np.array([moments(x.grad) for x in stream if x.grad is not None])
    points, made_moments = np.array([moments(x) for x in stream]), np.array(branches)
    return {
        "variance": points[:, 0],
        "correlation": points[:, 1],
        "sums": np.array(sums)[:, 0],
        "branches": made_moments[:, 0],
        "branch_correlations": made_moments[:, 1],
        "gradient": gradients[:, 0] / gradients[-1, 0],
        "gradient_correlation": gradients[:, 1],
    }


def _norm(plan: SublayerPlan, x: Tokens) -> Tokens:
    shape = x.shape[-1:]
    return F.layer_norm(x, shape) if plan.norm_kind == "layer" else F.rms_norm(x, shape)
