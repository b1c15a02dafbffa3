"""How fast the direction converges: plain, normalised and Polyak steps."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from attoscope.dynamics import (
    AttentionData,
    GradientDescent,
    LinearHead,
    Normalised,
    Polyak,
    train,
)
from attoscope.dynamics.rules import Rule
from attoscope.papers.attention_max_margin_followups._paper import PAPER
from attoscope.papers.base import Control, Evidence, Run
from attoscope.svm.estimator import AttentionSVM
from attoscope.tasks.instances import stack
from attoscope.tasks.official import unit_sphere

Array = NDArray[np.float64]
STEPS = (30, 100, 300, 1000, 3000, 10000)
SEQUENCES, TOKENS, WIDTH = 6, 8, 10
RULES: dict[str, tuple[Rule, int]] = {
    "gradient descent": (GradientDescent(1.0), 6),
    "normalised": (Normalised(0.1), 6),
    # Polyak steps grow with 1 / gradient: after 300 the norm is in the hundreds.
    "Polyak": (Polyak(), 3),
}
REPORTED = {
    "gradient descent": (0.467, 0.428, 0.342, 0.208, 0.116, 0.081),
    "normalised": (0.415, 0.258, 0.044, 4.6e-3, 6.1e-4, 6.2e-5),
    "Polyak": (0.017, 0.0030),
}
SLOPES = (-2.3, -1.5)


def distances(item: dict[str, Any]) -> dict[str, Array]:
    """1 - correlation with the SVM of what a run selects at its end, (record, trial)."""
    instances = stack(unit_sphere(seed, SEQUENCES, TOKENS, WIDTH) for seed in item["instances"])
    data = AttentionData.cross(
        instances.tokens, instances.queries, instances.labels, LinearHead(instances.head)
    )
    rule, marks = RULES[item["rule"]]
    run = train(data, rule, STEPS[marks - 1], record=STEPS[:marks])
    directions = np.stack(
        [
            AttentionSVM(tol=1e-9).fit_selection(run.selection(i)).weight_
            for i in range(data.trials)
        ]
    )
    return {"distance": 1.0 - run.correlation(directions), "norm": run.norms()}


def slope(medians: Array) -> float:
    """Of the logarithm of the distance over that of the step, from 1000 to 10000."""
    return float(np.log10(medians[5] / medians[3]))


@PAPER.claim(
    name="convergence-rates",
    statement="Normalised and Polyak steps reach the max-margin direction far faster than plain "
    "gradient descent, whose weight grows like a logarithm.",
    source="arXiv 2402.05738, convergence rates; constants measured",
    criterion="median 1 - correlation: normalised at most a tenth of gradient descent after 1000 "
    "steps, Polyak at most a fifth of normalised after 30, and the normalised one falls from "
    f"1000 to 10000 steps with a log-log slope from {SLOPES[0]} to {SLOPES[1]}",
)
def convergence_rates(run: Run) -> Evidence:
    seeds = np.arange(run.pick(quick=20, paper=100))
    chunks = [part.tolist() for part in np.array_split(seeds, -(-len(seeds) // 10))]
    items = [{"rule": rule, "instances": chunk} for rule in RULES for chunk in chunks]
    results = run.map(distances, items, label="training")
    medians, norms = {}, {}
    for i, rule in enumerate(RULES):
        mine = results[i * len(chunks) : (i + 1) * len(chunks)]
        medians[rule] = np.median(np.hstack([each["distance"] for each in mine]), axis=1)
        norms[rule] = np.median(np.hstack([each["norm"] for each in mine]), axis=1)
    plain, normalised, polyak = medians.values()
    own, other = slope(normalised), slope(plain)
    return Evidence(
        measured={
            "normalised_over_plain_at_1000": normalised[3] / plain[3],
            "polyak_over_normalised_at_30": polyak[0] / normalised[0],
            "slope_normalised": own,
            "reported_slope": -1.9,
            "norm_plain_at_10000": norms["gradient descent"][-1],
            "reported_norm_plain": 18.7,
            "norm_normalised_at_10000": norms["normalised"][-1],
        },
        holds=bool(
            normalised[3] <= plain[3] / 10
            and polyak[0] <= normalised[0] / 5
            and SLOPES[0] <= own <= SLOPES[1]
        ),
        control=Control(
            "the slope of plain gradient descent in place of the normalised one",
            {"slope_plain": other},
            fails=other > -0.5,
        ),
        figure=_figure(medians),
        table=[
            {"steps": steps}
            | {rule: values[i] for rule, values in medians.items() if i < len(values)}
            | {f"reported {rule}": v[i] for rule, v in REPORTED.items() if i < len(v)}
            for i, steps in enumerate(STEPS)
        ],
    )


def _figure(medians: dict[str, Array]) -> Any:
    rows = [
        {"rule": rule, "steps": steps, "distance": float(value)}
        for rule, values in medians.items()
        for steps, value in zip(STEPS, values, strict=False)
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("steps:Q", title="steps").scale(type="log").axis(values=list(STEPS)),
            y=alt.Y(
                "distance:Q", title="1 - correlation with the max-margin direction (median)"
            )
            .scale(type="log")
            .axis(grid=False),
            color=alt.Color("rule:N", title="rule", sort=None),
        )
        .properties(width=400, height=280)
    )
