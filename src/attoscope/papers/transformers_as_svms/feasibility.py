"""When some weight makes a selection: widths that are enough, and tokens that cannot be chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.optimize import linprog

from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.transformers_as_svms._paper import PAPER
from attoscope.papers.transformers_as_svms._setting import instance_seeds, joined, parts
from attoscope.svm import AttentionSVM, InfeasibleSelection, Selection, cover_count
from attoscope.tasks import Instance, unit_sphere

# Data, n, T, and the widths tried with best and with random tokens.
SETTINGS = (
    ("unit tokens", 5, 15, (2, 3, 4, 5), (2, 3, 4, 14)),
    ("unit tokens, self-attention", 5, 5, (2, 3, 4, 5), (2, 3, 4, 5)),
    ("Gaussian tokens", 3, 30, (2, 3, 4), (2, 4, 6, 8, 10, 29)),
)
# Tolerance enough to tell feasible from infeasible: both come with a proof.
LOOSE = 0.1
FEASIBLE, INFEASIBLE, UNDECIDED = 1, 0, -1
HULL = (5, 5, 8)
Cell = tuple[str, int, int, int, str]


def decide_part(item: dict[str, Any]) -> dict[str, Any]:
    """Whether some instances' selections are feasible, and their queries separable."""
    verdicts, separable = [], []
    for seed in item["seeds"]:
        one = instance(item["data"], seed, item["n"], item["T"], item["d"])
        random = np.random.default_rng([seed, 3]).integers(item["T"], size=item["n"])
        chosen = one.optimal if item["chosen"] == "best" else random
        tokens = hidden(one.tokens, chosen, seed) if item["hide"] else one.tokens
        verdicts.append(verdict(Selection(tokens, one.queries, chosen)))
        separable.append(queries_separable(one))
    return {"verdict": verdicts, "separable": separable}


def instance(data: str, seed: int, n: int, T: int, d: int) -> Instance:
    """One instance of the data of this name."""
    if data == "Gaussian tokens":
        rng = np.random.default_rng([seed, 4])
        shapes = ((n, T, d), (n, d), (n,), (d,))
        tokens, queries, signs, head = (rng.standard_normal(shape) for shape in shapes)
        return Instance(tokens, queries, np.where(signs > 0.0, 1.0, -1.0), head)
    one = unit_sphere(seed, n, T, d)
    queries = one.tokens[:, 0] if data.endswith("self-attention") else one.queries
    return Instance(one.tokens, queries, one.labels, one.head)


def hidden(
    tokens: Float[np.ndarray, "sequence token width"],
    chosen: NDArray[np.integer[Any]],
    seed: int,
) -> Float[np.ndarray, "sequence token width"]:
    """The first sequence's chosen token moved into the convex hull of its others."""
    rng = np.random.default_rng([seed, 5])
    shares = rng.dirichlet(np.ones(tokens.shape[1] - 1))
    moved = tokens.copy()
    moved[0, chosen[0]] = shares @ np.delete(tokens[0], chosen[0], axis=0)
    return moved


def verdict(selection: Selection) -> int:
    """FEASIBLE where a weight has all margins, INFEASIBLE where a proof holds, or UNDECIDED."""
    try:
        weight = AttentionSVM(tol=LOOSE).fit_selection(selection).weight_
    except InfeasibleSelection as proof:
        return INFEASIBLE if proof.verify() else UNDECIDED
    return FEASIBLE if selection.margins(weight)[~selection.selected].min() > 0.0 else UNDECIDED


def queries_separable(one: Instance) -> bool:
    """Whether some c has `label_i c^T z_i > 0` for all i."""
    n, d = one.queries.shape
    apart = -one.labels[:, None] * one.queries
    return bool(linprog(np.zeros(d), apart, -np.ones(n), bounds=(None, None)).status == 0)


