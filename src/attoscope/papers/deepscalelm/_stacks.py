"""The stacks that the claims compare, as simulated and as foreseen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import altair as alt
import numpy as np

from attoscope.papers.base import Run
from attoscope.papers.deepscalelm._simulation import Array, simulate
from attoscope.prediction.propagation import (
    SignalProfile,
    SublayerPlan,
    initialiser_plans,
    propagate,
)

# Token correlation of the paper's input before dropout, and of the gradient at the top.
R0, RG, BATCH = 0.221, 0.2, 2


@dataclass(frozen=True, slots=True)
class Model:
    """An initialiser and where the norms are; `plain`: skip and branch are both 1."""

    initialiser: str
    norm: str
    plain: bool = False


XAVIER_PRE, XAVIER_POST = Model("xavier", "pre"), Model("xavier", "post")
DEEP_PRE, DEEP_POST = Model("deepscalelm", "pre"), Model("deepscalelm", "post")
UNSCALED = Model("deepscalelm", "pre", plain=True)
NAMES = {
    XAVIER_PRE: "Xavier Pre-LN",
    XAVIER_POST: "Xavier Post-LN",
    DEEP_PRE: "DeepScaleLM Pre-LN",
    DEEP_POST: "DeepScaleLM Post-LN",
    UNSCALED: "DeepScaleLM weights, skip and branch 1",
}
_BY_NAME = {name: model for model, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Size:
    """Layers, width, tokens and the rate of both dropouts."""

    layers: int
    width: int
    length: int
    rate: float = 0.1

    @property
    def r0(self) -> float:
        """Token correlation of the input, behind its dropout."""
        return R0 * (1 - self.rate)


def plans(model: Model, size: Size) -> tuple[SublayerPlan, ...]:
    """The sub-layers of a model: attention and a ReLU MLP of four times the width, in turn."""
    made = initialiser_plans(
        model.initialiser, size.layers, size.width, norm=model.norm, dropout=size.rate,
        attention_dropout=size.rate,
    )  # fmt: skip
    return tuple(replace(p, skip=1.0, branch=1.0) for p in made) if model.plain else made


@cache
def theory(model: Model, size: Size, *, corrected: bool = True) -> SignalProfile:
    """What is foreseen of a model."""
    return propagate(
        plans(model, size), r0=size.r0, rg=RG, length=size.length, corrected=corrected
    )


def curves(item: dict[str, Any]) -> dict[str, Array]:
    """One draw of a model: its measured curves, named as in `SignalProfile`."""
    size = Size(item["layers"], item["width"], item["length"], item["rate"])
    return simulate(
        plans(_BY_NAME[item["model"]], size), seed=item["seed"], r0=size.r0, rg=RG,
        length=size.length, batch=BATCH, heads=size.width // 64 or 1,
    )  # fmt: skip


def draws(
    run: Run, models: Sequence[Model], size: Size, number: int
) -> dict[Model, dict[str, Array]]:
    """Each model's curves, (draw, point)."""
    seeds = run.rng("stacks").integers(2**31, size=number).tolist()
    items = [
        {"model": NAMES[model], "layers": size.layers, "width": size.width,
         "length": size.length, "rate": size.rate, "seed": seed}
        for model in models
        for seed in seeds
    ]  # fmt: skip
    results = run.map(curves, items, label="stacks")
    found = {}
    for i, model in enumerate(models):
        mine = results[i * number : (i + 1) * number]
        found[model] = {name: np.stack([each[name] for each in mine]) for name in mine[0]}
    return found


def measure(
    run: Run, models: Sequence[Model], size: Size, number: int
) -> dict[Model, dict[str, Array]]:
    """Each model's curves, means over draws."""
    found = draws(run, models, size, number)
    return {
        model: {name: curve.mean(0) for name, curve in curves.items()}
        for model, curves in found.items()
    }


def ends(curve: Array) -> Array:
    """A curve of sub-layers at the end of each layer."""
    return curve[1::2]


def starts(curve: Array) -> Array:
    """A curve of points in front of each layer."""
    return curve[:-1:2]


def error(measured: Array, foreseen: Array) -> float:
    """The largest relative error."""
    return float(np.abs(foreseen / measured - 1).max())


def r_squared(measured: Array, foreseen: Array) -> float:
    """The share of the measured curve's variance that is foreseen."""
    return float(
        1 - ((measured - foreseen) ** 2).sum() / ((measured - measured.mean()) ** 2).sum()
    )


def figure(rows: list[dict[str, Any]], y: str, title: str, *, log: bool = True) -> Any:
    """Measured dots and foreseen lines against layers, a colour a model."""
    base = alt.Chart(alt.Data(values=rows), width=400, height=280).encode(
        x=alt.X("layer:Q", title="layer"),
        y=alt.Y(f"{y}:Q", title=title).scale(type="log" if log else "linear"),
        color=alt.Color("model:N", title="model", sort=None),
    )
    dots = base.mark_circle(size=20).transform_filter(alt.datum.kind == "measured")
    line = base.mark_line().transform_filter(alt.datum.kind == "foreseen")
    return alt.layer(line, dots)


def rows(name: str, y: str, measured: Array, foreseen: Array) -> list[dict[str, Any]]:
    """A figure's rows for one model, from layer 1 on."""
    return [
        {"model": name, "kind": kind, "layer": i + 1, y: float(value)}
        for kind, curve in (("measured", measured), ("foreseen", foreseen))
        for i, value in enumerate(curve)
    ]
