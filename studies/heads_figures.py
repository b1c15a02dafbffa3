"""The study's figures: held-out choices by layer, what discriminates, and along training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

KINDS = ("trained", "trained, random selector", "fresh", "fresh, random selector")
SHOWN = (
    "held-out, SVM", "held-out, mean difference", "held-out, position", "held-out, token",
    "held-out, keys only", "SVM above mean difference", "SVM above position",
    "SVM above random selector", "alignment", "alignment above random selector", "margin share",
    "support share", "stable rank", "certainty", "choices on sinks",
)  # fmt: skip


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    """Draws every figure for which there are numbers; gives the paths."""
    made = {
        "heads-held-out": held_out(found),
        "heads-discriminate": discriminate(found),
        "heads-training": training(found),
    }
    paths = []
    for name, chart in made.items():
        if chart is not None:
            paths.append(folder / f"{name}.svg")
            chart.save(paths[-1])
    return paths


def held_out(found: dict[str, Any]) -> alt.FacetChart | None:
    """Held-out shares of the learners: trained and fresh weights, and random selectors."""
    rows = []
    for part, tables in found["parts"].items():
        for row in tables["held_out"]:
            if row["filter"] in ("all", "no sinks") and "value" in row:
                low, high = row["interval"] or (row["value"], row["value"])
                rows.append(
                    {"model": part, "weights": row["weights"], "learner": row["learner"],
                     "share": row["value"], "low": low, "high": high, "filter": row["filter"]}
                )  # fmt: skip
    if not rows:
        return None
    data = pd.DataFrame(rows)
    base = alt.Chart(data).encode(
        y=alt.Y("learner:N", title=None, sort=list(dict.fromkeys(data["learner"]))),
        color=alt.Color("weights:N", title="choices of", sort=list(KINDS)),
        yOffset=alt.YOffset("weights:N", sort=list(KINDS)),
    )
    share = alt.Scale(domain=[0, 1])
    dots = base.mark_point(filled=True, size=36).encode(
        x=alt.X("share:Q", title="share of held-out choices predicted", scale=share)
    )
    bars = base.mark_rule().encode(x=alt.X("low:Q", scale=share), x2="high:Q")
    layered = (bars + dots).properties(width=230, height=alt.Step(7))
    return layered.facet(
        row=alt.Row("model:N", title=None), column=alt.Column("filter:N", title=None)
    ).properties(
        title="Choices predicted from other documents, means over heads, 95 % intervals"
    )


def discriminate(found: dict[str, Any]) -> alt.FacetChart | None:
    """How well each statistic tells trained heads from fresh ones and from random selectors."""
    rows = []
    for part, tables in found["parts"].items():
        for row in tables["discrimination"]:
            if row["filter"] not in ("all", "no sinks") or row["statistic"] not in SHOWN:
                continue
            for against, label in (("fresh", "fresh twin"), ("null", "random selector")):
                if row[f"auc_{against}"] is not None:
                    low, high = row[f"auc_{against}_interval"]
                    rows.append(
                        {"model": part, "statistic": row["statistic"], "against": label,
                         "auc": row[f"auc_{against}"], "low": low, "high": high,
                         "filter": row["filter"]}
                    )  # fmt: skip
    if not rows:
        return None
    base = alt.Chart(pd.DataFrame(rows)).encode(
        y=alt.Y("statistic:N", title=None, sort=list(SHOWN)),
        color=alt.Color("against:N", title="trained heads against"),
        yOffset="against:N",
    )
    scale = alt.Scale(domain=[0, 1])
    dots = base.mark_point(filled=True, size=36).encode(
        x=alt.X("auc:Q", title="probability that the trained head has the larger", scale=scale)
    )
    bars = base.mark_rule().encode(x=alt.X("low:Q", scale=scale), x2="high:Q")
    even = base.mark_tick(color="grey", size=9).encode(x=alt.datum(0.5))
    layered = (even + bars + dots).properties(width=230, height=alt.Step(9))
    return layered.facet(
        row=alt.Row("model:N", title=None), column=alt.Column("filter:N", title=None)
    ).properties(title="What tells trained heads apart: 0.5 is nothing, 95 % intervals")


TRACKED = {
    "svm": "held-out, SVM", "null svm": "held-out, SVM, random selector",
    "position": "held-out, position", "alignment": "alignment",
    "null alignment": "alignment, random selector", "margin_share": "margin share",
}  # fmt: skip


def training(found: dict[str, Any]) -> alt.HConcatChart | None:
    """The small model along training: its best induction head, and all heads' mean."""
    charts = []
    rows = [
        {**row, "seed": seed} for seed, run in enumerate(found["training"]) for row in run
        if row["space"] == "stream"
    ]  # fmt: skip
    if not rows:
        return None
    data = pd.DataFrame(rows)
    last = data[data["step"] == data["step"].max()]
    best = last.loc[last.groupby("seed")["induction"].idxmax(), ["seed", "site", "head"]]
    chosen = data.merge(best, on=["seed", "site", "head"])
    for title, part in (("the induction head", chosen), ("mean of all heads", data)):
        names = {"accuracy": "accuracy of the model", "induction": "chooses what it should"}
        names |= TRACKED
        mean = part.groupby("step")[list(names)].mean(numeric_only=True).reset_index()
        long = mean.melt("step", var_name="name", value_name="value").dropna()
        long["number"] = long["name"].map(names)
        charts.append(
            alt.Chart(long, title=title).mark_line(point=True).encode(
                x=alt.X("step:Q", title="training step"),
                y=alt.Y("value:Q", title="share or cosine", scale=alt.Scale(domain=[0, 1])),
                color=alt.Color("number:N", title=None, sort=list(names.values()),
                                scale=alt.Scale(scheme="tableau10")),
            ).properties(width=300, height=240)
        )  # fmt: skip
    return alt.hconcat(*charts)
