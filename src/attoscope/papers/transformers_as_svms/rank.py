"""The ranks of the SVM solutions, certified; and what was published without a certificate."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from attoscope.papers.base import Control, Evidence, Fails, Run
from attoscope.papers.transformers_as_svms import _scs
from attoscope.papers.transformers_as_svms._paper import PAPER
from attoscope.papers.transformers_as_svms._setting import instance_seeds, joined, parts, solve
from attoscope.svm import AttentionSVM, InfeasibleSelection, Selection
from attoscope.tasks import unit_sphere

Cells = dict[tuple[int, int, int], dict[str, Any]]
WIDTHS = (1, 2, 3, 4, 5, 10, 15, 20)
SIZES = ((5, 5), (10, 5), (15, 5), (5, 10), (5, 15))
WIDE = tuple(d for d in WIDTHS if d >= 5)
# The accuracy of the solutions of the control, and the tolerance of published ranks.
ROUGH, PUBLISHED = 1e-3, 1e-7
# Where SCS is tried as well.
PEER_AT = ((5, 5, 10), (10, 5, 10))
READINGS = (
    "infeasible",
    "frobenius",
    "at most",
    "sequences",
    "nuclear",
    "active",
    "rough",
    "gap",
)


def solve_part(item: dict[str, Any]) -> dict[str, Any]:
    """Ranks of some instances' solutions; NaN where no weight separates."""
    n, T, d = item["cell"]
    rows = [_ranks(_selection(seed, n, T, d)) for seed in item["seeds"]]
    return {name: [row.get(name, np.nan) for row in rows] for name in READINGS}


def solve_by_scs(item: dict[str, Any]) -> list[int]:
    """Published ranks of the solutions that SCS gives."""
    n, T, d = item["cell"]
    chosen = [_selection(seed, n, T, d) for seed in item["seeds"]]
    return [published_rank(_scs.nuclear_by_scs(selection)) for selection in chosen]


def _selection(seed: int, n: int, T: int, d: int) -> Selection:
    one = unit_sphere(seed, n, T, d)
    return Selection(one.tokens, one.queries, one.optimal)


def _ranks(selection: Selection) -> dict[str, float]:
    try:
        frobenius = solve(selection, "frobenius")
    except InfeasibleSelection as proof:
        return {"infeasible": 1.0} if proof.verify() else {}
    nuclear = solve(selection, "nuclear")
    rough = AttentionSVM("nuclear", tol=ROUGH).fit_selection(selection)
    return {
        "infeasible": 0.0,
        "frobenius": frobenius.rank_,
        "at most": _nonzero(frobenius.weight_),
        "sequences": len(np.unique(frobenius.dual_.nonzero()[0])),
        "nuclear": nuclear.rank_,
        "active": len(nuclear.support_),
        "rough": published_rank(rough.weight_),
        "gap": max(nuclear.gap_, frobenius.gap_),
    }


def published_rank(weight: Float[np.ndarray, "rows columns"]) -> int:
    """Singular values above 1e-7, whatever the accuracy of the weight."""
    return int(np.linalg.matrix_rank(weight, tol=PUBLISHED))


def _nonzero(weight: Float[np.ndarray, "rows columns"]) -> int:
    """Singular values that are not rounding: certified ranks leave out what the gap may hide."""
    values = np.linalg.svd(weight, compute_uv=False)
    return int(np.count_nonzero(values > 1e-9 * values[0]))


def rank_bound(active: Any) -> Any:
    """The largest r with r (r + 1) / 2 at most the number of active constraints."""
    return np.floor((np.sqrt(8.0 * np.asarray(active) + 1.0) - 1.0) / 2.0)


def sweep(run: Run, widths: tuple[int, ...], count: int) -> Cells:
    """Readings of each (n, T, d), as arrays over instances."""
    seeds = instance_seeds(run, count)
    cells = [(n, T, d) for n, T in SIZES for d in widths]
    items = [{"cell": cell, "seeds": part} for cell in cells for part in parts(seeds)]
    results = run.map(solve_part, items, label="solving")
    return {
        cell: {
            name: joined(
                [r for i, r in zip(items, results, strict=True) if i["cell"] == cell], name
            )
            for name in READINGS
        }
        for cell in cells
    }


