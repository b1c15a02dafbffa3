"""The stream under a head's own rank: its weight there is a product of two narrow projections."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning

from attoscope.maxmargin.choices import Choices, collect
from attoscope.maxmargin.geometry import cosine, stable_rank
from attoscope.maxmargin.predictors import (
    Learner,
    by_weight,
    difference,
    mean_difference,
    position_table,
)
from attoscope.svm import AttentionSVM, InfeasibleSelection
from studies.heads_measure import FEWEST, by_document, filtered, site_list
from studies.heads_models import fresh, loaded
from studies.heads_summary import auc_with_interval, mean_interval, pooled, share

Array = NDArray[np.float64]
Record = dict[str, Any]
TOL = 1e-2
# Whose choices, in the order of the table.
KINDS = ("trained", "trained, random selector", "fresh", "fresh, random selector")
SOLVED = ("SVM, Frobenius", "SVM, nuclear", "SVM, own rank")
CUT = "mean difference, own rank"


@dataclass(frozen=True)
class RankPart:
    """Which heads of a model are read, and the seconds that one fit may take.

    `queries` have to be well above twice the heads' width: a weight learnt on half of them has no
    more dimensions than that half has queries, whatever its rank may be.
    """

    model: str
    documents: int
    tokens: int
    queries: int
    every: int
    heads: tuple[int, ...]
    seconds: float
    filter: str = "no sinks"

    @property
    def name(self) -> str:
        """As in the names of files."""
        return f"{self.model}, own rank"


def cut(weight: Array, rank: int) -> Array:
    """The nearest weight of at most this rank."""
    u, s, vt = np.linalg.svd(weight, full_matrices=False)
    return np.asarray((u[:, :rank] * s[:rank]) @ vt[:rank])


def solver(
    name: str, rank: int, seconds: float, log: list[Record]
) -> Callable[[Choices], AttentionSVM | None]:
    """Solves one of the three SVMs and notes in `log` how far it came."""
    norm = "nuclear" if name == "SVM, nuclear" else "frobenius"
    limit = rank if name == "SVM, own rank" else None

    def solve(choices: Choices) -> AttentionSVM | None:
        model = AttentionSVM(norm, max_rank=limit, tol=TOL, time_limit=seconds)
        try:
            with warnings.catch_warnings():
                # The log says where it stopped.
                warnings.simplefilter("ignore", ConvergenceWarning)
                model.fit_selection(choices.selection)
        except InfeasibleSelection:
            log.append({"learner": name, "separates": False})
            return None
        found = bool(np.isfinite(model.gap_))
        stopped = "stopped by" in model.status_
        log.append({"learner": name, "separates": found, "stopped": stopped, "gap": model.gap_})
        return model if found else None

    return solve


def rank_record(choices: Choices, kind: str, seconds: float, seed: int) -> Record:
    """One head: held-out choices by document, cosines with its weight, and stable ranks."""
    rank, log = int(np.linalg.matrix_rank(choices.weight)), []
    solvers = {name: solver(name, rank, seconds, log) for name in SOLVED}

    def learner(name: str) -> Learner:
        def learn(train: Choices, test: Choices) -> Array:
            model = solvers[name](train)
            return by_weight(None if model is None else model.weight_, test)

        return learn

    learners = {name: learner(name) for name in SOLVED} | {
        CUT: lambda train, test: by_weight(cut(mean_difference(train), rank), test),
        "mean difference": difference,
        "position": position_table,
    }
    record: Record = {
        "weights": kind, "site": choices.site, "head": choices.head, "rank": rank,
        "queries": len(choices.chosen), "held_out": by_document(choices, learners, seed),
    }  # fmt: skip
    models = {name: solve(choices) for name, solve in solvers.items()}
    weights = {name: m.weight_ for name, m in models.items() if m is not None}
    weights[CUT] = cut(mean_difference(choices), rank)
    record["cosine"] = {n: cosine(choices.weight, w) for n, w in weights.items()}
    record["stable_rank"] = {n: stable_rank(w) for n, w in weights.items()}
    whole, limited = models["SVM, Frobenius"], models["SVM, own rank"]
    if whole is not None and limited is not None:
        record["cost"] = limited.objective_ / whole.lower_bound_ - 1.0
        record["between"] = cosine(whole.weight_, limited.weight_)
    return record | {"fits": log}


def rank_records(part: RankPart, workers: int = 2) -> list[Record]:
    """The records of the trained heads, of a fresh twin's, and of the random selectors of both."""
    subject, data = loaded(part.model)
    read = data(part.documents, part.tokens)
    jobs = []
    for kind, one in (("trained", subject), ("fresh", fresh(subject, 0))):
        heads = collect(
            one, read, sites=site_list(subject, read, part.every), heads=part.heads,
            space="stream", queries=part.queries,
        )  # fmt: skip
        for head in heads:
            rng = np.random.default_rng([0, head.head, *head.site.encode()])
            null = head.random_selector(rng)
            for label, whose in ((kind, head), (f"{kind}, random selector", null)):
                choices = None if whose is None else filtered(whose, part.filter)
                if choices is not None and len(choices.chosen) >= FEWEST:
                    jobs.append(delayed(rank_record)(choices, label, part.seconds, 0))
    return list(Parallel(n_jobs=workers)(jobs))


