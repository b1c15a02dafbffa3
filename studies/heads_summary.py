"""From records of heads to the study's tables: shares with intervals, and what discriminates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Record = dict[str, Any]
REPLICATES = 1000


def share(table: Any) -> float:
    """Predicted over asked, all documents together; NaN where the learner had no answer."""
    if not table:
        return float("nan")
    predicted, asked = np.array(table).sum(0)
    return float(predicted / asked)


def held(name: str) -> Callable[[Record], float]:
    """The held-out share of a learner."""
    return lambda record: share(record.get("held_out", {}).get(name))


def null_held(name: str) -> Callable[[Record], float]:
    """The same for the choices of the random selector."""
    return lambda record: share(record.get("null_held_out", {}).get(name))


def shape(name: str, null: bool = False) -> Callable[[Record], float]:
    """A number of the geometry."""
    part = "null_geometry" if null else "geometry"
    return lambda record: float((record.get(part) or {}).get(name, np.nan))


def _above(first: Callable[[Record], float], *others: Callable[[Record], float]) -> Any:
    return lambda record: first(record) - max(other(record) for other in others)


# Name, the statistic, and the same of the random selector where that is another number.
Statistic = tuple[str, Callable[[Record], float], Callable[[Record], float] | None]
STATISTICS: tuple[Statistic, ...] = (
    ("held-out, SVM", held("svm"), null_held("svm")),
    ("held-out, mean difference", held("difference"), null_held("difference")),
    ("held-out, soft SVM", held("soft"), None),
    ("held-out, keys only", held("keys only"), null_held("keys only")),
    ("held-out, position", held("position"), None),
    ("held-out, token", held("token"), None),
    ("held-out, chance", held("chance"), None),
    ("SVM above mean difference", _above(held("svm"), held("difference")),
     _above(null_held("svm"), null_held("difference"))),
    ("SVM above position", _above(held("svm"), held("position")), None),
    ("SVM above position, token and keys only",
     _above(held("svm"), held("position"), held("token"), held("keys only")), None),
    ("SVM above random selector", _above(held("svm"), null_held("svm")), None),
    ("alignment", shape("alignment"), shape("alignment", True)),
    ("alignment with mean difference", shape("difference_alignment"),
     shape("difference_alignment", True)),
    ("alignment above random selector", _above(shape("alignment"), shape("alignment", True)),
     None),
    ("margin share", shape("margin_share"), shape("margin_share", True)),
    ("support share", shape("support_share"), shape("support_share", True)),
    ("stable rank", shape("stable_rank"), shape("stable_rank", True)),
    ("certainty", lambda r: r["certainty"], None),
    ("choices on sinks", lambda r: r["on_sinks"], lambda r: r.get("null_on_sinks", np.nan)),
)  # fmt: skip


def auc(first: Array, second: Array) -> float:
    """Probability that one of `first` exceeds one of `second`, ties counting half."""
    first, second = first[np.isfinite(first)], second[np.isfinite(second)]
    if not len(first) or not len(second):
        return float("nan")
    apart = first[:, None] - second[None, :]
    return float((apart > 0).mean() + 0.5 * (apart == 0).mean())


def _interval(replicates: Sequence[float]) -> list[float]:
    values = np.array(replicates)
    values = values[np.isfinite(values)]
    return [float(v) for v in np.percentile(values, (2.5, 97.5))] if len(values) else []


def mean_interval(values: Array, rng: np.random.Generator) -> list[float]:
    """95 % bootstrap interval of a mean over heads."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return []
    return _interval(rng.choice(values, (REPLICATES, len(values))).mean(1).tolist())


def pooled(records: Iterable[Record], name: str, part: str, seed: int) -> Record | None:
    """Mean over heads of a held-out share; the interval resamples documents and heads."""
    tables = [r[part][name] for r in records if r.get(part) and r[part].get(name)]
    tables = [t for t in tables if len(t) == len(tables[0])]
    if not tables:
        return None
    counts = np.array(tables, np.float64)  # head, document, (predicted, asked)
    rng = np.random.default_rng(seed)
    replicates = []
    for _ in range(REPLICATES // 2):
        copies = rng.poisson(1.0, counts.shape[1])
        heads = rng.integers(0, len(counts), len(counts))
        sums = np.tensordot(counts[heads], copies, axes=(1, 0))
        asked = sums[:, 1] > 0
        if asked.any():
            replicates.append(float((sums[asked, 0] / sums[asked, 1]).mean()))
    whole = counts.sum(1)
    value = float((whole[:, 0] / whole[:, 1]).mean())
    return {"value": value, "interval": _interval(replicates), "heads": len(counts)}


def discrimination(trained: list[Record], fresh: list[Record], seed: int) -> list[Record]:
    """Each statistic: means, and how well it tells trained heads from fresh ones and from nulls.

    `auc_fresh`: against the heads of fresh twins. `auc_null`: against random selectors on the
    trained model's own keys and queries. Intervals resample heads.
    """
    rows = []
    for number, (name, statistic, null) in enumerate(STATISTICS):
        rng = np.random.default_rng([seed, number])
        own, twin = (np.array([statistic(r) for r in part]) for part in (trained, fresh))
        mixed = np.array([null(r) for r in trained]) if null else np.full(len(trained), np.nan)
        row: Record = {"statistic": name}
        for label, values in (("trained", own), ("fresh", twin), ("random", mixed)):
            finite = values[np.isfinite(values)]
            row[label] = float(finite.mean()) if len(finite) else None
            row[f"{label}_interval"] = mean_interval(values, rng)
        row["auc_fresh"], row["auc_fresh_interval"] = auc_with_interval(own, twin, rng)
        row["auc_null"], row["auc_null_interval"] = auc_with_interval(own, mixed, rng)
        rows.append(row)
    return rows


def auc_with_interval(
    first: Array, second: Array, rng: np.random.Generator
) -> tuple[float | None, list[float]]:
    """`auc` and its 95 % bootstrap interval over heads."""
    first, second = first[np.isfinite(first)], second[np.isfinite(second)]
    if not len(first) or not len(second):
        return None, []
    draws = [
        auc(rng.choice(first, len(first)), rng.choice(second, len(second))) for _ in range(200)
    ]
    return auc(first, second), _interval(draws)


def plain(value: Any) -> Any:
    """Data for JSON: four digits, no NaN."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (float, np.floating)):
        return round(float(value), 4) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