@PAPER.claim(
    name="svm-rank",
    statement="The nuclear-norm SVM has solutions of far lower rank than the Frobenius-norm SVM.",
    source="Figure on the rank of SVM solutions; bound by the number of active constraints added",
    criterion="certified solutions in every feasible instance: nuclear rank r with r (r + 1)/2 at "
    "most the number of active constraints; Frobenius rank min(sequences with a positive "
    "multiplier, d), between what the gap certifies and what is not rounding; with T = 5, mean "
    "nuclear rank at most 0.6 of the mean Frobenius rank from d = 10 on",
)
def svm_rank(run: Run) -> Evidence:
    cells = sweep(run, WIDTHS, run.pick(quick=12, paper=100))
    decided = feasible_only(cells)
    ratio = _ratio(decided, "nuclear", {5})
    above, unlike, gap = 0, 0, 0.0
    for (_, _, d), cell in decided.items():
        above += int((cell["nuclear"] > rank_bound(cell["active"])).sum())
        stated = np.minimum(cell["sequences"], d)
        unlike += int(((stated < cell["frobenius"]) | (stated > cell["at most"])).sum())
        gap = max(gap, float(cell["gap"].max()))
    marks = np.concatenate([cell["infeasible"] for cell in cells.values()])
    return Evidence(
        measured={
            "feasible": int((marks == 0.0).sum()),
            "infeasible, proved": int((marks == 1.0).sum()),
            "undecided": int(np.isnan(marks).sum()),
            "largest gap": gap,
            "nuclear rank above its bound": above,
            "Frobenius rank other than stated": unlike,
            "largest ratio of mean ranks, d >= 10, T = 5": ratio,
            "largest ratio of mean ranks, d >= 10, T = 10 and 15": _ratio(
                decided, "nuclear", {10, 15}
            ),
        },
        holds=above == 0 and unlike == 0 and ratio <= 0.6,
        control=_uncertified(run, decided),
        figure=_figure(decided),
        table=[_row(cell, values) for cell, values in cells.items()],
    )


@PAPER.claim(
    name="frobenius-full-rank",
    statement="From d = 5 on the Frobenius-norm SVM has rank min(n, d).",
    source="Figure on the rank of SVM solutions",
    criterion="in every feasible instance with d >= 5 the certified rank is min(n, d)",
    expected=Fails(
        "a sequence whose constraints are all met with room to spare adds nothing to the solution; "
        "with n <= d its rank is then below n",
        "the solution is a sum of u_i z_i^T over the sequences with a positive multiplier",
    ),
)
def frobenius_full_rank(run: Run) -> Evidence:
    decided = feasible_only(sweep(run, WIDE, run.pick(quick=12, paper=100)))
    full = {name: _full_rank(decided, name) for name in ("frobenius", "nuclear")}
    all_of = {name: np.concatenate(list(marks.values())) for name, marks in full.items()}
    spare = [cell["sequences"] < min(n, d) for (n, _, d), cell in decided.items()]
    at_5 = [marks for (_, _, d), marks in full["frobenius"].items() if d == 5]
    return Evidence(
        measured={
            "instances": len(all_of["frobenius"]),
            "share of rank min(n, d)": float(all_of["frobenius"].mean()),
            "share at d = 5": float(np.concatenate(at_5).mean()),
            "share with too few binding sequences": float(np.concatenate(spare).mean()),
        },
        holds=bool(all_of["frobenius"].all()),
        control=Control(
            "certified nuclear-norm solutions",
            {"share of rank min(n, d)": float(all_of["nuclear"].mean())},
            fails=not bool(all_of["nuclear"].all()),
        ),
        figure=_full_rank_figure(full["frobenius"]),
    )


def _full_rank(decided: Cells, name: str) -> dict[tuple[int, int, int], Any]:
    return {(n, T, d): cell[name] == min(n, d) for (n, T, d), cell in decided.items()}


