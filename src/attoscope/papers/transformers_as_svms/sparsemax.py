"""A head whose optimum is known: which tokens are kept, and their shares, without training."""

from __future__ import annotations

from typing import Any

import numpy as np

from attoscope.dynamics import AttentionData, GradientDescent, LambdaHead, train
from attoscope.dynamics import sparsemax as nearest_on_simplex
from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.transformers_as_svms._paper import PAPER
from attoscope.papers.transformers_as_svms._predictions import NAMES, predictions
from attoscope.papers.transformers_as_svms._setting import instance_seeds, parts
from attoscope.tasks import lambda_head, stack

# (samples, tokens, width) and the strengths of the head.
SWEEPS = {(1, 4, 4): (0.05, 0.2, 0.4, 0.8), (3, 4, 6): (0.05, 0.4, 1.6)}
LR, TOO_LONG, STEPS = 10.0, 50.0, 20_000
STRONG = 0.8
Rows = list[dict[str, Any]]


def lambda_runs(item: dict[str, Any]) -> list[dict[str, float]]:
    """How far each trained run is from the sparsemax of its data, and from what that predicts."""
    made = stack(lambda_head(seed, *item["size"]) for seed in item["seeds"])
    strength = item["strength"]
    head = LambdaHead(made.head, strength)
    data = AttentionData.cross(made.tokens, made.queries, made.labels, head)
    scores = np.einsum("rntd,rd->rnt", made.tokens, made.head)
    best = nearest_on_simplex(scores / (2.0 * strength))
    run = train(data, GradientDescent(item["lr"]), item["steps"], record=[item["steps"]])
    trained = run.probabilities()
    rows = []
    for k in range(data.trials):
        kept = best[k] > 0.0
        row = {
            "kept": float(kept.sum(1).mean()),
            "trained_kept": float((trained[k] > 1e-3).sum(1).mean()),
            "deviation": float(np.abs(trained[k] - best[k]).max()),
        }
        if not kept.all():  # else W is finite, and there is no SVM
            row |= predictions(run.weight[k], data.selection(k, kept), best[k])
        rows.append(row)
    return rows


def sweep(run: Run, lr: float, above: float = 0.0) -> Rows:
    """One summary per size and strength (of at least `above`)."""
    seeds = instance_seeds(run, run.pick(quick=12, paper=24))
    rows: Rows = []
    for size, strengths in SWEEPS.items():
        for strength in (s for s in strengths if s >= above):
            items = [
                {"size": size, "strength": strength, "lr": lr, "steps": STEPS, "seeds": part}
                for part in parts(seeds, 12)
            ]
            label = f"lambda head, {size}, {strength}, steps of {lr:g}"
            runs = [row for part in run.map(lambda_runs, items, label=label) for row in part]
            rows.append(summary(size, strength, runs))
    return rows


def summary(
    size: tuple[int, int, int], strength: float, runs: list[dict[str, float]]
) -> dict[str, Any]:
    """Means over runs, and the median of the largest deviation."""
    masked = [row for row in runs if "svm_eq" in row]
    out: dict[str, Any] = {"n": size[0], "T": size[1], "d": size[2], "lambda": strength}
    out |= {name: float(np.mean([row[name] for row in runs])) for name in _COUNTS}
    deviations = [row["deviation"] for row in runs]
    out |= {"deviation": float(np.median(deviations)), "largest_deviation": max(deviations)}
    out["runs_with_masked"] = len(masked)
    means = {name: [row[name] for row in masked] for name in NAMES}
    return out | {name: float(np.mean(v)) if v else np.nan for name, v in means.items()}


_COUNTS = ("kept", "trained_kept")


def met(rows: Rows) -> bool:
    """The criterion."""
    # Where every run keeps all its tokens W is finite, and there is nothing to compare.
    compared = [row for row in rows if row["runs_with_masked"]]
    best = all(row["svm_eq"] <= min(row["gen_svm"], row["one_token"]) for row in compared)
    close = all(row["deviation"] < 1e-3 for row in rows)
    grows = all(
        a[name] <= b[name] + 1e-9
        for a, b in zip(rows, rows[1:], strict=False)
        if a["n"] == b["n"]
        for name in _COUNTS
    )
    return best and close and grows


@PAPER.claim(
    name="several-tokens-exactly",
    statement=(
        "Under the head v^T a - lambda ||a||^2 with orthonormal tokens, the probabilities go to "
        "the sparsemax of the scores over 2 lambda: more tokens are kept the larger lambda is, "
        "and the weight is the finite part of these shares plus the SVM direction."
    ),
    source="Lambda head of the published code; the limit is derived",
    criterion=(
        "tokens kept, in the sparsemax and in training, do not decrease with lambda; the median "
        "over runs of the largest deviation from the sparsemax is below 0.001 for every lambda; "
        "mean 1 - correlation is least for finite part + direction for every lambda with tokens "
        "to mask"
    ),
)
def several_tokens_exactly(run: Run) -> Evidence:
    """Masks and shares come from the data alone."""
    rows = sweep(run, LR)
    control_rows = sweep(run, TOO_LONG, above=STRONG)
    control = Control(
        what=f"steps of {TOO_LONG:g} in place of {LR:g} where lambda is at least {STRONG}: "
        "training lands on other vertices",
        measured={_name(row): row["deviation"] for row in control_rows},
        fails=not met(control_rows),
    )
    measured = {
        "deviation": {_name(row): row["deviation"] for row in rows},
        "kept": {_name(row): row["kept"] for row in rows},
        "svm_eq": {_name(row): row["svm_eq"] for row in rows},
    }
    return Evidence(measured, met(rows), control, figure(rows), rows)


def _name(row: dict[str, Any]) -> str:
    return f"n {row['n']}, lambda {row['lambda']}"


def figure(rows: Rows) -> Any:
    """Tokens kept against lambda, and how well each prediction meets the trained weight."""
    import altair as alt

    counts = [
        {"lambda": row["lambda"], "kept": row[name], "samples": f"n = {row['n']}", "by": said}
        for row in rows
        for name, said in (("kept", "sparsemax"), ("trained_kept", "trained"))
    ]
    offs = [
        {"lambda": row["lambda"], "off": max(row[name], 1e-12), "prediction": said}
        for row in rows
        if row["n"] == 1 and row["runs_with_masked"]
        for name, said in NAMES.items()
    ]
    across = alt.X("lambda:Q", title="lambda (strength of the head)").scale(
        type="log", nice=False
    )
    left = alt.Chart(alt.Data(values=counts), width=280, height=260).mark_line(strokeWidth=2)
    right = alt.Chart(alt.Data(values=offs), width=280, height=260).mark_line(point=True)
    return alt.hconcat(
        left.encode(
            x=across,
            y=alt.Y("kept:Q", title="tokens kept of 4, mean").scale(domain=[1, 4]),
            color=alt.Color("samples:N", title="samples").legend(symbolType="stroke"),
            strokeDash=alt.StrokeDash("by:N", title="from").legend(symbolType="stroke"),
        ),
        right.encode(
            x=across,
            y=alt.Y("off:Q", title="1 - correlation with the trained weight (n = 1)").scale(
                type="log"
            ),
            color=alt.Color("prediction:N", title="prediction", sort=list(NAMES.values())),
        ),
    ).resolve_scale(color="independent", strokeDash="independent")
