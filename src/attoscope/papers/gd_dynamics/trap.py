"""Equal value rows: softmax stands still whatever its queries and keys, the Gaussian does not."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import torch

from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.gd_dynamics._layer import (
    DERIVED,
    Array,
    descend,
    normal,
    seeds,
    stacked,
    thinned,
)
from attoscope.papers.gd_dynamics._paper import PAPER

WIDTH, SIZE, RATE, STEPS = 8, 4, 0.02, 6000
SCALES = torch.tensor([[0.4, 0.9, 1.4], [0.6, 1.2, 1.8]], dtype=torch.float64)
STUCK = [("softmax", "Q"), ("softmax", "QK")]
FREE = [("gaussian", "Q"), ("gaussian", "QK"), ("gaussian", "QKVO"), ("softmax", "QKVO")]
NEAR, ZERO = 1e-12, 1e-20


def drawn(seed: int, odd: bool) -> dict[str, torch.Tensor]:
    """Tokens with `u x = 1` (`odd`: but the first), values `u v^T`, targets `c_k v`."""
    rng = np.random.default_rng(seed)
    u = normal(rng, WIDTH)
    u = u / u.norm()
    x, v = normal(rng, 2, 3, WIDTH), normal(rng, SIZE)
    x = x - (x @ u)[..., None] * u + u
    if odd:
        x[:, 0] += 0.5 * u
    return {
        "x": x, "y": SCALES[..., None] * v, "V": torch.outer(u, v),
        "O": torch.eye(SIZE, dtype=torch.float64),
        "Q": 0.2 * normal(rng, WIDTH, SIZE), "K": 0.2 * normal(rng, WIDTH, SIZE),
        "formula": (SCALES - 1).square().sum() / 2 * v.square().sum(),
    }  # fmt: skip


def trained(item: dict[str, Any]) -> dict[str, Any]:
    """Losses along gradient descent, the gradient at its end, and the formula."""
    weights = stacked([drawn(seed, item["odd"]) for seed in item["seeds"]])
    x, y, formula = (weights.pop(name) for name in ("x", "y", "formula"))
    path, slope, _ = descend(
        item["kernel"], x, y, weights, item["trained"], RATE, item["steps"]
    )
    away = np.abs(path / formula.numpy() - 1).max(0)
    return {"path": path, "slope": slope, "away": away, "formula": formula.numpy()}


@PAPER.claim(
    name="softmax-sticks",
    statement="Where all value rows are equal, softmax attention stands still under training of "
    "queries and keys, at a loss above 0; the Gaussian kernel reaches 0, and so does softmax when "
    "its values are trained as well.",
    source=f"Claim 2 of the abstract, on the choice of kernel; the point itself is {DERIVED}",
    criterion=f"in every draw: softmax with Q, or Q and K trained keeps "
    f"1/2 sum (c - 1)^2 |v|^2 within {NEAR:g} of it at every step, with a gradient below "
    f"{NEAR:g}; the Gaussian with Q trained ends below that (how far depends on the keys, which "
    "stay as drawn); the Gaussian with Q and K, or all trained, and softmax with all trained end "
    f"below {ZERO:g} after {STEPS:,} steps",
)
def softmax_sticks(run: Run) -> Evidence:
    draws = seeds(run, "trap", quick=3, paper=20)
    shared = {"seeds": draws, "odd": False}
    short = run.pick(quick=STEPS // 6, paper=STEPS)  # of what stands still
    items = [{"kernel": k, "trained": t, **shared, "steps": short} for k, t in STUCK]
    items += [{"kernel": k, "trained": t, **shared, "steps": STEPS} for k, t in FREE]
    odd = {"kernel": "softmax", "trained": "QK", **shared, "odd": True, "steps": 0}
    *found, moved = run.map(trained, [*items, odd], label="trap")
    stuck, free = found[: len(STUCK)], found[len(STUCK) :]
    ends = {f"{k} {t}": f["path"][-1] for (k, t), f in zip(FREE, free, strict=True)}
    lower, *zero = ends.values()
    away = max(f["away"].max() for f in stuck)
    slope = max(f["slope"].max() for f in stuck)
    return Evidence(
        measured={
            "draws": len(draws),
            "least_stuck_loss": min(f["formula"].min() for f in stuck),
            "largest_relative_change_while_stuck": away,
            "largest_gradient_while_stuck": slope,
        }
        | {f"largest end, {name}": end.max() for name, end in ends.items()}
        | {f"share at 0, {name}": (end < ZERO).mean() for name, end in ends.items()},
        holds=bool(away < NEAR and slope < NEAR)
        and bool((lower < free[0]["formula"]).all())
        and all((end < ZERO).all() for end in zero),
        control=Control(
            "one value row differs: softmax with Q and K trained, at the start",
            {"least_gradient": moved["slope"].min(), "least_change": moved["away"].min()},
            fails=bool((moved["slope"] >= NEAR).all() and (moved["away"] >= NEAR).all()),
        ),
        figure=_figure(found),
    )


def _figure(found: list[dict[str, Any]]) -> Any:
    rows = [
        {"training": f"{kernel}, {' '.join(trained)}", **row}
        for (kernel, trained), each in zip((*STUCK, *FREE), found, strict=True)
        for row in thinned(_finite(each["path"]))
    ]
    return (
        alt.Chart(alt.Data(values=rows), width=400, height=280)
        .mark_line()
        .encode(
            x=alt.X("step:Q", title="step").scale(type="log"),
            y=alt.Y("loss:Q", title="loss").scale(type="log"),
            color=alt.Color("training:N", title="kernel, trained", sort=None),
            detail="draw:N",
        )
    )


def _finite(path: Array) -> Array:
    return np.nan_to_num(path, nan=1e30, posinf=1e30)
