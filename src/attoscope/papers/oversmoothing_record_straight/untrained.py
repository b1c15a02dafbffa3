"""Stacks of several heads and fresh weights: where the eigenvalues go, the tokens go."""

from __future__ import annotations

from typing import Any, NamedTuple

import altair as alt
import numpy as np
from numpy.typing import NDArray

from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.oversmoothing_record_straight._paper import PAPER
from attoscope.prediction.stacks import Maps, untrained_stack

Array = NDArray[np.float64]
MEASURES = ("cosine", "frequency_ratio", "effective_rank")


class Stack(NamedTuple):
    """Maps, gain of the norm, and the reported cosine, frequency ratio and effective rank."""

    maps: Maps
    gamma: float
    reported: tuple[float, ...]


SHARP = (-1 / 31, 31.8, 25.0)
SMOOTH = (0.998, 0.04, 2.9)
STACKS = (
    Stack("free", 1.0, (0.966, 0.18, 9.4)),
    Stack("smooth", 1.0, SMOOTH),
    Stack("sharpen", 1.0, SHARP),
    Stack("mixed", 1.0, (0.868, 0.38)),
    Stack("smooth", -1.0, SHARP),
    Stack("sharpen", -1.0, SMOOTH),
)


def curves(item: dict[str, Any]) -> Array:
    """The measures along depth, (measure, layers + 1)."""
    rng = np.random.default_rng(item["seed"])
    found = untrained_stack(rng, maps=item["maps"], gamma=item["gamma"])
    return np.stack([getattr(found, name) for name in MEASURES])


def sharpens(cosine: float, ratio: float) -> bool:
    """What the stack with eigenvalues in (-1, 0) must do."""
    return bool(cosine < 0.05 and ratio > 5)


@PAPER.claim(
    name="untrained-stacks",
    statement="Untrained stacks smooth with free and with positive eigenvalues and sharpen with "
    "negative ones; a negative gain of the norm in front turns one into the other.",
    source="arXiv 2401.04301, the parameterisation and the sign of the norm's weights; stack ours",
    criterion="after 48 layers, means over seeds: cosine above 0.9 (free), above 0.98 (smooth), "
    "below 0.05 (sharpen); frequency ratio below 0.3 (free), below 0.1 (smooth), above 5 "
    "(sharpen); with gain -1 the curves of smooth and sharpen swap to 1e-9 in every seed",
)
def untrained(run: Run) -> Evidence:
    number = run.pick(quick=5, paper=100)
    seeds = run.rng("stacks").integers(2**31, size=number).tolist()
    items = [
        {"seed": seed, "maps": stack.maps, "gamma": stack.gamma}
        for stack in STACKS
        for seed in seeds
    ]
    found = np.array(run.map(curves, items, label="stacks"))
    found = found.reshape(len(STACKS), number, len(MEASURES), -1)
    free, smooth, sharp, mixed = found[:4, :, :2, -1].mean(1)
    swap = max(_difference(found[4], found[2]), _difference(found[5], found[1]))
    return Evidence(
        measured={
            "seeds": number,
            "cosine": {"free": free[0], "smooth": smooth[0], "sharpen": sharp[0]},
            "frequency_ratio": {"free": free[1], "smooth": smooth[1], "sharpen": sharp[1]},
            "largest_difference_after_swap": swap,
        },
        holds=bool(
            free[0] > 0.9
            and free[1] < 0.3
            and smooth[0] > 0.98
            and smooth[1] < 0.1
            and sharpens(*sharp)
            and swap < 1e-9
        ),
        control=Control(
            "eigenvalues of both signs, from (-1, 1), held to what sharpen must do",
            {"cosine": mixed[0], "frequency_ratio": mixed[1], "reported": [0.868, 0.38]},
            fails=not sharpens(*mixed),
        ),
        figure=_figure(found[:, :, 0].mean(1)),
        table=_table(found[..., -1]),
    )


def _difference(a: Array, b: Array) -> float:
    return float((np.abs(a - b) / np.maximum(1.0, np.abs(b))).max())


def _table(ends: Array) -> list[dict[str, Any]]:
    """Mean and range over seeds of each measure, from (stack, seed, measure)."""
    rows = []
    for stack, values in zip(STACKS, ends, strict=True):
        row: dict[str, Any] = {"maps": stack.maps, "gain": stack.gamma}
        for i, name in enumerate(MEASURES):
            row |= {name: values[:, i].mean()}
            row |= {f"{name}_from": values[:, i].min(), f"{name}_to": values[:, i].max()}
        row |= {f"reported_{n}": v for n, v in zip(MEASURES, stack.reported, strict=False)}
        rows.append(row)
    return rows


def _figure(cosines: Array) -> Any:
    rows = [
        {"maps": stack.maps, "gain": f"{stack.gamma:+g}", "layer": i, "cosine": float(value)}
        for stack, values in zip(STACKS, cosines, strict=True)
        for i, value in enumerate(values)
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(
            x=alt.X("layer:Q", title="layers"),
            y=alt.Y("cosine:Q", title="mean cosine of tokens (mean over seeds)"),
            color=alt.Color(
                "maps:N", title="maps", sort=["free", "smooth", "sharpen", "mixed"]
            ),
            strokeDash=alt.StrokeDash("gain:N", title="gain of the norm", sort=["+1", "-1"]),
        )
        .properties(width=400, height=280)
    )