def rank_tables(part: RankPart, records: list[Record]) -> Record:
    """Shares, cosines and stable ranks by learner, with intervals; fits; one row per head."""
    of = {kind: [r for r in records if r["weights"] == kind] for kind in KINDS}
    rng = np.random.default_rng(0)
    rows = []
    for learner in (*SOLVED, CUT, "mean difference", "position", "chance"):
        row: Record = {"learner": learner}
        row["held_out"] = {k: pooled(rs, learner, "held_out", 0) for k, rs in of.items()}
        for name in ("cosine", "stable_rank") if learner in (*SOLVED, CUT) else ():
            row[name] = {
                k: _mean(np.array([r[name].get(learner, np.nan) for r in rs]), rng)
                for k, rs in of.items()
            }
        if "cosine" in row:
            values = {
                k: np.array([r["cosine"].get(learner, np.nan) for r in rs])
                for k, rs in of.items()
            }
            for against, kind in (("fresh", "fresh"), ("null", KINDS[1])):
                row[f"cosine_auc_{against}"] = auc_with_interval(
                    values["trained"], values[kind], rng
                )
        if learner != "chance":
            above = {k: _above(of, k, learner) for k in ("trained", "fresh")}
            row["above"] = {k: _mean(values, rng) for k, values in above.items()}
            row["auc"], row["auc_interval"] = auc_with_interval(*above.values(), rng)
            first = _shares(of["trained"], learner) - _shares(of["trained"], SOLVED[0])
            row["above_frobenius"] = _mean(first, rng)
        rows.append(row)
    fits = {}
    for name in SOLVED:
        log = [fit for r in records for fit in r["fits"] if fit["learner"] == name]
        fits[name] = {
            "fits": len(log),
            "stopped": sum(fit.get("stopped", False) for fit in log),
            "none": sum(not fit["separates"] for fit in log),
        }
    cost, between = ({k: _column(rs, n) for k, rs in of.items()} for n in ("cost", "between"))
    limits = {
        # A fit that was stopped early can cost any amount: no mean.
        "cost": {k: np.quantile(v, (0, 0.5, 1)).tolist() for k, v in cost.items() if len(v)},
        "between": {k: _mean(v, rng) for k, v in between.items()},
    }
    return {"part": asdict(part), "rows": rows, "fits": fits, **limits, "heads": records}


def _column(records: list[Record], name: str) -> Array:
    return np.array([r[name] for r in records if name in r], np.float64)


def _shares(records: list[Record], learner: str) -> Array:
    return np.array([share(r["held_out"].get(learner)) for r in records])


def _above(of: dict[str, list[Record]], kind: str, learner: str) -> Array:
    """What a head's choices are more predictable than its own random selector's."""
    null = {(r["site"], r["head"]): r for r in of[f"{kind}, random selector"]}
    pairs = [
        (r, null[r["site"], r["head"]]) for r in of[kind] if (r["site"], r["head"]) in null
    ]
    own, other = ([p[i] for p in pairs] for i in (0, 1))
    return _shares(own, learner) - _shares(other, learner)


def _mean(values: Array, rng: np.random.Generator) -> Record | None:
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return {"value": float(values.mean()), "interval": mean_interval(values, rng)}
