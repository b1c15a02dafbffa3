"""Around a locally optimal direction lies a cone that training does not leave for another one."""

from __future__ import annotations

from typing import Any

import numpy as np

from attoscope.dynamics import (
    AttentionData,
    Gradient,
    Normalised,
    correlation,
    local_cone,
    locally_optimal,
    train,
)
from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.transformers_as_svms._paper import PAPER
from attoscope.papers.transformers_as_svms._setting import instance_seeds, solve, training_data
from attoscope.svm import InfeasibleSelection
from attoscope.tasks import stack, unit_sphere

SIZE = (6, 8, 10)
LOCAL, OTHER = 10, 12
STEPS = 10_000
NEAR = 0.99997
# Starts at so many times the max-margin weight of a selection that is not locally optimal.
AWAY = 3.0


def problem(seed: int, copies: int = 1) -> AttentionData:
    """One data set, several times side by side."""
    return training_data(stack([unit_sphere(seed, *SIZE)] * copies))


def neighbours(item: dict[str, int]) -> dict[str, Any]:
    """The optimal selection with one token replaced: the first that is locally optimal, and the
    first that is not."""
    data = problem(item["seed"])
    scores, optimal = data.scores()[0], data.optimal()[0]
    order = np.argsort(-scores, axis=1)
    found: dict[str, Any] = {"seed": item["seed"], "local": None, "other": None}
    for rank in range(1, SIZE[1]):
        for i in range(SIZE[0]):
            selected = optimal.copy()
            selected[i] = order[i, rank]
            try:
                local = bool(locally_optimal(data.selection(0, selected), scores))
            except InfeasibleSelection:
                continue
            kind = "local" if local else "other"
            found[kind] = selected if found[kind] is None else found[kind]
            if found["local"] is not None and found["other"] is not None:
                return found
    return found


def in_cone(item: dict[str, Any]) -> dict[str, Any]:
    """The gradient at random points on the edge of the cone, and training from some of them."""
    data = problem(item["seed"], item["points"])
    scores = data.scores()[0]
    cone = local_cone(data.selection(0, item["selected"]), scores)
    points = cone.sample(np.random.default_rng([item["draw"], item["seed"]]), item["points"])
    pull = Gradient(data).at(points).direction
    starts = slice(0, item["starts"])
    steps = item["steps"]
    run = train(
        data.take(starts),
        Normalised(0.1),
        steps,
        weight=points[starts],
        record=shown(steps),
    )
    c = correlation(run.weights, cone.weight)
    return {
        "mu": cone.mu, "radius": cone.radius, "steps": run.steps,
        "against": int((np.einsum("rij,ij->r", pull, cone.weight) <= 0.0).sum()),
        "least": c.min(1), "final": float(c[-1].min()),
        "kept": float((run.selected() == item["selected"]).all(1).mean()),
    }  # fmt: skip


def shown(steps: int) -> list[int]:
    """The steps at which weights are compared, the start first."""
    return [0, *np.unique(np.geomspace(1, steps, 50).round().astype(int)).tolist()]


def leaves(item: dict[str, Any]) -> dict[str, Any]:
    """Training from a multiple of the max-margin weight of a selection: is it kept?"""
    data = problem(item["seed"])
    weight = solve(data.selection(0, item["selected"]), "frobenius").weight_
    steps = item["steps"]
    run = train(data, Normalised(0.1), steps, weight=AWAY * weight[None], record=shown(steps))
    return {
        "steps": run.steps,
        "correlation": correlation(run.weights[:, 0], weight),
        "kept": bool((run.selected()[0] == item["selected"]).all()),
    }


@PAPER.claim(
    name="local-cone",
    statement=(
        "Around the max-margin direction of a locally optimal selection, however bad it is "
        "globally, there is a cone without stationary points from which training goes to that "
        "direction; a selection that is not locally optimal is left."
    ),
    source="Theorem on local convergence of gradient descent (constants of the cone recalled)",
    criterion=(
        "no point on the cone's edge with <-grad, W_mm> <= 0; after 10,000 normalised steps from "
        "it, every correlation with W_mm at least 0.99997 and every selection kept"
    ),
)
def local_cone_claim(run: Run) -> Evidence:
    """Selections that differ from the optimal one in one sample."""
    wanted = run.pick(quick=(LOCAL, OTHER), paper=(4 * LOCAL, 4 * OTHER))
    found = run.map(
        neighbours,
        [{"seed": s} for s in instance_seeds(run, 2 * wanted[1])],
        label="selections",
    )
    base = {"steps": STEPS, "points": 200, "starts": 4, "draw": run.seed}
    local = [
        base | {"seed": f["seed"], "selected": f["local"]}
        for f in found
        if f["local"] is not None
    ]
    other = [
        {"steps": STEPS, "seed": f["seed"], "selected": f["other"]}
        for f in found
        if f["other"] is not None
    ]
    cones = run.map(in_cone, local[: wanted[0]], label="cones")
    away = run.map(leaves, other[: wanted[1]], label="selections that are not locally optimal")
    return judge(cones, away, base["points"])


def judge(cones: list[dict[str, Any]], away: list[dict[str, Any]], points: int) -> Evidence:
    """The evidence of all selections."""
    measured = {
        "selections": len(cones),
        "points": points * len(cones),
        "points_against": sum(cone["against"] for cone in cones),
        "least_correlation_at_end": min(cone["final"] for cone in cones),
        "least_correlation_on_the_way": min(float(cone["least"].min()) for cone in cones),
        "share_kept": float(np.mean([cone["kept"] for cone in cones])),
        "mu": [min(c["mu"] for c in cones), max(c["mu"] for c in cones)],
        "radius": [min(c["radius"] for c in cones), max(c["radius"] for c in cones)],
    }
    holds = (
        measured["points_against"] == 0
        and measured["least_correlation_at_end"] >= NEAR
        and measured["share_kept"] == 1.0
    )
    kept = float(np.mean([each["kept"] for each in away]))
    control = Control(
        what=f"starts at {AWAY:g} W_mm of selections that are not locally optimal: none is kept",
        measured={
            "starts": len(away),
            "share_kept": kept,
            "largest_correlation_at_end": max(float(each["correlation"][-1]) for each in away),
        },
        fails=kept == 0.0,
    )
    return Evidence(measured, holds, control, figure(cones, away))


def figure(cones: list[dict[str, Any]], away: list[dict[str, Any]]) -> Any:
    """Correlation with the selection's own direction, along training."""
    import altair as alt

    kinds = ("locally optimal, from the cone", f"not locally optimal, from {AWAY:g} W_mm")
    rows = [
        {"step": int(step), "correlation": float(c), "selection": kind, "line": f"{kind} {k}"}
        for kind, parts, name in ((kinds[0], cones, "least"), (kinds[1], away, "correlation"))
        for k, part in enumerate(parts)
        for step, c in zip(part["steps"], part[name], strict=True)
    ]
    return (
        alt.Chart(alt.Data(values=rows), width=440, height=280)
        .mark_line(opacity=0.7)
        .encode(
            x=alt.X("step:Q", title="training steps")
            .scale(type="symlog", nice=False)
            .axis(values=[0, 1, 10, 100, 1000, 10_000]),
            y=alt.Y("correlation:Q", title="correlation with the selection's W_mm").scale(
                zero=False, nice=False
            ),
            color=alt.Color("selection:N", title="selection", sort=list(kinds)),
            detail="line:N",
        )
    )
