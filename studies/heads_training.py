"""A small model followed along its training, on a task whose right selection is known."""

from __future__ import annotations

from typing import Any

import numpy as np
from joblib import Parallel, delayed

from attoscope.maxmargin.choices import Choices, collect, rotated
from attoscope.maxmargin.geometry import cosine, geometry
from attoscope.maxmargin.predictors import (
    difference,
    held_out,
    keys_only,
    mean_difference,
    position_table,
    solve,
    svm,
)
from attoscope.trace import Subject, batches
from studies.heads_models import repeated, training

DOCUMENTS, QUERIES = 12, 192


def looks(steps: int) -> tuple[int, ...]:
    """Steps at which to look, the first and the last among them."""
    return tuple(
        sorted({round(steps * share) for share in (0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1)})
    )


def followed(
    seed: int, steps: int, workers: int = 2, queries: int = QUERIES, at: Any = None
) -> list[dict[str, Any]]:
    """One row per step, space and head: what it chooses, and how it stands to its SVM."""
    ids, periods = repeated(DOCUMENTS, np.random.default_rng([seed, 2]))
    rows: list[dict[str, Any]] = []
    starts: dict[Any, Any] = {}
    for step, accuracy, model in training(seed, steps, at or looks(steps)):
        subject = Subject.of(model)
        (batch,) = batches(subject, {"input_ids": ids}, batch_size=DOCUMENTS)
        for space in ("head", "stream"):
            heads = collect(subject, [batch], space=space, queries=queries, seed=seed)  # type: ignore[arg-type]
            if space == "stream" and not starts:
                starts = {(h.site, h.head): h.weight for h in heads}
            known = starts if space == "stream" else {}
            jobs = (delayed(_row)(h, periods, seed, known.get((h.site, h.head))) for h in heads)
            found = Parallel(n_jobs=workers)(jobs)
            rows += [
                {"step": step, "accuracy": accuracy, "space": space, **row} for row in found
            ]
    return rows


def _row(head: Choices, periods: Any, seed: int, start: Any) -> dict[str, Any]:
    p = periods[head.selection.sequence]
    later = head.positions >= p
    back = head.positions - head.chosen
    right = (back % p) == p - 1
    out: dict[str, Any] = {
        "site": head.site, "head": head.head, "certainty": float(head.certainty().mean()),
        # The known selection: the token after an earlier one like the query.
        "induction": float(right[later].mean()), "previous": float((back == 1).mean()),
    }  # fmt: skip
    rng = np.random.default_rng([seed, head.head, len(head.site)])
    null = head.rechosen(rotated(head.weight, rng))
    few = {
        "svm": svm(),
        "difference": difference,
        "position": position_table,
        "keys only": keys_only,
    }
    for prefix, one in (("", head), ("null ", null)):
        found = None if one is None else held_out(one, few, seed)
        for name in (*few, "chance"):
            out[f"{prefix}{name}"] = None if found is None else found.share(name)
        shape = None if one is None else geometry(one)
        for name in ("alignment", "margin_share", "stable_rank"):
            out[f"{prefix}{name}"] = None if shape is None else float(getattr(shape, name))
    out |= _moved(head, start)
    return out


def _moved(head: Choices, start: Any) -> dict[str, float]:
    """Cosine of what training added to the weight with the SVM of what it chooses now."""
    if start is None or np.allclose(start, head.weight):
        return {}
    model, added = solve(head), head.weight - start
    if model is None:
        return {}
    turned = head.rechosen(rotated(head.weight, np.random.default_rng(head.head)))
    other = None if turned is None else solve(turned)
    return {
        "moved": cosine(added, model.weight_),
        "moved, mean difference": cosine(added, mean_difference(head)),
        "moved, random": float("nan") if other is None else cosine(added, other.weight_),
        "start": cosine(start, model.weight_),
    }