@PAPER.claim(
    name="feasibility",
    statement="Any selection is feasible once d >= max(T - 1, n); for linear heads that of the "
    "best tokens already once d >= n, and whenever the queries are separable by label.",
    source="Theorem on the separability of tokens; best tokens and separable queries added",
    criterion="every instance is decided with a proof; all are feasible at d >= max(T - 1, n) for "
    "random selections and at d >= n for best tokens, in self-attention too; every instance with "
    "separable queries is feasible for best tokens",
)
def feasibility(run: Run) -> Evidence:
    count = run.pick(quick=50, paper=300)
    cells = _cells()
    found = dict(zip(cells, _decided(run, cells, count), strict=True))
    rows = [_row(cell, values) for cell, values in found.items()]
    enough = [row["feasible"] for row in rows if row["enough"]]
    best = [v for (*_, chosen), v in found.items() if chosen == "best"]
    missed = sum(int((v["separable"] & (v["verdict"] != FEASIBLE)).sum()) for v in best)
    undecided = sum(int((v["verdict"] == UNDECIDED).sum()) for v in found.values())
    control, unknown = _hull(run, count)
    return Evidence(
        measured={
            "instances": count * len(cells),
            "undecided": undecided + unknown,
            "least feasible share where d is enough": min(enough),
            "infeasible with separable queries": missed,
        },
        holds=undecided + unknown == 0 and min(enough) == 1.0 and missed == 0,
        control=control,
        figure=_figure(rows),
        table=rows,
    )


def _cells() -> list[Cell]:
    return [
        (data, n, T, d, chosen)
        for data, n, T, best, random in SETTINGS
        for chosen, widths in (("best", best), ("random", random))
        for d in widths
    ]


def _decided(
    run: Run, cells: list[Cell], count: int, hide: bool = False
) -> list[dict[str, Any]]:
    names = ("data", "n", "T", "d", "chosen")
    pieces = parts(instance_seeds(run, count), 50)
    items = [
        {**dict(zip(names, cell, strict=True)), "hide": hide, "seeds": part}
        for cell in cells
        for part in pieces
    ]
    results = run.map(decide_part, items, label="in the hull" if hide else "selections")
    each = len(pieces)
    grouped = [results[i : i + each] for i in range(0, len(results), each)]
    return [{name: joined(g, name) for name in ("verdict", "separable")} for g in grouped]


def _hull(run: Run, count: int) -> tuple[Control, int]:
    """Selections of a token in the hull of the others, where any other would be feasible."""
    (found,) = _decided(run, [("unit tokens", *HULL, "random")], count, hide=True)
    feasible = float((found["verdict"] == FEASIBLE).mean())
    undecided = int((found["verdict"] == UNDECIDED).sum())
    control = Control(
        "one chosen token moved into the convex hull of the others, n = T = 5, d = 8",
        {"instances": count, "feasible": feasible, "undecided": undecided},
        fails=bool((found["verdict"] == INFEASIBLE).all()),
    )
    return control, undecided


def _row(cell: Cell, values: dict[str, Any]) -> dict[str, Any]:
    data, n, T, d, chosen = cell
    best = chosen == "best"
    return {
        "data": data, "n": n, "T": T, "d": d, "chosen": chosen,
        "feasible": float((values["verdict"] == FEASIBLE).mean()),
        "enough": d >= (n if best else max(T - 1, n)),
        "separable queries": float(values["separable"].mean()) if best else None,
        "Cover's count": cover_count(n, d) if best else None,
    }  # fmt: skip


def _figure(rows: list[dict[str, Any]]) -> Any:
    import altair as alt

    lines = [
        {**row, "share": row["feasible"], "what": f"{row['chosen']} tokens"} for row in rows
    ]
    lines += [
        {**row, "share": row["Cover's count"], "what": "Cover's count"}
        for row in rows
        if row["Cover's count"] is not None
    ]
    panels = []
    for data, n, T, *_ in SETTINGS:
        chart = alt.Chart(alt.Data(values=[row for row in lines if row["data"] == data]))
        panel = chart.mark_line(point=True).encode(
            x=alt.X("d:Q", title="width d").axis(tickMinStep=1),
            y=alt.Y("share:Q", title="share of feasible instances"),
            color=alt.Color("what:N", title=None).sort(None),
            strokeDash=alt.StrokeDash("what:N", title=None).sort(None),
        )
        title = alt.Title(data, subtitle=f"n = {n}, T = {T}")
        panels.append(panel.properties(width=210, height=220, title=title))
    return alt.hconcat(*panels)
