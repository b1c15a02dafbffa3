"""Signal propagation: what variance and gradients are predicted to do with depth, and do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attoscope.errors import AttoscopeError
from attoscope.prediction.branch_weights import BranchWeights, WeightReader
from attoscope.prediction.chain import Foreseen, Pair, score_variance, settled_correlation
from attoscope.prediction.growth import Growth, depth_verdict, r_squared
from attoscope.prediction.initialisers import (
    NAMES,
    Forecast,
    fits,
    foresee,
    initialised,
    layer_ends,
)
from attoscope.prediction.stream_moments import Measured, measure
from attoscope.trace.branch_types import Sublayer
from attoscope.trace.subject import Subject
from attoscope.trace.sublayers import find_sublayers
from attoscope.trace.types import Batch, Site

# The score spread above which a softmax is far from even, and a mean that is no longer small.
_SHARP, _SHIFTED = 1.5, 0.1


@dataclass(frozen=True, slots=True)
class Fit:
    """How far the prediction of a stack agrees with the measurement, over its layers.

    `r2` is that of the variance behind each layer, `r2_backward` that of ln of the gradient's
    variance in front of it; `error` and `error_backward` are the largest relative errors.
    """

    r2: float
    error: float
    r2_backward: float
    error_backward: float


@dataclass(frozen=True, slots=True)
class SublayerSignal:
    """One sub-layer: what was predicted of it, and what was measured (None where it was not)."""

    site: Site
    norm: str
    predicted: Foreseen | None
    measured: Measured | None


@dataclass(frozen=True, slots=True)
class StackSignal:
    """One stack. `reason` says why nothing is predicted, where nothing is.

    `forward` and `backward` are the verdicts on the predicted curves (on the measured ones where
    nothing is predicted); `measured_forward` and `measured_backward` on the measured ones.
    `settled` is where token correlation would settle if the last layer were repeated.
    """

    stack: str
    layers: int
    norm: str
    sublayers: tuple[SublayerSignal, ...]
    forward: Growth
    backward: Growth
    measured_forward: Growth | None
    measured_backward: Growth | None
    settled: float
    fit: Fit | None
    initialisers: tuple[Forecast, ...]
    warnings: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, eq=False)
class SignalPrediction:
    """The part on signal propagation, a stack at a time; `notes` say how it was obtained."""

    stacks: tuple[StackSignal, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """A few sentences for each stack."""
        from attoscope.prediction.signal_words import verdict

        return " ".join(map(verdict, self.stacks))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        from attoscope.prediction.signal_words import stack_to_dict

        return {
            "verdict": self.verdict,
            "notes": list(self.notes),
            "stacks": [stack_to_dict(stack) for stack in self.stacks],
        }

    def __str__(self) -> str:
        from attoscope.prediction.signal_words import lines

        return "\n".join(lines(self))


def signal_of(
    subject: Subject,
    read: Sequence[Batch],
    *,
    layers: int | None = None,
    init: str | None = None,
    seed: int = 0,
) -> SignalPrediction:
    """Predicted and measured signal propagation of a model on batches that are read as they are.

    Args:
        layers: the stack is taken to have so many, the last one repeated; nothing is measured
            then but the stream that enters the first.
        init: an initialiser by name: its variances take the place of the weights, and nothing is
            measured. seed: of the random gradient where there is no loss.
    """
    found = find_sublayers(subject, read[0])
    if not found.sublayers:
        raise AttoscopeError(
            f"{subject.name}: no residual branch was recognised ({found.notes[0]})"
        )
    measured = measure(subject, read, found.sublayers, gradients=layers is None, seed=seed)
    reader = WeightReader(subject, read[0])
    branches = [reader.read(one) for one in found.sublayers]
    layout = subject.layout(read[0])
    stacks = []
    for stack in layout.stacks:
        mine = [i for i, one in enumerate(found.sublayers) if one.site.stack == stack.name]
        if mine:
            here = _Stack(
                [branches[i] for i in mine], [measured[i] for i in mine],
                length_of(read, stack.length, stack.name in layout.readers), stack.causal,
            )  # fmt: skip
            stacks.append(here.signal(layers, init))
    return SignalPrediction(tuple(stacks), found.notes)


def length_of(read: Sequence[Batch], surveyed: int, reads_text: bool) -> int:
    """Tokens of a document, on average over the batches."""
    masks = [batch.valid for batch in read]
    if not reads_text or any(mask is None for mask in masks):
        return surveyed
    counts = [int(n) for mask in masks if mask is not None for n in mask.sum(1)]
    return max(1, round(sum(counts) / len(counts)))


class _Stack:
    """The branches of one stack with their measurements."""

    def __init__(
        self, branches: list[BranchWeights], measured: list[Measured], length: int, causal: bool
    ) -> None:
        self.branches, self.measured = branches, measured
        self.length, self.causal = length, causal
        skip = branches[0].skip
        entering = measured[0].before
        r0 = entering.correlation if math.isfinite(entering.correlation) else 0.0
        self.start = Pair(entering.variance / skip**2, r0)

    def signal(self, layers: int | None, init: str | None) -> StackSignal:
        whole, given = layers is None and init is None, self.measured if init is None else []
        branches: Sequence[BranchWeights] = repeated(self.branches, layers)
        reason = next((b.reason for b in branches if b.reason), "")
        if self.length < 2:
            reason = "documents of one token have no token correlation"
        elif not math.isfinite(self.start.variance):
            reason = "the stream that enters is not finite"
        first = branches[0].sublayer
        forward, backward = self._verdicts() if whole else (None, None)
        if reason:
            where = [f"{b.sublayer.site}: " for b in branches if b.reason][:1]
            return self._silent("".join([*where, reason]), forward, backward, whole)
        start, name = self.start, "own"
        if init is not None:
            if not fits(init, branches):
                raise AttoscopeError(
                    f"init: {init} is not for this stack ({first.norm}-norm); expected one of "
                    f"{', '.join(n for n in NAMES if fits(n, branches)) or 'none'}"
                )
            start, name = Pair(1.0, start.correlation), init
            branches = self._initialised(init, branches)
        made = foresee(name, branches, start, self._top(whole), self.length, self.causal)
        layer = branches[-1].sublayer.site.layer
        return StackSignal(
            stack=first.site.stack,
            layers=len({b.sublayer.site.layer for b in branches}),
            norm=first.norm,
            sublayers=tuple(
                SublayerSignal(b.sublayer.site, b.sublayer.norm, p, given[i] if whole else None)
                for i, (b, p) in enumerate(zip(branches, made.curves, strict=True))
            ),
            forward=made.forward,
            backward=made.backward,
            measured_forward=forward,
            measured_backward=backward,
            settled=settled_correlation(
                [b for b in branches if b.sublayer.site.layer == layer],
                length=self.length, causal=self.causal,
            ),
            fit=self._fit(made) if whole else None,
            initialisers=self._others(branches, init),
            warnings=self._warnings(branches, made),
        )  # fmt: skip

    def _initialised(
        self, name: str, branches: Sequence[BranchWeights]
    ) -> tuple[BranchWeights, ...]:
        r0 = self.start.correlation
        return initialised(name, branches, r0, length=self.length, causal=self.causal)

    def _top(self, whole: bool) -> Pair:
        """The gradient behind the last norm or sum; of size 1 where none was measured."""
        top = self.measured[-1].after_gradient
        if not whole or not (top.variance > 0 and math.isfinite(top.correlation)):
            return Pair(1.0, 0.0)
        last = self.branches[-1]
        if last.sublayer.norm == "post":
            seen = self.measured[-1].after.variance / last.sum_gain
            return Pair(top.variance * seen, top.correlation)
        return Pair(top.variance, top.correlation)

    def _others(
        self, branches: Sequence[BranchWeights], init: str | None
    ) -> tuple[Forecast, ...]:
        """What each initialiser that is made for such a stack would do."""
        start, top = Pair(1.0, self.start.correlation), self._top(init is None)
        made = []
        layers = len({b.sublayer.site.layer for b in branches})
        for name in NAMES:
            if (
                name == init
                or not fits(name, branches)
                or (name == "deepscalelm" and layers < 3)
            ):
                continue
            other = self._initialised(name, branches)
            made.append(
                foresee(
                    name, other, start, replace(top, variance=1.0), self.length, self.causal
                )
            )
        return tuple(made)

    def _verdicts(self) -> tuple[Growth, Growth]:
        first, last = self._ends()
        return (
            depth_verdict([self.measured[i].after.variance for i in last]),
            depth_verdict([self.measured[i].gradient.variance for i in first], backward=True),
        )

    def _ends(self) -> tuple[list[int], list[int]]:
        return layer_ends([m.sublayer.site.layer for m in self.measured])

    def _fit(self, made: Forecast) -> Fit:
        first, last = self._ends()
        seen = np.array([self.measured[i].after.variance for i in last])
        told = np.array([made.curves[i].after.variance for i in last])
        back = np.array([self.measured[i].gradient.variance for i in first])
        back_told = np.array([made.curves[i].gradient.variance for i in first])
        with np.errstate(divide="ignore", invalid="ignore"):
            return Fit(
                r_squared(seen, told),
                float(np.abs(told / seen - 1).max()),
                r_squared(np.log(back), np.log(back_told)),
                float(np.abs(back_told / back - 1).max()),
            )

    def _warnings(self, branches: Sequence[BranchWeights], made: Forecast) -> tuple[str, ...]:
        warned: dict[str, list[str]] = {}
        for branch, curve in zip(branches, made.curves, strict=True):
            site = str(branch.sublayer.site)
            for note in branch.notes:
                warned.setdefault(note, []).append(site)
            if branch.sublayer.kind == "attention":
                pre = branch.sublayer.norm == "pre"
                x = Pair(1.0 if pre else curve.before.variance, curve.before.correlation)
                if math.sqrt(max(score_variance(branch, x), 0.0)) > _SHARP:
                    text = (
                        f"scores spread by more than {_SHARP} standard deviations (predicted)"
                    )
                    warned.setdefault(text, []).append(site)
        for one in self.measured:
            if abs(one.before.mean) > _SHIFTED * math.sqrt(max(one.before.variance, 0.0)):
                text = f"the stream's mean is above {_SHIFTED} standard deviations"
                warned.setdefault(text, []).append(str(one.sublayer.site))
        return tuple(f"{text}: {_some(sites)}" for text, sites in warned.items())

    def _silent(
        self, reason: str, forward: Growth | None, backward: Growth | None, whole: bool
    ) -> StackSignal:
        """The stack without a prediction: what was measured, and why there is none."""
        unclear = Growth("unclear", math.nan, math.nan, {})
        first = self.branches[0].sublayer
        given = self.measured if whole else []
        return StackSignal(
            first.site.stack, len({m.sublayer.site.layer for m in self.measured}), first.norm,
            tuple(SublayerSignal(m.sublayer.site, m.sublayer.norm, None, m) for m in given),
            forward or unclear, backward or unclear, forward, backward, math.nan, None, (), (),
            reason,
        )  # fmt: skip


def repeated(branches: Sequence[BranchWeights], layers: int | None) -> list[BranchWeights]:
    """A stack of so many layers: the branches that there are, the last layer's over and over."""
    given = list(branches)
    if layers is None:
        return given
    last = given[-1].sublayer.site.layer
    block = [b for b in given if b.sublayer.site.layer == last]
    for layer in range(last + 1, layers):
        for branch in block:
            one: Sublayer = branch.sublayer
            site = replace(one.site, layer=layer)
            given.append(replace(branch, sublayer=replace(one, site=site)))
    return given


def _some(sites: Sequence[str]) -> str:
    shown = ", ".join(sites[:3])
    return shown if len(sites) <= 3 else f"{shown} and {len(sites) - 3} more"
