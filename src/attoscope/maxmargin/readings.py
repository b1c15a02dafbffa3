"""Every head of a model as a max-margin selector: readings with nulls, and what competes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import NDArray

from attoscope.maxmargin.choices import UNKNOWN, Choices, collect
from attoscope.maxmargin.geometry import geometry, stable_rank
from attoscope.maxmargin.predictors import held_out, position_table, solve, svm
from attoscope.maxmargin.specs import GEOMETRY, HELD_OUT
from attoscope.measures.base import Reading, Spec
from attoscope.measures.tally import Tally
from attoscope.svm import fingerprint
from attoscope.trace.subject import Subject
from attoscope.trace.types import Batch

Array = NDArray[np.float64]
QUERIES = 96
# Ranks and the fingerprint need several norms: of so many queries only.
FEW, FEW_TOL, FEW_ITER = 16, 1e-2, 1000
NORMS = ("frobenius", "nuclear", "spectral")
COMPETITORS = 5
TWO = "fewer than two documents with a choice between content tokens"


@dataclass(frozen=True)
class MaxMargin:
    """What `max_margin` gives.

    `readings` are over (site, head). `heads` holds, per head, `site`, `head`, `queries`, the
    `fingerprint` (label and excess by norm) and the `competitors` with the largest multipliers:
    `document`, `position` and `token` of the query, what it `chosen` and which `competitor` holds
    the weight in place, with the `multiplier`'s share of all.
    """

    readings: tuple[Reading, ...]
    heads: tuple[dict[str, Any], ...]


@dataclass(frozen=True, eq=False)
class _Head:
    """What was measured of one head: per document, and once."""

    documents: NDArray[np.int64]
    by_document: Array
    once: dict[str, float]
    null: dict[str, float]
    facts: dict[str, Any]


def max_margin(
    subject: Subject,
    batches: Sequence[Batch],
    *,
    sites: tuple[str, ...] | None = None,
    queries: int = QUERIES,
    seed: int = 0,
    workers: int | None = 1,
) -> MaxMargin:
    """Every head against the SVM of its choices, in head space, on a sample of its queries.

    Args:
        subject: the model.
        batches: what it reads; held-out choices need two documents or more.
        sites: which attention calls; all when left out.
        queries: so many queries per head, from all documents.
        seed: for the sample, the halves and the random weights of the null.
        workers: processes; -1 for all cores.

    The same seed gives the same numbers. Raises `AttoscopeError` where a model does not show its
    queries and keys. Source: arXiv 2308.16898; what of it discriminates: docs/heads.md.
    """
    heads = collect(subject, batches, sites=sites, queries=queries, seed=seed)
    jobs = (delayed(_measured)(head, seed) for head in heads)
    found = list(Parallel(n_jobs=workers)(jobs))
    words = _words(subject, heads[0])
    facts = tuple(_in_words(one.facts, words) for one in found)
    places = [(head.site, head.head) for head in heads]
    return MaxMargin((*_held_out(places, found, seed), *_geometry(places, found)), facts)


def _measured(choices: Choices, seed: int) -> _Head:
    rng = np.random.default_rng([seed, choices.head, *choices.site.encode()])
    null = choices.random_selector(rng)
    documents, by_document = _by_document(choices, rng, seed)
    facts: dict[str, Any] = {
        "site": choices.site, "head": choices.head, "queries": len(choices.chosen),
        "fingerprint": None, "competitors": [],
    }  # fmt: skip
    once = _once(choices, facts)
    return _Head(documents, by_document, once, {} if null is None else _once(null), facts)


def _by_document(
    choices: Choices, rng: np.random.Generator, seed: int
) -> tuple[NDArray[np.int64], Array]:
    """(document, quantity): held-out choices, by position, of the random weight, and chance."""
    documents = np.arange(len(choices.tokens))
    out = np.full((len(documents), 4), np.nan)
    content = choices.without_sinks()
    real = None if content is None else held_out(
        content, {"svm": svm(), "position": position_table}, seed
    )  # fmt: skip
    if content is None or real is None:
        return documents, out
    mixed = content.random_selector(rng)
    null = None if mixed is None else held_out(mixed, {"svm": svm()}, seed)
    for document in documents:
        mine = real.document == document
        if mine.any():
            for column, name in ((0, "svm"), (1, "position"), (3, "chance")):
                out[document, column] = real.right[name][mine].mean()
        if null is not None and (null.document == document).any():
            out[document, 2] = null.right["svm"][null.document == document].mean()
    return documents, out


def _once(choices: Choices, facts: dict[str, Any] | None = None) -> dict[str, float]:
    """What is one number per head; the head's own competitors and label go into `facts`."""
    found = geometry(choices)
    if found is None:
        return {}
    out = {
        "svm_margin_share": found.margin_share,
        "svm_alignment": found.alignment,
        "svm_support_share": found.support_share,
    }
    few = choices.take(np.arange(len(choices.chosen)) < FEW)
    models = {
        norm: None if few is None else solve(few, norm, tol=FEW_TOL, max_iter=FEW_ITER)
        for norm in ("frobenius", "nuclear")
    }
    if few is not None and models["frobenius"] is not None and models["nuclear"] is not None:
        out["svm_rank"] = stable_rank(models["frobenius"].weight_)
        out["svm_rank_nuclear"] = stable_rank(models["nuclear"].weight_)
        label = fingerprint(
            few.weight, few.selection, norms=NORMS, tol=FEW_TOL, max_iter=FEW_ITER
        )
        out["svm_excess"] = min(label.excess.values())
        if facts is not None:
            facts["fingerprint"] = {"label": label.label, "excess": dict(label.excess)}
    if facts is not None:
        whole = float(found.multiplier.sum())
        for (query, key), multiplier in zip(
            found.support[:COMPETITORS].tolist(), found.multiplier.tolist(), strict=False
        ):
            facts["competitors"].append(_competitor(choices, query, key, multiplier / whole))
    return out


