"""Facts that were never shown: inferred by the nuclear norm, not by the Frobenius norm."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from attoscope.papers.attention_max_margin_followups._paper import PAPER
from attoscope.papers.attention_max_margin_followups.next_token import ChoiceLoss
from attoscope.papers.base import Control, Evidence, Run
from attoscope.svm.estimator import AttentionSVM
from attoscope.tasks.recall import out_of_context

Array = NDArray[np.float64]
# Classes, training and test subjects of each; optimal values where they were reported.
CASES = {
    (3, 1, 2): (3.31662, 6.56048),
    (4, 1, 3): (None, None),
    (3, 2, 1): (None, None),
    (2, 1, 1): (2.23607, 3.41421),
}
STEP, STEPS, START = 1.0, 3000, 0.01


def solve(item: dict[str, Any]) -> dict[str, float]:
    """Least test margin and optimal value of the smallest weight in a norm."""
    task = out_of_context(*item["case"])
    svm = AttentionSVM(norm=item["norm"], tol=1e-7).fit_selection(task.selection)
    return {"margin": task.test_margin(svm.weight_), "value": float(svm.objective_)}


@PAPER.claim(
    name="recall-margins",
    statement="The smallest weight in nuclear norm infers consequences that were never shown; the "
    "smallest in Frobenius norm gives them a margin of 0.",
    source="arXiv 2506.10887, out-of-context reasoning",
    criterion="with m training and k test subjects a class the least test margin is at least "
    "m/(m + k) in nuclear norm, and 0 within 1e-5 in Frobenius norm",
)
def recall_margins(run: Run) -> Evidence:
    norms = ("frobenius", "nuclear")
    items = [{"case": list(case), "norm": norm} for case in CASES for norm in norms]
    results = run.map(solve, items, label="smallest weights")
    table = []
    for i, ((n, m, k), values) in enumerate(CASES.items()):
        plain, nuclear = results[2 * i : 2 * i + 2]
        row: dict[str, Any] = {"classes": n, "train": m, "test": k, "bound": m / (m + k)}
        row |= {"nuclear": nuclear["margin"], "min(1, sqrt(m/k))": min(1.0, (m / k) ** 0.5)}
        row |= {"frobenius": plain["margin"]}
        for norm, found, value in zip(norms, (plain, nuclear), values, strict=True):
            row |= {f"value_{norm}": found["value"], f"reported_{norm}": value}
        table.append(row)
    bounds, inferred, ignored = (
        np.array([row[key] for row in table], float)
        for key in ("bound", "nuclear", "frobenius")
    )
    return Evidence(
        measured={
            "nuclear_margins": inferred,
            "reported_nuclear_margins": [0.7071, 0.5774, 1.0, 1.0],
            "largest_frobenius_margin": abs(ignored).max(),
        },
        holds=bool((inferred >= bounds).all() and (abs(ignored) < 1e-5).all()),
        control=Control(
            "the Frobenius solution held to the nuclear norm's bound",
            {"margins": ignored, "bounds": bounds},
            fails=bool((ignored < bounds).all()),
        ),
        figure=_margin_figure(table),
        table=table,
    )


def train_recall(item: dict[str, Any]) -> dict[str, Any]:
    """Gradient descent on W, or on A and B with W = A B^T, from a small random start."""
    task, rng = out_of_context(*item["case"]), np.random.default_rng(item["seed"])
    answers = np.eye(2 * task.classes)
    shown = ChoiceLoss(answers, task.queries, task.answers)
    asked = ChoiceLoss(answers, task.test_queries, task.test_answers)
    rows, columns = shown.shape
    a, b = (START * rng.standard_normal((size, rows)) for size in (rows, columns))
    weight, seen = START * rng.standard_normal((rows, columns)), []
    marks = set(np.unique(np.geomspace(1, STEPS, 30).astype(int)).tolist())
    for number in range(1, STEPS + 1):
        if item["factored"]:
            slope = shown.gradient(a @ b.T)
            a, b = a - STEP * slope @ b, b - STEP * slope.T @ a
            weight = a @ b.T
        else:
            weight = weight - STEP * shown.gradient(weight)
        if number in marks:
            seen.append((number, shown.value(weight), asked.value(weight)))
    margin = task.selection.margins(weight)[~task.selection.selected].min()
    return {"losses": np.array(seen), "ratio": task.test_margin(weight) / float(margin)}


@PAPER.claim(
    name="recall-training",
    statement="Gradient descent infers consequences that were never shown where it trains two "
    "factors, and not where it trains their product.",
    source="arXiv 2506.10887, out-of-context reasoning",
    criterion="from a start of size 0.01 the largest test loss of factors is at most a tenth of "
    "ln(2n), that of guessing, after 3000 steps",
)
def recall_training(run: Run) -> Evidence:
    seeds = run.rng("starts").integers(2**31, size=run.pick(quick=2, paper=10)).tolist()
    items = [
        {"case": list(case), "factored": factored, "seed": seed}
        for case in CASES
        for factored in (True, False)
        for seed in seeds
    ]
    results = run.map(train_recall, items, label="starts")
    table, figures = [], []
    for case in CASES:
        row: dict[str, Any] = {"case": str(case), "guessing": float(np.log(2 * case[0]))}
        for factored, name in ((True, "factors"), (False, "product")):
            mine = [
                found
                for item, found in zip(items, results, strict=True)
                if item["case"] == list(case) and item["factored"] == factored
            ]
            row |= {
                f"train_loss_{name}": max(found["losses"][-1, 1] for found in mine),
                f"test_loss_{name}": max(found["losses"][-1, 2] for found in mine),
                f"margin_ratio_{name}": min(found["ratio"] for found in mine),
            }
            figures.append((str(case), name, mine[0]["losses"]))
        table.append(row)
    share = {
        name: [row[f"test_loss_{name}"] / row["guessing"] for row in table]
        for name in ("factors", "product")
    }
    return Evidence(
        measured={"test_loss_over_guessing": share["factors"]},
        holds=bool(max(share["factors"]) <= 0.1),
        control=Control(
            "the product is trained",
            {"test_loss_over_guessing": share["product"]},
            fails=bool(min(share["product"]) > 0.1),
        ),
        figure=_training_figure(figures),
        table=table,
    )


def _margin_figure(table: list[dict[str, Any]]) -> Any:
    names = {
        "nuclear": "nuclear norm",
        "bound": "bound m/(m + k)",
        "frobenius": "Frobenius norm",
    }
    rows = [
        {
            "case": f"{row['classes']} classes, {row['train']} + {row['test']}",
            "what": name,
            "margin": row[key],
        }
        for row in table
        for key, name in names.items()
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_point(size=90, filled=True)
        .encode(
            x=alt.X("margin:Q", title="least margin of a consequence that was never shown"),
            y=alt.Y(
                "case:N", title="task (training + test subjects of each class)", sort=None
            ).axis(titleAngle=-90),
            color=alt.Color("what:N", title="", sort=None),
            shape=alt.Shape("what:N", title="", sort=None),
        )
        .properties(width=380, height=180)
    )


def _training_figure(curves: list[tuple[str, str, Array]]) -> Any:
    rows = [
        {"case": case, "trained": name, "step": int(step), "loss": float(test)}
        for case, name, losses in curves
        for step, _, test in losses.tolist()
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(
            x=alt.X("step:Q", title="step of gradient descent")
            .scale(type="log")
            .axis(grid=False),
            y=alt.Y("loss:Q", title="test loss").scale(type="log").axis(grid=False),
            color=alt.Color("trained:N", title="trained", sort=None),
            strokeDash=alt.StrokeDash("case:N", title="classes, training, test", sort=None),
        )
        .properties(width=400, height=260)
    )
