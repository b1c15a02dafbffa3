"""Slices of the loss over queries and keys: flatter with the Gaussian, and not more convex."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import torch

from attoscope.papers.base import Control, Evidence, Fails, Run
from attoscope.papers.gd_dynamics._layer import (
    KERNELS,
    Array,
    descend,
    losses,
    normal,
    seeds,
    stacked,
)
from attoscope.papers.gd_dynamics._paper import PAPER

SAMPLES, TOKENS, WIDTH, SIZE, OUT = 4, 4, 16, 8, 3
# At 0.01 one draw in four blows up in the first stage.
RATE = 0.005
GRID = np.linspace(-1, 1, 21)
SETTING = (
    "values and output trained for 300 steps of 0.005 under softmax, then all weights for 1,500 "
    "under either kernel; 21 x 21 losses over (W^Q, W^K) along two random directions scaled to the "
    "weights' columns"
)


def sliced(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Per draw the loss slice after both stages, and its two statistics."""
    draws = [drawn(seed) for seed in item["seeds"]]
    weights = stacked(draws)
    x, y = weights.pop("x"), weights.pop("y")
    _, _, first = descend("softmax", x, y, weights, "VO", RATE, item["steps"][0])
    path, _, end = descend(item["kernel"], x, y, first, "QKVO", RATE, item["steps"][1])
    found = []
    for i, seed in enumerate(item["seeds"]):
        ways = np.random.default_rng([seed, 1])
        own = {name: weight[i : i + 1] for name, weight in end.items()}
        grid = surface(item["kernel"], x[i : i + 1], y[i : i + 1], own, ways)
        bends = np.concatenate([np.diff(grid, 2, axis=axis).ravel() for axis in (0, 1)])
        found.append({
            "grid": grid, "negative": float((bends < 0).mean()),
            "range": float(grid.max() - grid.min()), "loss": float(path[-1, i]),
        })  # fmt: skip
    return found


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """Tokens, targets and weights of one draw."""
    rng = np.random.default_rng(seed)
    shapes = {"Q": (WIDTH, SIZE), "K": (WIDTH, SIZE), "V": (WIDTH, SIZE), "O": (SIZE, OUT)}
    weights = {n: normal(rng, *shape) / shape[0] ** 0.5 for n, shape in shapes.items()}
    x, y = normal(rng, SAMPLES, TOKENS, WIDTH), normal(rng, SAMPLES, TOKENS, OUT)
    return {"x": x, "y": y, **weights}


def surface(
    kernel: str,
    x: torch.Tensor,
    y: torch.Tensor,
    weights: dict[str, torch.Tensor],
    rng: np.random.Generator,
) -> Array:
    """Losses over the grid, all at once."""
    a, b = (g.ravel() for g in torch.meshgrid(*2 * [torch.from_numpy(GRID)], indexing="ij"))
    moved = dict(weights)
    for name in "QK":
        weight = weights[name]
        ways = normal(rng, 2, *weight.shape[1:])
        ways = ways * weight.norm(dim=1, keepdim=True) / ways.norm(dim=1, keepdim=True)
        moved[name] = weight + a[:, None, None] * ways[0] + b[:, None, None] * ways[1]
    found = losses(kernel, x, y, moved)
    return found.reshape(len(GRID), len(GRID)).numpy()


def _found(run: Run) -> dict[str, list[dict[str, Any]]]:
    draws = seeds(run, "slices", quick=4, paper=20)
    items = [{"seeds": draws, "kernel": k, "steps": [300, 1500]} for k in KERNELS]
    return dict(zip(KERNELS, run.map(sliced, items, label="slices"), strict=True))


def _of(found: dict[str, list[dict[str, Any]]], kernel: str, name: str) -> Array:
    return np.array([each[name] for each in found[kernel]])


def _other(values: Array) -> Array:
    """The next draw's value, to compare a kernel with itself."""
    return np.roll(values, 1)


@PAPER.claim(
    name="gaussian-slices-are-flatter",
    statement="Slices of the loss over queries and keys span a smaller range with the Gaussian "
    "kernel than with softmax.",
    source="The loss-landscape figure, which calls the Gaussian smoother; how its directions are "
    "drawn is not known, and the statistic is ours",
    criterion=f"in every draw, the range of the Gaussian's slice is below that of softmax "
    f"({SETTING})",
)
def gaussian_slices_are_flatter(run: Run) -> Evidence:
    found = _found(run)
    soft, gauss = (_of(found, kernel, "range") for kernel in KERNELS)
    return Evidence(
        measured={"range_softmax": soft, "range_gaussian": gauss, "ratio": gauss / soft},
        holds=bool((gauss < soft).all()),
        control=Control(
            "softmax of another draw in place of the Gaussian",
            {"ratio": _other(soft) / soft},
            fails=not bool((_other(soft) < soft).all()),
        ),
        figure=_figure(found),
    )


@PAPER.claim(
    name="gaussian-slices-are-smoother",
    statement="Slices of the loss over queries and keys bend downwards in fewer places with the "
    "Gaussian kernel than with softmax.",
    source="The loss-landscape figure, with negative curvature as the statistic, which is ours",
    criterion=f"in every draw, the share of negative second differences is lower with the Gaussian "
    f"({SETTING})",
    expected=Fails(
        "it is higher: a bounded kernel is flat far out, and bends downwards on the way there; "
        "which landscape is smoother depends on the statistic",
        f"N = {SAMPLES}, n = {TOKENS}, D = {WIDTH}",
    ),
)
def gaussian_slices_are_smoother(run: Run) -> Evidence:
    found = _found(run)
    soft, gauss = (_of(found, kernel, "negative") for kernel in KERNELS)
    return Evidence(
        measured={"negative_share_softmax": soft, "negative_share_gaussian": gauss},
        holds=bool((gauss < soft).all()),
        control=Control(
            "softmax of another draw in place of the Gaussian",
            {"negative_share": _other(soft)},
            fails=not bool((_other(soft) < soft).all()),
        ),
        figure=_figure(found),
    )


def _figure(found: dict[str, list[dict[str, Any]]]) -> Any:
    rows = [
        {"kernel": kernel, "a": float(GRID[i]), "b": float(GRID[j]), "loss": float(loss)}
        for kernel, group in found.items()
        for i, line in enumerate(group[0]["grid"])
        for j, loss in enumerate(line)
    ]
    return (
        alt.Chart(alt.Data(values=rows), width=210, height=210)
        .mark_rect()
        .encode(
            x=alt.X("a:O", title="direction 1").axis(labels=False, ticks=False),
            y=alt.Y("b:O", title="direction 2", sort="descending").axis(
                labels=False, ticks=False
            ),
            color=alt.Color("loss:Q", title="loss (first draw)").scale(type="log"),
            column=alt.Column("kernel:N", title=None),
        )
    )
