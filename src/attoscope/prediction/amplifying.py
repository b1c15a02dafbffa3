"""How much a small random change of all weights changes the output, and how it grows with depth.

With noise of relative size eps on every weight matrix, the normalised output of a stack of N
sub-layers changes by about `2 eps^2 D sum_i beta_{i,i}^2` (squared, summed over D features): each
branch has two matrices in series, and a branch passes the change on by its share of the stream.
The sum grows like N in post-norm and like ln N in pre-norm models at the start. Source: arXiv
2004.08249, theorem 2; the constant 2 is derived here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.prediction.dependency import TOKENS, Rows, gather, given
from attoscope.prediction.dependency import Dependency as Dependency
from attoscope.prediction.dependency import residual_dependency as residual_dependency
from attoscope.trace.sublayers import Passing, Sublayer, sublayers, watch_sublayers
from attoscope.trace.types import Site
from attoscope.unchanged import first_output

Verdict = Literal["linear", "logarithmic", "too short"]
SHORT = 6


@dataclass(frozen=True, slots=True)
class Fit:
    """`intercept + slope g(n)` by least squares; `r2` is 1 where it is exact."""

    intercept: float
    slope: float
    r2: float


@dataclass(frozen=True, slots=True)
class Amplification:
    """What small changes of one stack's weights do to its output.

    `sums[i]` is `beta_{1,1}^2 + ... + beta_{i+1,i+1}^2`. `linear` and `logarithmic` are fits of
    the sums to `a + b n` and `a + b ln n`; `verdict` is the better one. It says how the sum grows
    along this stack; a constant factor on the skips makes it linear with a small slope, so read it
    with the sum itself: N/2 is what branches as large as the stream give in a post-norm model.
    """

    dependency: Dependency
    sums: Float[Tensor, " sublayer"]
    linear: Fit
    logarithmic: Fit
    verdict: Verdict

    @property
    def total(self) -> float:
        """`sum_i beta_{i,i}^2` of the whole stack."""
        return float(self.sums[-1])

    def predicted_change(self, eps: float) -> float:
        """`2 eps^2 D sum_i beta_{i,i}^2`: the squared change of the normalised output."""
        return 2 * eps**2 * self.dependency.width * self.total

    def __str__(self) -> str:
        stack, count = self.dependency.stack, len(self.sums)
        head = f"{stack}: own shares squared add up to {self.total:.2f} over {count} sub-layers"
        if self.verdict == "too short":
            return f"{head}; too few to say how they grow"
        fit = self.linear if self.verdict == "linear" else self.logarithmic
        word = "sub-layer" if self.verdict == "linear" else "e-fold of depth"
        return (
            f"{head}; they grow {self.verdict} with depth (by {fit.slope:.3f} per {word}, "
            f"R² {fit.r2:.3f}; linear {self.linear.r2:.3f}, logarithmic "
            f"{self.logarithmic.r2:.3f}). Relative noise of 1e-3 on the weights changes "
            f"the output by {math.sqrt(2 * self.total) * 1e-3:.1e} of its size."
        )


def amplification(
    model: Any, data: Any = None, *, tokens: int = TOKENS
) -> tuple[Amplification, ...]:
    """The amplification of each stack, from one run; arguments and errors of
    `residual_dependency`."""
    return tuple(_amplified(each) for each in residual_dependency(model, data, tokens=tokens))


def _amplified(dependency: Dependency) -> Amplification:
    sums = dependency.own.square().cumsum(0)
    count = np.arange(1, len(sums) + 1, dtype=np.float64)
    linear, logarithmic = fit(count, sums.numpy()), fit(np.log(count), sums.numpy())
    verdict: Verdict = "linear" if linear.r2 >= logarithmic.r2 else "logarithmic"
    return Amplification(
        dependency, sums, linear, logarithmic, verdict if len(sums) >= SHORT else "too short"
    )


def fit(x: np.ndarray, y: np.ndarray) -> Fit:
    """A line through points."""
    if len(x) < 2:
        return Fit(float(y[0]), 0.0, 1.0)
    slope, intercept = np.polyfit(x, y, 1)
    rest, spread = float(((y - intercept - slope * x) ** 2).sum()), float(y.var() * len(y))
    return Fit(float(intercept), float(slope), 1 - rest / spread if spread > 0 else 1.0)


@dataclass(frozen=True, slots=True)
class OutputChange:
    """Measured changes of one stack under random changes of its weights.

    `changes[s, i]` is the squared change of the stream after sub-layer i + 1, normalised per
    token (mean 0 and variance 1; RMS 1 for RMSNorm), summed over features and averaged over
    tokens, in draw s. The last column is the output's.
    """

    stack: str
    sites: tuple[Site, ...]
    eps: float
    width: int
    changes: Float[Tensor, "sample sublayer"]

    @property
    def relative(self) -> Float[Tensor, "sample sublayer"]:
        """`changes / (eps^2 D)`: about `2 sum beta_{i,i}^2` by the theorem."""
        return self.changes / (self.eps**2 * self.width)

    @property
    def mean(self) -> float:
        """Mean of the output's change over draws."""
        return float(self.changes[:, -1].mean())

    @property
    def median(self) -> float:
        """Median of the output's change: for post-norm stacks above 100 sub-layers, which are
        heavy-tailed."""
        return float(self.changes[:, -1].median())

    @property
    def standard_error(self) -> float:
        """Of the mean; NaN for one draw."""
        return float(self.changes[:, -1].std() / math.sqrt(len(self.changes)))


