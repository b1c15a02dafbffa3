"""How much each residual branch contributes to the stream after each sub-layer: exactly.

The stream after sub-layer i is a sum of what x_0 and the branches 1..i have become on the way, as
a norm with its statistics held fixed is a linear map. `beta_{i,j} = std(part j) / std(x_i)`, with
standard deviations over features and means over tokens. Source: arXiv 2004.08249 (there without
the statistics of the norms; exact here).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.probe import made_up
from attoscope.trace import Batch, Subject, batches
from attoscope.trace.subject import subject_of
from attoscope.trace.sublayers import Passing, Sublayer, sublayers, watch_sublayers
from attoscope.trace.types import Site

TOKENS = 256
_EPS_NAMES = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True, slots=True)
class Dependency:
    """One stack's beta.

    `beta[i, j]` is the share, in standard deviations, of part j in the stream after sub-layer
    i + 1: part 0 is the stream that enters the first sub-layer, part j the branch of sub-layer j;
    0 above the diagonal. `error` is the largest difference between the sum of the parts and
    the stream, over the stream's standard deviation: rounding where the decomposition is right.
    `tokens` of width `width` were looked at.
    """

    stack: str
    sites: tuple[Site, ...]
    beta: Float[Tensor, "sublayer part"]
    error: float
    tokens: int
    width: int

    @property
    def own(self) -> Float[Tensor, " sublayer"]:
        """`beta_{i,i}`: the share of each branch in the output of its own sub-layer."""
        return self.beta[:, 1:].diagonal()

    @property
    def squares(self) -> Float[Tensor, " sublayer"]:
        """`sum_j beta_{i,j}^2`: 1 where the parts are uncorrelated. Far from 1, the shares are
        not shares of a variance."""
        return self.beta.square().sum(1)

    def __str__(self) -> str:
        low, high = float(self.squares.min()), float(self.squares.max())
        lines = [
            f"{self.stack}: {len(self.sites)} sub-layers, sum of squares {low:.2f} to {high:.2f} "
            "(1: uncorrelated branches)"
        ]
        lines += [
            f"  {site}: own share {own:.2f}, of the first stream {first:.2f}"
            for site, own, first in zip(
                self.sites, self.own.tolist(), self.beta[:, 0].tolist(), strict=True
            )
        ]
        return "\n".join(lines)


def residual_dependency(
    model: Any,
    data: Any = None,
    *,
    tokens: int = TOKENS,
    found: tuple[Sublayer, ...] | None = None,
) -> tuple[Dependency, ...]:
    """The dependency of each stack, from one run on the first batch of the data, dropout off.

    Pre-norm, post-norm, RMSNorm, sandwich norms and factors on the skip (one number, or one per
    feature) are followed exactly; padding is left out. Costs N^2 / 2 maps of the `tokens`, N the
    number of sub-layers.

    Args:
        model: a torch module, a `Subject`, or what `attoscope.diagnose` loads.
        data: as for `attoscope.diagnose`; made up for a Hugging Face model where it is None.
        tokens: look at this many valid tokens at most, evenly spaced over the batch.
        found: the model's sub-layers, where they are known already (saves a run).

    Raises `AttoscopeError` where sub-layers cannot be recognised, or the stream changes between
    two of them in another way than by a factor.
    """
    subject, batch = given(model, data)
    gathered = gather(subject, batch, tokens, found)
    return tuple(_dependency(stack, rows, subject) for stack, rows in gathered.items())


@dataclass(slots=True)
class Rows:
    """One sub-layer's skip, branch and sum at the chosen tokens, in float64."""

    sublayer: Sublayer
    before: Float[Tensor, "token width"]
    branch: Float[Tensor, "token width"]
    after: Float[Tensor, "token width"]
    dtype: torch.dtype


def given(model: Any, data: Any) -> tuple[Subject, Batch]:
    """The model and one batch for it."""
    subject = subject_of(model)
    return subject, next(iter(batches(subject, made_up(subject) if data is None else data)))