def _competitor(choices: Choices, query: int, key: int, share: float) -> dict[str, Any]:
    document = int(choices.selection.sequence[query])
    ids = choices.tokens[document]
    position, chosen = int(choices.positions[query]), int(choices.chosen[query])

    def token(at: int) -> int | None:
        return int(ids[at]) if at < len(ids) and ids[at] != UNKNOWN else None

    return {
        "document": document, "position": position, "token": token(position),
        "chosen_position": chosen, "chosen": token(chosen),
        "competitor_position": int(key), "competitor": token(int(key)),
        "multiplier": float(share),
    }  # fmt: skip


def _words(subject: Subject, head: Choices) -> dict[int, str]:
    """Token ids in words, where there is a tokenizer."""
    convert = getattr(subject.tokenizer, "convert_ids_to_tokens", None)
    ids = [int(i) for i in np.unique(head.tokens) if i != UNKNOWN]
    return dict(zip(ids, convert(ids), strict=True)) if convert is not None and ids else {}


def _in_words(facts: dict[str, Any], words: dict[int, str]) -> dict[str, Any]:
    for one in facts["competitors"]:
        for name in ("token", "chosen", "competitor"):
            one[name] = None if one[name] is None else words.get(one[name], str(one[name]))
    return facts


def _held_out(places: list[tuple[str, int]], found: list[_Head], seed: int) -> list[Reading]:
    """Means over documents with their bootstrap intervals, as of every other reading."""
    tally = Tally(("svm_held_out", "svm_held_out_position", "random", "chance"), seed=seed)
    for site, rows in _by_site(places, found).items():
        heads = max(rows) + 1
        documents = next(iter(rows.values())).documents
        values = np.full((len(documents), 4, heads), np.nan)
        for head, one in rows.items():
            values[:, :, head] = one.by_document
        tally.add(site, documents.tolist(), values)
    return tally.readings(HELD_OUT, ("site", "head"))


def _geometry(places: list[tuple[str, int]], found: list[_Head]) -> list[Reading]:
    sites = _by_site(places, found)
    shape = len(sites), max(head for _, head in places) + 1
    coords: dict[str, tuple[str | int, ...]] = {
        "site": tuple(sites),
        "head": tuple(range(shape[1])),
    }

    def table(spec: Spec, which: str) -> Array:
        values = np.full(shape, np.nan)
        for row, heads in enumerate(sites.values()):
            for head, one in heads.items():
                values[row, head] = getattr(one, which).get(spec.name, np.nan)
        return values

    readings = []
    for spec in GEOMETRY:
        values = table(spec, "once")
        reason = "no interval: one problem over all documents"
        if np.isnan(values).any():
            reason += "; not computed where no weight makes the choices"
        readings.append(
            Reading(
                spec.name,
                spec.title,
                spec.meaning,
                spec.unit,
                spec.range,
                ("site", "head"),
                coords,
                values,
                null=table(spec, "null"),
                null_meaning=spec.null_meaning,
                reason=reason,
                source=spec.source,
            )  # fmt: skip
        )
    return readings


def _by_site(places: list[tuple[str, int]], found: list[_Head]) -> dict[str, dict[int, _Head]]:
    sites: dict[str, dict[int, _Head]] = {}
    for (site, head), one in zip(places, found, strict=True):
        sites.setdefault(site, {})[head] = one
    return sites
