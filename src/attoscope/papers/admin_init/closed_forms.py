"""Independent branches of one variance: the shares and their sums have closed forms."""

from __future__ import annotations

import math
from typing import Any

import altair as alt
import torch
import torch.nn.functional as F
from torch import Tensor

from attoscope.papers.admin_init._paper import PAPER
from attoscope.papers.admin_init._stacks import seeds
from attoscope.papers.base import Control, Evidence, Run
from attoscope.remedies.admin import closed_form

DEPTHS = (2, 6, 12, 24, 48)
TOKENS, WIDTH = 8, 2048
CLOSE = 0.02


def expected(depth: int) -> dict[str, float]:
    """Sums of squared own shares for branches of variance 1 on a stream of variance 1."""
    harmonic = sum(1 / k for k in range(2, depth + 2))
    return {
        "Pre-LN": harmonic,
        "Post-LN": depth / 2,
        "Admin": harmonic,
        "O(log n)": depth * math.log(depth + 1) / (depth + 1),
        "O(1)": depth / (depth + 1),
    }


def measured(item: dict[str, Any]) -> dict[str, float]:
    """The same from random tokens and branches: sums of `Var(a_i) / Var(sum_i)`."""
    depth, seed = item["depth"], item["seed"]
    generator = torch.Generator().manual_seed(seed)
    first, *branches = (_tokens(generator) for _ in range(depth + 1))
    if item["same"]:
        branches = [first] * depth
    profiled = [math.sqrt(1 + i) for i in range(depth)]
    return {
        "Pre-LN": _shares(first, branches, None),
        "Post-LN": _shares(first, branches, [1.0] * depth),
        "Admin": _shares(first, branches, profiled),
        "O(log n)": _shares(first, branches, [closed_form(depth, "O(logn)")] * depth),
        "O(1)": _shares(first, branches, [closed_form(depth, "O(1)")] * depth),
    }


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def _shares(first: Tensor, branches: list[Tensor], omegas: list[float] | None) -> float:
    """Post-norm with these factors on the skips, pre-norm without any."""
    stream, total = first, 0.0
    for i, branch in enumerate(branches):
        added = branch + (stream if omegas is None else omegas[i] * stream)
        total += float((branch.std(-1).mean() / added.std(-1).mean()) ** 2)
        stream = added if omegas is None else F.layer_norm(added, (WIDTH,))
    return total


@PAPER.claim(
    name="closed-form-shares",
    statement="With independent branches as large as the stream the squared own shares add up to "
    "H(N+1) - 1 in Pre-LN and with Admin's profiled factors, to N/2 in Post-LN, and with the "
    "closed-form factors to N ln(N+1)/(N+1) and N/(N+1).",
    source="The two corollaries of theorem 2, O(log N) and O(N); the exact sums are derived here, "
    "and the closed-form factors are those of admin-torch",
    criterion=f"at N of {', '.join(map(str, DEPTHS))} each sum is within {CLOSE:.0%} of its closed "
    f"form (means over seeds; {TOKENS} tokens of width {WIDTH})",
)
def closed_form_shares(run: Run) -> Evidence:
    drawn = seeds(run, quick=5, paper=20)
    found = _means(run, drawn, same=False)
    same = _means(run, drawn, same=True)
    return Evidence(
        measured={"largest_error": _error(found), "seeds": len(drawn)},
        holds=_error(found) <= CLOSE,
        control=Control(
            "every branch the same as the first stream, so that none is independent",
            {"largest_error": _error(same)},
            fails=_error(same) > CLOSE,
        ),
        figure=_figure(found),
        table=[
            {"depth": depth, "model": name, "sum": value, "closed_form": expected(depth)[name]}
            for depth, sums in found.items()
            for name, value in sums.items()
        ],
    )


def _means(run: Run, drawn: list[int], *, same: bool) -> dict[int, dict[str, float]]:
    items = [{"depth": n, "seed": seed, "same": same} for n in DEPTHS for seed in drawn]
    results = run.map(measured, items, label="independent branches")
    found = {}
    for i, depth in enumerate(DEPTHS):
        mine = results[i * len(drawn) : (i + 1) * len(drawn)]
        found[depth] = {k: sum(one[k] for one in mine) / len(mine) for k in mine[0]}
    return found


def _error(found: dict[int, dict[str, float]]) -> float:
    return max(
        abs(value / expected(depth)[name] - 1)
        for depth, sums in found.items()
        for name, value in sums.items()
    )


def _figure(found: dict[int, dict[str, float]]) -> Any:
    rows = [
        {"sub-layers": depth, "model": name, "sum": value, "closed form": expected(depth)[name]}
        for depth, sums in found.items()
        for name, value in sums.items()
    ]
    base = alt.Chart(alt.Data(values=rows), width=400, height=280).encode(
        x=alt.X("sub-layers:Q", scale=alt.Scale(type="log")),
        color=alt.Color("model:N", title="model"),
    )
    title = "sum of squared own shares"
    scale = alt.Scale(type="log")
    return alt.layer(
        base.mark_line().encode(y=alt.Y("closed form:Q", title=title, scale=scale)),
        base.mark_point().encode(y=alt.Y("sum:Q", title=title, scale=scale)),
    )
