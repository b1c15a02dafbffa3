"""The part on signal propagation in words, as lines of text and as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from attoscope.prediction.growth import Growth
from attoscope.prediction.initialisers import Forecast
from attoscope.prediction.signal import SignalPrediction, StackSignal, SublayerSignal
from attoscope.words import many

# A gradient this much larger at one layer than at another is trouble worth a remedy.
_TROUBLE = 10.0


def verdict(stack: StackSignal) -> str:
    """What happens to the stream and to gradients, and what would prevent it."""
    head = f"{stack.stack.capitalize()} ({many(stack.layers, 'layer')}, {stack.norm}-norm):"
    if stack.reason:
        return f"{head} nothing can be predicted ({stack.reason})." + _happened(stack)
    ends = [one.predicted for one in stack.sublayers]
    first, last = ends[0], ends[-1]
    assert first is not None and last is not None
    parts = [
        f"{head} by its weights the stream's variance {_grows(stack.forward)}, and gradients "
        f"{_falls(stack.backward)}; token correlation goes from {first.before.correlation:.2f} to "
        f"{last.after.correlation:.2f} (it would settle at {stack.settled:.2f})."
    ]
    return " ".join([*parts, *_measured(stack), *_remedy(stack)])


def _grows(growth: Growth) -> str:
    if growth.kind == "conserved":
        return f"is conserved (within a factor of {growth.spread:.2f})"
    way = "grows" if growth.factor > 1 else "falls"
    how = {"linear": "linearly", "exponential": "exponentially"}.get(
        growth.kind, "without a law"
    )
    return f"{way} {how} ({_times(growth.factor)} from the first layer to the last)"


def _falls(growth: Growth) -> str:
    if growth.kind == "conserved":
        return f"are conserved (variance within a factor of {growth.spread:.2f})"
    laws = {"hyperbolic": "hyperbolically", "exponential": "exponentially"}
    how = laws.get(growth.kind, "without a law")
    way = "grow" if growth.factor < 1 else "vanish"
    size = 1 / growth.factor
    return f"{way} {how} towards the input (variance {_times(size)} that at the last layer)"


def _times(factor: float) -> str:
    return f"{factor:.3g} times" if math.isfinite(factor) else "an unknown number of times"


def _measured(stack: StackSignal) -> list[str]:
    if stack.fit is None:
        return []
    f = stack.fit
    forward, backward = _fit(f.r2, f.error), _fit(f.r2_backward, f.error_backward)
    return [
        f"Measured beside it: variance {forward}; ln of the gradient's variance {backward}."
    ]


def _fit(r2: float, error: float) -> str:
    """A curve that is flat has no R^2 to speak of; the largest error says what there is to say."""
    explained = f"R^2 {r2:.2f}, " if math.isfinite(r2) else ""
    return (
        f"{explained}off by at most {100 * error:.0f} %" if math.isfinite(error) else "unknown"
    )


def _happened(stack: StackSignal) -> str:
    if stack.measured_forward is None or stack.measured_backward is None:
        return ""
    return (
        f" Measured: the stream's variance {_grows(stack.measured_forward)}, and gradients "
        f"{_falls(stack.measured_backward)}."
    )


def _remedy(stack: StackSignal) -> list[str]:
    if not stack.initialisers or not stack.backward.spread > _TROUBLE:
        return []
    best = min(stack.initialisers, key=lambda one: one.backward.spread)
    if best.backward.spread >= stack.backward.spread / 2:
        return ["No initialiser known here is predicted to do much better."]
    return [
        f"Initialised by {best.name} gradients are predicted to stay within a factor of "
        f"{best.backward.spread:.3g} and the variance within {best.forward.spread:.3g}."
    ]


def lines(found: SignalPrediction) -> list[str]:
    """The verdicts, a table for each stack, forecasts of initialisers, warnings, notes."""
    out = [found.verdict]
    for stack in found.stacks:
        out += ["", *table(stack)]
        if stack.initialisers:
            out += ["", "Predicted with other initialisers (largest over smallest):"]
            out += [_forecast(one) for one in stack.initialisers]
        out += [f"  ! {warning}" for warning in stack.warnings]
    return [*out, *(f"  {note}" for note in found.notes)]


def _forecast(one: Forecast) -> str:
    return (
        f"  {one.name:<12} variance {one.forward.spread:>9.3g} ({one.forward.kind}), gradient "
        f"{one.backward.spread:>9.3g} ({one.backward.kind})"
    )


def table(stack: StackSignal, rows: int = 24) -> list[str]:
    """A line for each sub-layer, evenly picked where there are many: predicted (measured)."""
    picked = _evenly(stack.sublayers, rows)
    wide = max([len("sub-layer"), *(len(str(one.site)) for one in picked)])
    head = f"{'sub-layer':<{wide}}  {'variance behind':<21}  {'correlation':<15}  gradient in front"
    top = stack.sublayers[-1] if stack.sublayers else None
    return [f"{head}     predicted (measured)", *(_row(one, top, wide) for one in picked)]


def _row(one: SublayerSignal, top: SublayerSignal | None, wide: int) -> str:
    p, m = one.predicted, one.measured
    assert top is not None
    unit = top.measured.gradient.variance if top.measured else math.nan
    told = top.predicted.gradient.variance if top.predicted else math.nan
    variance = _pair(p.after.variance if p else None, m.after.variance if m else None, ".3g")
    correlation = _pair(
        p.after.correlation if p else None, m.after.correlation if m else None, ".2f"
    )
    gradient = _pair(
        p.gradient.variance / told if p else None,
        m.gradient.variance / unit if m and unit else None,
        ".3g",
    )
    return f"{one.site!s:<{wide}}  {variance:<21}  {correlation:<15}  {gradient}"


def _pair(predicted: float | None, measured: float | None, how: str) -> str:
    left = _number(predicted, how)
    return left if measured is None else f"{left} ({_number(measured, how)})"


def _number(value: float | None, how: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, how)


def _evenly(items: Sequence[SublayerSignal], most: int) -> list[SublayerSignal]:
    if len(items) <= most:
        return list(items)
    step = (len(items) - 1) / (most - 1)
    return [items[round(i * step)] for i in range(most)]


def stack_to_dict(stack: StackSignal) -> dict[str, Any]:
    """Plain data of a stack."""
    return {
        "stack": stack.stack,
        "layers": stack.layers,
        "norm": stack.norm,
        "reason": stack.reason,
        "forward": asdict(stack.forward),
        "backward": asdict(stack.backward),
        "measured_forward": stack.measured_forward and asdict(stack.measured_forward),
        "measured_backward": stack.measured_backward and asdict(stack.measured_backward),
        "settled_correlation": stack.settled,
        "fit": stack.fit and asdict(stack.fit),
        "warnings": list(stack.warnings),
        "initialisers": [
            {"name": o.name, "forward": asdict(o.forward), "backward": asdict(o.backward)}
            for o in stack.initialisers
        ],
        "sublayers": [_sublayer(one) for one in stack.sublayers],
    }


def _sublayer(one: SublayerSignal) -> dict[str, Any]:
    parts = ("before", "branch", "after", "gradient")
    return {
        "site": str(one.site),
        "norm": one.norm,
        "predicted": one.predicted and {p: asdict(getattr(one.predicted, p)) for p in parts},
        "measured": one.measured and {p: asdict(getattr(one.measured, p)) for p in parts},
    }