def output_change(
    model: Any,
    data: Any = None,
    *,
    eps: float = 1e-3,
    samples: int = 16,
    tokens: int = TOKENS,
    seed: int = 0,
    found: tuple[Sublayer, ...] | None = None,
) -> tuple[OutputChange, ...]:
    """Change every weight matrix W of the sub-layers by `eps std(W) N(0, 1)` and measure.

    Dropout is off, inputs are the same, embeddings stay. The weights come back bit for bit. One
    run per draw. A post-norm stack above 100 sub-layers is chaotic for eps towards 0: take the
    median, or an eps such as 0.05.

    Raises `AttoscopeError` for an eps that is not positive or no draw; else as
    `residual_dependency`.
    """
    if not eps > 0 or samples < 1:
        raise AttoscopeError(
            f"output_change: got eps={eps} and samples={samples}; expected both above 0"
        )
    subject, batch = given(model, data)
    found = sublayers(subject, batch) if found is None else found
    plain = _normalised(gather(subject, batch, tokens, found))
    generator = torch.Generator().manual_seed(seed)
    changes: dict[str, list[Tensor]] = {stack: [] for stack in plain}
    for _ in range(samples):
        with _changed(subject.model, found, eps, generator):
            moved = _normalised(gather(subject, batch, tokens, found))
        for stack, streams in plain.items():
            difference = (moved[stack] - streams).square().sum(-1).mean(-1)
            changes[stack].append(difference.cpu())
    return tuple(
        OutputChange(
            stack, tuple(one.site for one in found if one.site.stack == stack), eps,
            streams.shape[-1], torch.stack(changes[stack]),
        )
        for stack, streams in plain.items()
    )  # fmt: skip


def _normalised(
    gathered: dict[str, list[Rows]],
) -> dict[str, Float[Tensor, "sublayer token width"]]:
    return {
        stack: torch.stack([_unit(one.after, one.sublayer) for one in rows])
        for stack, rows in gathered.items()
    }


def _unit(rows: Float[Tensor, "token width"], one: Sublayer) -> Float[Tensor, "token width"]:
    middle = rows if one.norm_kind == "rms" else rows - rows.mean(-1, keepdim=True)
    return middle / middle.square().mean(-1, keepdim=True).sqrt()


@contextmanager
def _changed(
    model: nn.Module, found: tuple[Sublayer, ...], eps: float, generator: torch.Generator
) -> Iterator[None]:
    """Every matrix of the sub-layers with noise on it; put back from copies after."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(matrix.name for one in found for matrix in one.matrices)
    kept = {name: parameters[name].detach().clone() for name in names}
    try:
        with torch.no_grad():
            for name, weight in kept.items():
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                parameters[name].add_(eps * weight.std() * noise)
        yield
    finally:
        with torch.no_grad():
            for name, weight in kept.items():
                parameters[name].copy_(weight)


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """`norms[i]` is `||dL/dx_i||` over all valid tokens, x_i the stream that sub-layer i + 1
    reads; NaN where a sum is made in place."""

    stack: str
    sites: tuple[Site, ...]
    norms: Float[Tensor, " sublayer"]

    @property
    def ratio(self) -> float:
        """First over last: far below 1 where gradients vanish towards the input."""
        return float(self.norms[0] / self.norms[-1])


def sublayer_gradient_norms(
    model: Any, data: Any = None, *, loss: Callable[[Any], Tensor] | None = None, seed: int = 0
) -> tuple[GradientNorms, ...]:
    """Gradient norms of each stack's stream from one backward pass, dropout off.

    Args:
        loss: a function from the model's output to a scalar. Without one it is the output's own
            `loss`, where the batch has labels, else the first output's inner product with a
            fixed random direction of variance 1 per number.
        model: as for `residual_dependency`.
        data: as for `residual_dependency`.
        seed: of the direction.
    """
    subject, batch = given(model, data)

    def default(output: Any) -> Tensor:
        own = getattr(output, "loss", None)
        if isinstance(own, Tensor):
            return own
        first = first_output(output)
        if first is None:
            raise AttoscopeError("loss: the model returned no tensor of numbers; give a loss")
        generator = torch.Generator().manual_seed(seed)
        return (first * torch.randn(first.shape, generator=generator).to(first)).sum()

    found: dict[str, list[tuple[Site, float]]] = {}

    def visit(one: Passing) -> None:
        gradient = one.before_gradient
        size = math.nan if gradient is None else float(gradient[one.valid].double().norm())
        found.setdefault(one.sublayer.site.stack, []).append((one.sublayer.site, size))

    watch_sublayers(subject, batch, visit, gradient=loss or default)
    return tuple(
        GradientNorms(
            stack, tuple(site for site, _ in pairs), torch.tensor([size for _, size in pairs])
        )
        for stack, pairs in found.items()
    )
