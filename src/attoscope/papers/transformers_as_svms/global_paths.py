"""The two published instances in the plane, whose best tokens training finds from zero."""

from __future__ import annotations

from typing import Any

import numpy as np

from attoscope.dynamics import Normalised, Trajectory, correlation, train
from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.transformers_as_svms._paper import PAPER
from attoscope.papers.transformers_as_svms._setting import (
    instance_seeds,
    solve,
    training_data,
)
from attoscope.tasks import Instance, stack, vis1, vis2

INSTANCES = {"vis1": vis1, "vis2": vis2}
NORMS = ("frobenius", "nuclear")
STEPS = 2000
RECORD = [*range(0, 100, 5), *range(100, STEPS + 1, 25)]
# What is drawn of each plane: first and second component.
WINDOWS = {"vis1": ([-30, 40], [-100, 100]), "vis2": ([-10, 50], [-40, 40])}


def train_paths(item: dict[str, Any]) -> dict[str, Any]:
    """W from zero, and (K, Q) from small random K and Q = 0, one trial per seed."""
    one, seeds = INSTANCES[item["instance"]](), item["seeds"]
    data = training_data(stack([one] * len(seeds)))
    rule = Normalised(log_domain=False)
    zero = np.zeros((len(seeds), 2, 2))
    key = np.stack([0.1 * np.random.default_rng(s).standard_normal((2, 2)) for s in seeds])
    runs = {
        "W": train(data.take(0), rule, STEPS, record=RECORD),
        "(K,Q)": train(data, rule, STEPS, factors=(key, zero), record=RECORD),
    }
    selection = data.selection(0, one.optimal)
    references = {norm: solve(selection, norm).weight_ for norm in NORMS}
    swapped = selection.replace(queries=selection.queries[::-1].copy())
    return {
        "weights": references,
        "runs": {trained: _readings(run, references) for trained, run in runs.items()},
        "swapped": {
            trained: _last(run, solve(swapped, norm).weight_)
            for (trained, run), norm in zip(runs.items(), NORMS, strict=True)
        },
        "paths": {trained: _path(run, one) for trained, run in runs.items()},
    }


def _readings(run: Trajectory, references: dict[str, Any]) -> dict[str, Any]:
    last = {norm: _last(run, weight) for norm, weight in references.items()}
    return {**last, "globally optimal": run.globally_optimal()}


def _last(run: Trajectory, reference: Any) -> Any:
    return correlation(run.weight, reference)


def _path(run: Trajectory, instance: Instance) -> Any:
    """Where the first trial's weights take the queries, (record, query, 2)."""
    return instance.queries @ run.weights[:, 0].swapaxes(1, 2)


@PAPER.claim(
    name="global-paths",
    statement="On two instances in the plane, training from zero selects the best tokens; W goes "
    "the way of the Frobenius-norm SVM and (K, Q) that of the nuclear-norm SVM.",
    source="Figure with paths of W z in the plane, and its second instance",
    criterion="after 2,000 normalised steps in both instances, for W and for (K, Q) from every "
    "start: the best tokens are selected, correlation with the SVM of the own norm above 0.999, "
    "of the other norm below 0.95",
)
def global_paths(run: Run) -> Evidence:
    seeds = instance_seeds(run, run.pick(quick=20, paper=100))
    items = [{"instance": name, "seeds": seeds} for name in INSTANCES]
    found = dict(zip(INSTANCES, run.map(train_paths, items, label="paths"), strict=True))
    measured: dict[str, Any] = {"starts of (K,Q)": len(seeds)}
    wrong: dict[str, Any] = {}
    held, fooled = [], []
    for name, result in found.items():
        for (trained, reading), own in zip(result["runs"].items(), NORMS, strict=True):
            (other,) = set(NORMS) - {own}
            near, far, swapped = reading[own], reading[other], result["swapped"][trained]
            measured[f"{name}, {trained}"] = {
                "least correlation, own norm": float(near.min()),
                "largest correlation, other norm": float(far.max()),
                "best tokens": float(reading["globally optimal"].mean()),
            }
            wrong[f"{name}, {trained}"] = float(swapped.max())
            held.append(meets(near, far, reading["globally optimal"]))
            fooled.append(meets(swapped, far, reading["globally optimal"]))
        values = {norm: np.linalg.svd(w)[1].tolist() for norm, w in result["weights"].items()}
        measured[f"{name}, singular values"] = values
    return Evidence(
        measured=measured,
        holds=all(held),
        control=Control(
            "the SVM of exchanged queries in place of the SVM (largest correlation)",
            wrong,
            fails=not any(fooled),
        ),
        figure=_figure(found),
    )


def meets(near: Any, far: Any, best: Any) -> bool:
    """The criterion, for one instance and parameterisation."""
    return bool((near > 0.999).all() and (far < 0.95).all() and best.all())


def _figure(found: dict[str, dict[str, Any]]) -> Any:
    import altair as alt

    panels = []
    for name, result in found.items():
        queries = INSTANCES[name]().queries
        rows = []
        for (trained, path), norm in zip(result["paths"].items(), NORMS, strict=True):
            rays = _rays(queries @ result["weights"][norm].T)
            rows += _lines(path, trained, "training")
            rows += _lines(rays, trained, "SVM")
        chart = alt.Chart(alt.Data(values=rows)).mark_line(clip=True)
        first, second = (alt.Scale(domain=window, nice=False) for window in WINDOWS[name])
        panel = chart.encode(
            x=alt.X("first:Q", title="W z, first component", scale=first),
            y=alt.Y("second:Q", title="W z, second component", scale=second),
            order="step:Q",
            color=alt.Color("query:N", title="query"),
            strokeDash=alt.StrokeDash("trained:N", title="trained").sort(None),
            strokeWidth=alt.StrokeWidth("what:N", title="line").scale(range=[3, 1]).sort(None),
        )
        panels.append(panel.properties(width=300, height=300, title=name))
    return alt.hconcat(*panels)


def _rays(ends: Any) -> Any:
    """From the origin to beyond the edge of every window, (2, query, 2)."""
    far = 200.0 * ends / np.linalg.norm(ends, axis=1, keepdims=True)
    return np.stack([np.zeros_like(far), far])


def _lines(points: Any, trained: str, what: str) -> list[dict[str, Any]]:
    return [
        {
            "first": float(x), "second": float(y), "step": step, "query": query + 1,
            "trained": trained, "what": what,
        }
        for step, here in enumerate(points)
        for query, (x, y) in enumerate(here)
    ]  # fmt: skip