def feasible_only(cells: Cells) -> Cells:
    """The cells with a feasible instance, without their other instances."""
    kept = {}
    for cell, values in cells.items():
        mark = values["infeasible"] == 0.0
        if mark.any():
            kept[cell] = {name: each[mark] for name, each in values.items()}
    return kept


def _ratio(decided: Cells, name: str, lengths: set[int]) -> float:
    """The largest mean rank over mean Frobenius rank, from d = 10 on."""
    return max(
        float(cell[name].mean() / cell["frobenius"].mean())
        for (_, T, d), cell in decided.items()
        if d >= 10 and T in lengths
    )


def _uncertified(run: Run, decided: Cells) -> Control:
    broken = [cell["rough"] > rank_bound(cell["active"]) for cell in decided.values()]
    measured: dict[str, Any] = {
        "share above the bound": float(np.concatenate(broken).mean()),
        "largest ratio of mean ranks, d >= 10, T = 5": _ratio(decided, "rough", {5}),
    }
    if _scs.available():
        items = [{"cell": cell, "seeds": instance_seeds(run, 10)} for cell in PEER_AT]
        ranks = run.map(solve_by_scs, items, label="solving by SCS")
        for cell, found in zip(PEER_AT, ranks, strict=True):
            measured[f"mean rank by SCS, (n, T, d) = {cell}"] = float(np.mean(found))
    return Control(
        "solutions to a relative gap of 1e-3, with every singular value above 1e-7 counted",
        measured,
        fails=bool(np.concatenate(broken).any()),
    )


def _row(cell: tuple[int, int, int], values: dict[str, Any]) -> dict[str, Any]:
    feasible = values["infeasible"] == 0.0
    row: dict[str, Any] = dict(zip("nTd", cell, strict=True))
    row["feasible"] = float(feasible.mean())
    names = ("frobenius", "nuclear", "rough", "active")
    means = {name: float(values[name][feasible].mean()) for name in names if feasible.any()}
    row |= {name: means.get(name) for name in names}
    # What a figure shows that takes "no solution" for a matrix of rank 1.
    counted = np.where(feasible, values["frobenius"], 1.0)
    return row | {"frobenius, infeasible as 1": float(counted.mean())}


def _figure(decided: Cells) -> Any:
    import altair as alt

    names = {"frobenius": "Frobenius", "nuclear": "nuclear", "rough": "nuclear, uncertified"}
    panels = []
    for fixed, varied, place in (("T", "n", 0), ("n", "T", 1)):
        rows = [
            {
                "d": cell[2],
                varied: cell[place],
                "norm": label,
                "rank": float(values[name].mean()),
            }
            for cell, values in decided.items()
            for name, label in names.items()
            if cell[1 - place] == 5
        ]
        chart = alt.Chart(alt.Data(values=rows)).mark_line()
        panel = chart.encode(
            x=alt.X("d:Q", title="width d"),
            y=alt.Y("rank:Q", title="mean rank of the solution"),
            color=alt.Color(f"{varied}:N", title=varied),
            strokeDash=alt.StrokeDash("norm:N", title="norm").sort(None).scale(
                range=[[1, 0], [6, 3], [1, 3]]
            ),
        )  # fmt: skip
        panels.append(panel.properties(width=280, height=240, title=f"{fixed} = 5"))
    return alt.hconcat(*panels).resolve_scale(color="independent", strokeDash="shared")


def _full_rank_figure(full: dict[tuple[int, int, int], Any]) -> Any:
    import altair as alt

    rows = [
        {"sizes": f"n = {n}, T = {T}", "d": d, "share": float((~marks).mean())}
        for (n, T, d), marks in full.items()
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            x=alt.X("d:O", title="width d").axis(labelAngle=0),
            xOffset=alt.XOffset("sizes:N").sort(None),
            y=alt.Y("share:Q", title="share of instances of rank below min(n, d)"),
            color=alt.Color("sizes:N", title="sizes").sort(None),
        )
        .properties(width=360, height=240)
    )
