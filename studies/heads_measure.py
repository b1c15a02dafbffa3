"""What the study measures of one head: plain numbers, and held-out choices by document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from attoscope.errors import AttoscopeError
from attoscope.maxmargin.choices import Choices, collect
from attoscope.maxmargin.geometry import cosine, geometry, stable_rank
from attoscope.maxmargin.predictors import (
    Learner,
    by_weight,
    difference,
    feasible_weight,
    held_out,
    keys_only,
    mean_difference,
    position_table,
    solve,
    svm,
    token_table,
)
from attoscope.maxmargin.readings import NORMS
from attoscope.svm import fingerprint
from attoscope.trace import Batch, Subject

# Size of the random start of a random feasible weight, over the norm of the max-margin weight.
SIZES = (1.0, 10.0)
FEWEST = 16
FILTERS = ("all", "no sinks", "certain half", "no sinks, certain half")


def soft(train: Choices, test: Choices) -> Any:
    """A soft margin at the price at which one constraint alone can win a margin of 1."""
    s = train.selection
    keys = np.einsum("btd,btd->bt", s.keys, s.keys)[s.sequence]
    queries = np.einsum("nd,nd->n", s.queries, s.queries)
    typical = 2.0 * keys[train.allowed].mean() * queries.mean()
    model = solve(train, C=float(1.0 / typical), tol=2e-2, max_iter=200)
    return by_weight(None if model is None else model.weight_, test)


def feasible(size: float, seed: int) -> Learner:
    """A random weight that makes the same choices as the head on the training documents."""

    def learn(train: Choices, test: Choices) -> Any:
        model = solve(train)
        if model is None:
            return by_weight(None, test)
        rng = np.random.default_rng([seed, train.head])
        return by_weight(feasible_weight(train, rng, size * model.objective_), test)

    return learn


def learners(seed: int, more: bool) -> dict[str, Learner]:
    """All that the study compares; `more` adds the slow ones."""
    found: dict[str, Learner] = {
        "svm": svm(), "difference": difference, "keys only": keys_only, "soft": soft,
        "position": position_table, "token": token_table,
    }  # fmt: skip
    if more:
        found["nuclear"] = svm("nuclear")
        found |= {f"feasible {size:g}": feasible(size, seed) for size in SIZES}
    return found


def head_record(
    head: Choices, name: str, seed: int, more: bool = False, label: bool = False
) -> dict[str, Any] | None:
    """One head under one filter: held-out choices of every learner by document, geometry, and
    the same of a random selector under the same filter. None with fewer than 16 queries left."""
    choices = filtered(head, name)
    if choices is None or len(choices.chosen) < FEWEST:
        return None
    out: dict[str, Any] = {
        "site": head.site, "head": head.head, "filter": name, "queries": len(choices.chosen),
        "on_sinks": float(choices.on_sinks().mean()),
        "certainty": float(choices.certainty().mean()),
    }  # fmt: skip
    out["held_out"] = by_document(choices, learners(seed, more), seed)
    out["geometry"] = _geometry(choices)
    null = head.random_selector(np.random.default_rng([seed, head.head, *head.site.encode()]))
    null = None if null is None else filtered(null, name)
    if null is not None and len(null.chosen) >= FEWEST:
        few: dict[str, Learner] = {
            "svm": svm(),
            "difference": difference,
            "keys only": keys_only,
        }
        out["null_on_sinks"] = float(null.on_sinks().mean())
        out["null_held_out"] = by_document(null, few, seed)
        out["null_geometry"] = _geometry(null)
    if more:
        out["feasible"] = _feasible(choices, seed)
    if label:
        out["more"] = _slow(choices)
    return out


def by_document(choices: Choices, what: dict[str, Learner], seed: int) -> dict[str, Any]:
    """Per learner, (predicted, asked) of each document; None where it had no answer."""
    found = held_out(choices, what, seed)
    if found is None:
        return {}
    documents = np.unique(found.document)
    table: dict[str, Any] = {}
    for name, right in found.right.items():
        table[name] = [
            [float(np.nansum(right[found.document == d])), int((found.document == d).sum())]
            for d in documents
        ] if np.isfinite(right).all() else None  # fmt: skip
    return table


def _geometry(choices: Choices) -> dict[str, float] | None:
    found = geometry(choices)
    if found is None:
        return None
    names = ("margin_share", "alignment", "support_share", "rank", "stable_rank", "gap")
    plain = {name: float(getattr(found, name)) for name in names}
    plain["difference_alignment"] = cosine(choices.weight, mean_difference(choices))
    return plain


def _feasible(choices: Choices, seed: int) -> dict[str, float]:
    """Cosine of random feasible weights with the SVM: what making the choices alone gives."""
    model = solve(choices)
    out: dict[str, float] = {}
    for size in SIZES if model is not None else ():
        rng = np.random.default_rng([seed, choices.head, 1])
        weight = feasible_weight(choices, rng, size * model.objective_)
        if weight is not None:
            out[f"alignment {size:g}"] = cosine(weight, model.weight_)
            out[f"with the head {size:g}"] = cosine(weight, choices.weight)
    return out


def _slow(choices: Choices) -> dict[str, Any]:
    """Nuclear rank and fingerprint, on the first 16 queries: several norms take their time."""
    few = choices.take(np.arange(min(16, len(choices.chosen))))
    if few is None:
        return {}
    nuclear, frobenius = solve(few, "nuclear"), solve(few)
    if nuclear is None or frobenius is None:
        return {}
    label = fingerprint(few.weight, few.selection, norms=NORMS, tol=1e-2, max_iter=1000)
    return {
        "rank_nuclear": nuclear.rank_, "rank_frobenius": frobenius.rank_,
        "stable_rank_nuclear": stable_rank(nuclear.weight_),
        "stable_rank_frobenius": stable_rank(frobenius.weight_),
        "label": label.label, "nearest": label.nearest, "excess": dict(label.excess),
    }  # fmt: skip


def filtered(choices: Choices, name: str) -> Choices | None:
    """The same head without sinks and special tokens, or its more certain half, or both.

    A half, and not a threshold: a threshold would keep a head's best choices and compare them
    with all choices of another.
    """
    kept: Choices | None = choices
    if name.startswith("no sinks"):
        kept = choices.without_sinks()
    if kept is not None and name.endswith("certain half"):
        certainty = kept.certainty()
        kept = kept.take(certainty >= np.median(certainty))
    return kept


def records(
    subject: Subject,
    data: Sequence[Batch],
    *,
    space: Any = "head",
    sites: tuple[str, ...] | None = None,
    queries: int = 128,
    seed: int = 0,
    filters: Sequence[str] = FILTERS,
    more: bool = False,
    label: bool = False,
    workers: int = 2,
) -> list[dict[str, Any]]:
    """One record per head and filter; `more` and `label` add to those of the first filter."""
    heads = collect(subject, data, sites=sites, space=space, queries=queries, seed=seed)
    jobs = (
        delayed(head_record)(head, name, seed, more and number == 0, label and number == 0)
        for head in heads
        for number, name in enumerate(filters)
    )
    return [record for record in Parallel(n_jobs=workers)(jobs) if record is not None]


def site_list(subject: Subject, data: Sequence[Batch], every: int) -> tuple[str, ...]:
    """Every so many layers of the first stack."""
    stack = subject.layout(data[0]).stacks[0]
    if not stack.layers:
        raise AttoscopeError(
            f"{subject.name}: got no layer that attends; expected at least one"
        )
    return tuple(f"{stack.name}.{layer}" for layer in stack.layers[::every])
