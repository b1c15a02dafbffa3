"""Rank collapse: how alike the tokens become, with and without dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from attoscope.moments import components as m
from attoscope.moments.components import Moments
from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.deepscalelm import _stacks as stacks
from attoscope.papers.deepscalelm._paper import PAPER
from attoscope.papers.deepscalelm._simulation import Array
from attoscope.papers.deepscalelm._stacks import (
    DEEP_PRE,
    NAMES,
    XAVIER_POST,
    XAVIER_PRE,
    Model,
    Size,
)
from attoscope.prediction.propagation import SublayerPlan, branch_moments, forward_moments

CASES = ((XAVIER_POST, 0.0), (XAVIER_PRE, 0.0), (XAVIER_POST, 0.1), (DEEP_PRE, 0.1))
LAYERS = np.array([1, 4, 12, 24, 48])
CLOSE, COLLAPSED, ALIVE = 0.04, 0.999, 0.92


@PAPER.claim(
    name="rank-collapse",
    statement="Attention drives tokens towards identical vectors; ReLU slows that down, and "
    "dropout keeps the correlation below 1.",
    source="arXiv 2403.09635, rank collapse; simulation ours",
    criterion="48 layers, width 128, 64 tokens, means over draws: after layers 1, 4, 12, 24 and 48 "
    f"the correlation is within {CLOSE} of the one foreseen; at the end above {COLLAPSED} for "
    f"Xavier Post-LN without dropout, below {ALIVE} with dropout 0.1",
)
def rank_collapse(run: Run) -> Evidence:
    draws = run.pick(quick=5, paper=20)
    seen, foreseen, blunt = {}, {}, {}
    for case in CASES:
        model, rate = case
        size = Size(48, 128, 64, rate)
        found = stacks.measure(run, (model,), size, draws)[model]
        seen[case], foreseen[case] = (
            found["correlation"],
            stacks.theory(model, size).correlation,
        )
        blunt[case] = _blunt(model, size)
    misses = {case: _miss(seen[case], foreseen[case]) for case in CASES}
    # Pre-LN without dropout is dominated by its stream: the control says nothing there.
    strict = (CASES[0], CASES[3])
    control = {_name(case): _miss(seen[case], blunt[case]) for case in strict}
    ends = {case: float(seen[case][-1]) for case in CASES}
    return Evidence(
        measured={
            "draws": draws,
            "largest_difference": max(misses.values()),
            "at_the_end": {_name(case): end for case, end in ends.items()},
        },
        holds=max(misses.values()) <= CLOSE
        and ends[CASES[0]] > COLLAPSED
        and max(ends[case] for case in CASES[2:]) < ALIVE,
        control=Control(
            "tokens of the MLP's output taken to be fully correlated",
            {"largest_difference": control},
            fails=min(control.values()) > CLOSE,
        ),
        figure=_figure(seen, foreseen),
        table=[
            {"model": _name(case)}
            | {f"layer_{n}": float(seen[case][2 * n]) for n in LAYERS}
            | {f"foreseen_{n}": float(foreseen[case][2 * n]) for n in LAYERS}
            for case in CASES
        ],
    )


def _blunt(model: Model, size: Size) -> Array:
    """Correlation foreseen where kappa is 1."""

    def branch(plan: SublayerPlan, x: Moments, length: int) -> Moments:
        made = branch_moments(plan, x, length)
        alike = made.variance * (1 - plan.dropout)
        return made if plan.kind == "attention" else Moments(0.0, made.variance, alike)

    stream, _, _ = forward_moments(
        stacks.plans(model, size), m.of(1.0, size.r0), size.length, branch
    )
    return np.array([x.correlation for x in stream])


def _miss(seen: Array, foreseen: Array) -> float:
    return float(np.abs(seen - foreseen)[2 * LAYERS].max())


def _name(case: tuple[Model, float]) -> str:
    return f"{NAMES[case[0]]}, dropout {case[1]:g}"


def _figure(seen: dict[Any, Array], foreseen: dict[Any, Array]) -> Any:
    rows = [
        row
        for case in CASES
        for row in stacks.rows(_name(case), "r", seen[case][2::2], foreseen[case][2::2])
    ]
    title = "token correlation: dots measured, lines foreseen"
    return stacks.figure(rows, "r", title, log=False)
