"""Which norm is minimised is decided by the optimiser and by what it trains, W or its factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import altair as alt
import numpy as np
from numpy.typing import NDArray

from attoscope.dynamics import (
    Adam,
    AttentionData,
    LinearHead,
    Normalised,
    Steepest,
    train,
)
from attoscope.dynamics.rules import Descent, Rule, inverse
from attoscope.papers.attention_max_margin_followups._paper import PAPER
from attoscope.papers.base import Control, Evidence, Run
from attoscope.svm.fingerprints import THRESHOLD, fingerprint
from attoscope.tasks.instances import stack
from attoscope.tasks.official import unit_sphere

Array = NDArray[np.float64]
NORMS = ("frobenius", "nuclear", "spectral", "max", "l1")
SEQUENCES, TOKENS, WIDTH = 3, 4, 6
STEPS = 6000


class Row(NamedTuple):
    """An optimiser, the norm that it should minimise, and its least excess as reported."""

    optimiser: str
    expected: str
    reported: float


ROWS = (
    Row("normalised GD", "frobenius", 1.013),
    Row("spectral descent", "spectral", 1.009),
    Row("Muon", "spectral", 1.009),
    Row("sign descent", "max", 1.006),
    Row("Adam", "max", 1.020),
    Row("greedy coordinate", "l1", 1.050),
    Row("top singular pair", "nuclear", 1.027),
    Row("normalised GD on factors", "nuclear", 1.002),
    Row("the same, step halved", "nuclear", 1.003),
    Row("Muon on factors", "spectral", 1.003),
    Row("sign descent on factors", "none", 1.168),
    Row("Adam on factors", "none", 1.202),
)


def step_length(number: int) -> float:
    """The decaying step of every run."""
    return float(0.1 / np.sqrt(1.0 + number / 200.0))


@dataclass(frozen=True)
class UnitGradient:
    """A rule that is told each gradient at norm 1.

    A gradient that shrinks exponentially leaves the mean and mean square of the past far too
    large, so that momentum and Adam would be ruled by what is long over.
    """

    rule: Rule
    log_domain: bool = True

    def step(
        self, parameters: Sequence[Array], descent: Descent, memory: dict[str, Any]
    ) -> list[Array]:
        sizes = [np.sqrt(np.einsum("rij,rij->r", d, d)) for d in descent.directions]
        units = [
            d * inverse(size)[:, None, None]
            for d, size in zip(descent.directions, sizes, strict=True)
        ]
        flat = replace(descent, directions=units, log_scale=np.zeros_like(descent.log_scale))
        scales = self.rule.step(parameters, flat, memory)
        return [scale * inverse(size) for scale, size in zip(scales, sizes, strict=True)]


RULES: dict[str, Rule] = {
    "normalised GD": Normalised(step_length),
    "spectral descent": Steepest("spectral", step_length),
    "Muon": UnitGradient(Steepest("spectral", step_length, momentum=0.9)),
    "sign descent": Steepest("max", step_length),
    "Adam": UnitGradient(Adam(step_length)),
    "greedy coordinate": Steepest("l1", step_length),
    "top singular pair": Steepest("nuclear", step_length),
    "the same, step halved": Normalised(lambda number: 0.5 * step_length(number)),
}


def excess(item: dict[str, Any]) -> dict[str, Any]:
    """Trains one optimiser on all instances: excess (norm, trial), and the answers."""
    instances = stack(unit_sphere(seed, SEQUENCES, TOKENS, WIDTH) for seed in item["instances"])
    data = AttentionData.cross(
        instances.tokens, instances.queries, instances.labels, LinearHead(instances.head)
    )
    name, factors = item["optimiser"], None
    if name.endswith(" on factors") or name == "the same, step halved":
        rng, bound = np.random.default_rng(item["seed"]), WIDTH**-0.5
        shape = (2, data.trials, WIDTH, WIDTH)
        factors = tuple(rng.uniform(-bound, bound, shape))
    rule = RULES[name.removesuffix(" on factors")]
    run = train(data, rule, item["steps"], factors=factors, record=[item["steps"]])
    prints = [
        fingerprint(run.weight[i], run.selection(i), tol=1e-3) for i in range(data.trials)
    ]
    return {
        "excess": np.array([[each.excess[norm] for each in prints] for norm in NORMS]),
        "labels": [each.label for each in prints],
    }


def named(medians: dict[str, float]) -> str:
    """The norm of least excess, or none where even that exceeds the threshold."""
    nearest = min(medians, key=lambda norm: medians[norm])
    return nearest if medians[nearest] <= THRESHOLD else "none"


@PAPER.claim(
    name="optimiser-fingerprint",
    statement="The trained weight shows which optimiser, on which parameters, has made it: each "
    "minimises a norm of its own.",
    source="arXiv 2410.14581, 2502.04664, 2403.08699, 2410.23819; transfer to attention measured",
    criterion="for each of the ten optimisers with a norm of its own the median excess is "
    f"smallest in that norm, and at most {THRESHOLD} there",
)
def optimiser_fingerprint(run: Run) -> Evidence:
    seeds = list(range(run.pick(quick=6, paper=12)))
    start = int(run.rng("factors").integers(2**31))
    items = [
        {"optimiser": row.optimiser, "instances": seeds, "steps": STEPS, "seed": start}
        for row in ROWS
    ]
    table = []
    for row, found in zip(ROWS, run.map(excess, items, label="optimisers"), strict=True):
        medians = dict(zip(NORMS, np.median(found["excess"], axis=1).tolist(), strict=True))
        so_named = np.mean([label == row.expected for label in found["labels"]])
        table.append(
            {"optimiser": row.optimiser, "expected": row.expected, "answer": named(medians)}
            | medians
            | {"reported_least": row.reported, "share_so_named": float(so_named)}
        )
    own = [row for row in table if row["expected"] != "none"]
    adam = table[-1]
    return Evidence(
        measured={
            "rows_named": sum(row["answer"] == row["expected"] for row in own),
            "rows": len(own),
            "largest_own_excess": max(row[row["expected"]] for row in own),
            "reported_largest_own_excess": 1.05,
        },
        holds=all(row["answer"] == row["expected"] for row in own),
        control=Control(
            "Adam on factors, which has none of the five norms",
            {
                "answer": adam["answer"],
                "least_median_excess": min(adam[norm] for norm in NORMS),
                "share_so_named": adam["share_so_named"],
                "reported_least_median_excess": adam["reported_least"],
            },
            fails=adam["answer"] == "none" and adam["share_so_named"] > 0.5,
        ),
        figure=_figure(table),
        table=table,
    )


def _figure(table: list[dict[str, Any]]) -> Any:
    cells = [
        {
            "optimiser": row["optimiser"],
            "norm": norm,
            "excess": row[norm],
            "own": row["expected"] == norm,
        }
        for row in table
        for norm in NORMS
    ]
    base = alt.Chart(alt.Data(values=cells)).encode(
        x=alt.X("norm:N", title="norm", sort=list(NORMS)).axis(labelAngle=0),
        y=alt.Y("optimiser:N", title="optimiser", sort=[row.optimiser for row in ROWS]),
    )
    colour = alt.Color("excess:Q", title="median excess").scale(
        type="log", domain=[1, 3], clamp=True, scheme="blues", reverse=True
    )
    dark = alt.condition("datum.excess < 1.3", alt.value("white"), alt.value("black"))
    boxes = base.mark_rect(stroke="black").encode(
        color=colour, strokeWidth=alt.condition("datum.own", alt.value(2), alt.value(0))
    )
    numbers = base.mark_text(fontSize=10).encode(
        text=alt.Text("excess:Q", format=".3f"), color=dark
    )
    return (boxes + numbers).properties(width=340, height=300)
