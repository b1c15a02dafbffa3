"""Mirror descent: the potential |W|^p / p decides which entrywise l_p norm is minimised."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray
from scipy.stats import ortho_group

from attoscope.dynamics import AttentionData, LinearHead, Mirror, correlation, train
from attoscope.papers.attention_max_margin_followups._paper import PAPER
from attoscope.papers.attention_max_margin_followups.fingerprint import (
    SEQUENCES,
    STEPS,
    TOKENS,
    WIDTH,
    step_length,
)
from attoscope.papers.base import Control, Evidence, Run
from attoscope.svm.estimator import AttentionSVM
from attoscope.svm.norms import Entrywise
from attoscope.svm.selection import Selection
from attoscope.tasks.instances import stack
from attoscope.tasks.official import unit_sphere

Array = NDArray[np.float64]
POWERS = (1.5, 1.75, 2.0, 3.0)
REPORTED = {1.5: 1.0002, 3.0: 1.134}


def compare(weight: Array, selection: Selection) -> tuple[list[float], list[float]]:
    """Excess of a weight in each l_p norm, and correlation with each l_p solution."""
    margin = selection.margins(weight)[~selection.selected].min()
    excess, correlations = [], []
    for p in POWERS:
        svm = AttentionSVM(norm=Entrywise(p), tol=1e-4).fit_selection(selection)
        size = Entrywise(p).value(weight)
        excess.append(size / margin / svm.objective_ if margin > 0.0 else np.inf)
        correlations.append(float(correlation(weight, svm.weight_)))
    return excess, correlations


def descend(item: dict[str, Any]) -> dict[str, Array]:
    """Mirror descent with one p: (trial, p) of excess, of correlation, and of excess turned."""
    instances = stack(unit_sphere(seed, SEQUENCES, TOKENS, WIDTH) for seed in item["instances"])
    data = AttentionData.cross(
        instances.tokens, instances.queries, instances.labels, LinearHead(instances.head)
    )
    run = train(data, Mirror(item["p"], step_length), item["steps"], record=[item["steps"]])
    left, right = ortho_group.rvs(WIDTH, size=2, random_state=item["seed"])
    as_is, turned = [], []
    for i in range(data.trials):
        selection, weight = run.selection(i), run.weight[i]
        as_is.append(compare(weight, selection))
        other = selection.replace(
            keys=selection.keys @ left.T, queries=selection.queries @ right.T
        )
        turned.append(compare(left @ weight @ right.T, other)[0])
    excess, correlations = (np.array(part) for part in zip(*as_is, strict=True))
    return {"excess": excess, "correlation": correlations, "turned": np.array(turned)}


@PAPER.claim(
    name="mirror-descent",
    statement="Mirror descent with the potential |W|^p / p goes to the attention SVM of the "
    "entrywise l_p norm.",
    source="arXiv 2410.14581",
    criterion="for p = 1.5, 1.75, 2 and 3 the median excess is smallest in the l_p norm of the "
    "same p",
)
def mirror_descent(run: Run) -> Evidence:
    seeds = list(range(run.pick(quick=6, paper=24)))
    turn = int(run.rng("rotation").integers(2**31))
    items = [{"p": p, "instances": seeds, "steps": STEPS, "seed": turn} for p in POWERS]
    results = run.map(descend, items, label="powers")
    excess, turned, correlations = (
        np.array([np.median(found[key], axis=0) for found in results])
        for key in ("excess", "turned", "correlation")
    )
    own = excess.argmin(1)
    table = [
        {"p": p}
        | {f"excess l_{q:g}": excess[i, j] for j, q in enumerate(POWERS)}
        | {"reported_own_excess": REPORTED.get(p)}
        | {f"correlation l_{q:g}": correlations[i, j] for j, q in enumerate(POWERS)}
        for i, p in enumerate(POWERS)
    ]
    return Evidence(
        measured={
            "nearest_p": [POWERS[j] for j in own],
            "own_excess": excess.diagonal(),
            "own_correlation": correlations.diagonal(),
            "reported_own_correlation_of_1.75": 0.985,
        },
        holds=own.tolist() == list(range(len(POWERS))),
        control=Control(
            "the same weights and tokens in another orthonormal basis, in which l_p is another "
            "norm",
            {
                "nearest_p": [POWERS[j] for j in turned.argmin(1)],
                "own_excess": turned.diagonal(),
            },
            fails=turned.argmin(1).tolist() != list(range(len(POWERS))),
        ),
        figure=_figure(excess),
        table=table,
    )


def _figure(excess: Array) -> Any:
    rows = [
        {"trained": f"{p:g}", "norm": q, "excess": excess[i, j]}
        for i, p in enumerate(POWERS)
        for j, q in enumerate(POWERS)
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("norm:Q", title="p of the norm that is measured").scale(zero=False),
            y=alt.Y("excess:Q", title="median excess (1: max margin)").scale(zero=False),
            color=alt.Color("trained:N", title="p of mirror descent"),
        )
        .properties(width=380, height=260)
    )
