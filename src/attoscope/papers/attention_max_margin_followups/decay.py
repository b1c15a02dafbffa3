"""Factors by themselves: the l1 bias of small starts, and weight decay as a nuclear norm."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp

from attoscope.dynamics import balance, nuclear_gap
from attoscope.papers.attention_max_margin_followups._paper import PAPER
from attoscope.papers.base import Control, Evidence, Run

Array = NDArray[np.float64]
CONSTRAINT = np.array([2.0, 1.0])
MARGIN = 60.0
REPORTED_SHARES = {1e-3: 0.9998, 0.1: 0.982, 1.0: 0.840, 3.0: 0.615}
TARGET = np.array([0.2, 0.4, 0.6, 0.8, 1.0])
STEP, STEPS = 0.05, 10000


def diagonal_flow(start: float, margin: float = MARGIN) -> Array:
    """The diagonal w = k q of a product when gradient flow from k = q = start reaches a margin.

    In the time s that the slope of any loss measures, dk = b q and dq = b k for the one constraint
    b, hence w = start^2 e^{2 b s}.
    """

    def short(s: float) -> float:
        return float(logsumexp(2.0 * CONSTRAINT * s, b=start**2 * CONSTRAINT) - np.log(margin))

    end = (np.log(margin) - 2.0 * np.log(start)) / (2.0 * CONSTRAINT.min())
    return np.asarray(start**2 * np.exp(2.0 * CONSTRAINT * brentq(short, 0.0, end, xtol=1e-14)))


@PAPER.claim(
    name="small-start",
    statement="Gradient flow on a diagonal product minimises the nuclear norm if it starts small, "
    "and forgets that bias if it starts large.",
    source="arXiv 2403.08699, diagonal case",
    criterion="with the one constraint (2, 1), at margin 60, the first coordinate has at least "
    "0.999 of the sum from a start of 1e-3, and less from each larger start",
)
def small_start(run: Run) -> Evidence:
    diagonals = {start: diagonal_flow(start) for start in REPORTED_SHARES}
    shares = np.array([w[0] / w.sum() for w in diagonals.values()])
    merged = MARGIN * CONSTRAINT / (CONSTRAINT @ CONSTRAINT)
    share = float(merged[0] / merged.sum())
    return Evidence(
        measured={"shares": shares, "reported_shares": list(REPORTED_SHARES.values())},
        holds=bool(shares[0] >= 0.999 and (np.diff(shares) < 0.0).all()),
        control=Control(
            "gradient flow on the product itself, which goes along the constraint",
            {"share": share},
            fails=share < 0.999,
        ),
        figure=_share_figure(),
        table=[
            {"start": start, "diagonal": w, "share": w[0] / w.sum(), "reported_share": reported}
            for (start, w), reported in zip(
                diagonals.items(), REPORTED_SHARES.values(), strict=True
            )
        ],
    )


def descend(item: dict[str, Any]) -> dict[str, Any]:
    """Gradient descent on `||A B^T - D||_F^2 + decay/2 (||A||_F^2 + ||B||_F^2)`, random start."""
    rng, decay, target = np.random.default_rng(item["seed"]), item["decay"], np.diag(TARGET)
    a, b = 0.5 * rng.standard_normal((2, len(TARGET), len(TARGET)))
    marks = set(np.unique(np.geomspace(1, STEPS, 80).astype(int)).tolist())
    seen = []
    for number in range(1, STEPS + 1):
        error = 2.0 * (a @ b.T - target)
        a, b = a - STEP * (error @ b + decay * a), b - STEP * (error.T @ a + decay * b)
        if number in marks:
            seen.append((number, float(nuclear_gap(a, b)), float(balance(a, b))))
    return {"singular": np.linalg.svd(a @ b.T, compute_uv=False), "path": np.array(seen)}


@PAPER.claim(
    name="decay-is-nuclear",
    statement="Weight decay on two factors is nuclear-norm regularisation of their product: it "
    "subtracts the same from every singular value and balances the factors.",
    source="arXiv 2410.23819",
    criterion="singular values are max(d - decay/2, 0) within 1e-6, the nuclear gap is at most "
    "1e-9 and the balance at most 1e-9, for decay 0.2 and 1",
)
def decay_is_nuclear(run: Run) -> Evidence:
    decays = (0.2, 1.0, 0.0)
    seeds = run.rng("starts").integers(2**31, size=run.pick(quick=2, paper=10)).tolist()
    items = [{"decay": decay, "seed": seed} for decay in decays for seed in seeds]
    results = run.map(descend, items, label="starts")
    table = []
    for item, found in zip(items, results, strict=True):
        expected = np.sort(np.maximum(TARGET - item["decay"] / 2.0, 0.0))[::-1]
        table.append(
            {
                "decay": item["decay"],
                "singular_values": found["singular"],
                "error": abs(found["singular"] - expected).max(),
                "nuclear_gap": found["path"][-1, 1],
                "balance": found["path"][-1, 2],
            }
        )

    def passes(row: dict[str, Any]) -> bool:
        return bool(row["error"] < 1e-6 and max(row["nuclear_gap"], row["balance"]) <= 1e-9)

    with_decay = [row for row in table if row["decay"] > 0.0]
    without = [row for row in table if row["decay"] == 0.0]
    return Evidence(
        measured={
            "largest_error": max(row["error"] for row in with_decay),
            "largest_nuclear_gap": max(row["nuclear_gap"] for row in with_decay),
            "largest_balance": max(row["balance"] for row in with_decay),
        },
        holds=all(passes(row) for row in with_decay),
        control=Control(
            "no weight decay",
            {
                "nuclear_gap": [row["nuclear_gap"] for row in without],
                "balance": [row["balance"] for row in without],
                "reported_nuclear_gap": 0.31,
                "reported_balance": 0.48,
            },
            fails=not any(passes(row) for row in without),
        ),
        figure=_gap_figure(items, results),
        table=table,
    )


def _share_figure() -> Any:
    rows = [
        {"start": start, "margin": margin, "share": float(w[0] / w.sum())}
        for start in REPORTED_SHARES
        for margin in np.geomspace(max(1.0, 3.0 * start**2 * 1.01), 1e4, 40).tolist()
        for w in (diagonal_flow(start, margin),)
    ]
    curves = (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(
            x=alt.X("margin:Q", title="margin").scale(type="log").axis(grid=False),
            y=alt.Y("share:Q", title="share of the first coordinate").scale(domain=[0.5, 1.05]),
            color=alt.Color("start:N", title="start"),
        )
    )
    ends = [
        {"share": 1.0, "norm": "least nuclear norm"},
        {"share": 2 / 3, "norm": "least Frobenius norm"},
    ]
    marks = alt.Chart(alt.Data(values=ends)).encode(y=alt.Y("share:Q").scale(zero=False))
    rules = marks.mark_rule(color="grey", strokeDash=[4, 3])
    names = marks.mark_text(color="grey", align="right", dy=-7).encode(
        x=alt.value(395), text="norm:N"
    )
    return (rules + names + curves).properties(width=400, height=260)


def _gap_figure(items: list[dict[str, Any]], results: list[dict[str, Any]]) -> Any:
    rows = [
        {"decay": f"{item['decay']:g}", "start": item["seed"], "step": int(step), "gap": gap}
        for item, found in zip(items, results, strict=True)
        for step, gap, _ in found["path"].tolist()
        if gap > 1e-14
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(clip=True)
        .encode(
            x=alt.X("step:Q", title="step of gradient descent").scale(domain=[0, 1000]),
            y=alt.Y("gap:Q", title="nuclear gap: what the factors waste").scale(type="log"),
            color=alt.Color("decay:N", title="weight decay"),
            detail="start:N",
        )
        .properties(width=400, height=260)
    )