def gather(
    subject: Subject, batch: Batch, tokens: int, found: tuple[Sublayer, ...] | None = None
) -> dict[str, list[Rows]]:
    """Every sub-layer's rows at the same valid tokens, by stack, in the order of the run."""
    if tokens < 1:
        raise AttoscopeError(f"tokens: got {tokens}; expected at least 1")
    found = sublayers(subject, batch) if found is None else found
    made: dict[str, list[Rows]] = {}

    def visit(one: Passing) -> None:
        chosen = one.valid.flatten().nonzero()[:, 0]
        if len(chosen) > tokens:
            chosen = chosen[torch.linspace(0, len(chosen) - 1, tokens).long()]

        def rows(tensor: Tensor) -> Tensor:
            return tensor.flatten(0, 1)[chosen].double()

        made.setdefault(one.sublayer.site.stack, []).append(
            Rows(
                one.sublayer,
                rows(one.before),
                rows(one.branch),
                rows(one.after),
                one.after.dtype,
            )  # fmt: skip
        )

    watch_sublayers(subject, batch, visit, found=found)
    for one in (one for rows in made.values() for one in rows):
        if not bool(one.after.isfinite().all()):
            raise AttoscopeError(
                f"{one.sublayer.site}: the stream after it is not finite; expected numbers: load "
                "the model in float32, and look at its weights and inputs"
            )
    return made


def _dependency(stack: str, rows: list[Rows], subject: Subject) -> Dependency:
    count, width = len(rows), rows[0].after.shape[-1]
    beta = torch.zeros(count, count + 1, dtype=torch.float64)
    parts, bias = rows[0].before[None], torch.zeros_like(rows[0].before)
    stream, error = rows[0].before, 0.0
    for i, one in enumerate(rows):
        if i:
            factor = _factor(stream, one)
            parts, bias = parts * factor, bias * factor
        parts = torch.cat([parts, one.branch[None]])
        stream = one.after
        if one.sublayer.norm == "post":
            norm = FrozenNorm(_norm_of(subject.model, one.sublayer), one)
            parts, bias = norm.linear(parts), norm.linear(bias) + norm.bias
            stream = norm.output
        size = _std(stream)
        beta[i, : i + 2] = (_std(parts) / size).cpu()
        error = max(error, float((parts.sum(0) + bias - stream).abs().max() / size))
    return Dependency(
        stack, tuple(one.sublayer.site for one in rows), beta, error, len(stream), width
    )


def _std(rows: Float[Tensor, "*part token width"]) -> Float[Tensor, "*part"]:
    """Over features, mean over tokens."""
    return rows.std(-1).mean(-1)


class FrozenNorm:
    """A norm module at given tokens: the linear map that it is with its statistics held fixed.

    Raises `AttoscopeError` for a module that is not `gain (s - mean) / sqrt(var + eps) + bias`,
    or the same without the mean.
    """

    def __init__(self, module: nn.Module, one: Rows) -> None:
        total = one.after
        self.centred = one.sublayer.norm_kind != "rms"
        middle = self._middle(total)
        eps = next((getattr(module, n) for n in _EPS_NAMES if hasattr(module, n)), 0.0) or 0.0
        self.scale = (middle.square().mean(-1, keepdim=True) + eps).rsqrt()
        gain, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        width = total.shape[-1]
        self.gain = total.new_ones(width) if gain is None else gain.detach().double()
        self.bias = total.new_zeros(width) if bias is None else bias.detach().double()
        self.output = self.linear(total) + self.bias
        with torch.no_grad():
            real = module(total.to(one.dtype)).double()
        close = 0.05 if one.dtype in (torch.float16, torch.bfloat16) else 1e-3
        if not torch.allclose(real, self.output, rtol=close, atol=close):
            raise AttoscopeError(
                f"{one.sublayer.sum_norm}: got a norm that is not gain * (s - mean) / sqrt(var + "
                "eps) + bias; expected such a one, as nn.LayerNorm or an RMSNorm is"
            )

    def _middle(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(-1, keepdim=True) if self.centred else rows

    def linear(self, rows: Tensor) -> Tensor:
        """The map of a part of the sum."""
        return self._middle(rows) * self.scale * self.gain


def _norm_of(model: nn.Module, one: Sublayer) -> nn.Module:
    if one.sum_norm is None:
        raise AttoscopeError(
            f"{one.site}: its sum is normalised by a function, whose gain cannot be seen; expected "
            "a module, such as nn.LayerNorm"
        )
    return model.get_submodule(one.sum_norm)


def _factor(stream: Float[Tensor, "token width"], one: Rows) -> Float[Tensor, " width"]:
    """What stands in front of the skip: one number per feature, checked at every token."""
    square = stream.square().sum(0)
    ones = torch.ones_like(square)
    factor = torch.where(square > 0, (one.before * stream).sum(0) / square, ones)
    close = 0.05 if one.dtype in (torch.float16, torch.bfloat16) else 1e-3
    if not torch.allclose(factor * stream, one.before, rtol=close, atol=close):
        raise AttoscopeError(
            f"{one.sublayer.site}: the stream that it adds to is not what the sub-layer before "
            "gave, up to a factor; expected nothing else between two sub-layers of a stack"
        )
    return factor
