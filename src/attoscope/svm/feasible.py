"""Can a selection be made at all? Counts and hull tests, without solving."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from attoscope.errors import AttoscopeError
from attoscope.svm.selection import Selection


@dataclass(frozen=True)
class Feasibility:
    """What counting and hull tests say.

    `feasible` is None where they do not decide. `inside_hull` lists the queries whose chosen key
    lies in the convex hull of its competitors: no weight selects it. `rank_queries` is the number
    of linearly independent queries: with all of them independent each query can be treated on its
    own, so that the hull tests decide.
    """

    feasible: bool | None
    inside_hull: tuple[int, ...]
    queries: int
    rank_queries: int
    most_competitors: int
    key_width: int
    sentence: str


def feasibility(selection: Selection) -> Feasibility:
    """Whether the selection can be made, as far as can be said without solving it.

    Necessary: no chosen key in the convex hull of its competitors (one small linear programme per
    query). Sufficient: that, and linearly independent queries. With key width >= tokens - 1 and
    query width >= queries almost every selection is feasible. For one chosen key per query,
    positive required margins and no biases; source: arXiv 2308.16898, feasibility theorem.
    """
    if (selection.selected.sum(1) > 1).any() or selection.bias is not None:
        raise AttoscopeError(
            "selection: got several chosen keys or biases; expected one chosen key per query and "
            "no biases for the counting tests, so fit it instead"
        )
    if (selection.required <= 0.0).any():
        raise AttoscopeError(
            "required: got margins that are not positive; expected positive ones for the counting "
            "tests, so fit it instead"
        )
    n, _, width, _ = selection.shape
    competes = ~selection.selected
    if selection.allowed is not None:
        competes &= selection.allowed
    inside = tuple(i for i in range(n) if _inside(selection, i, competes[i]))
    asked = competes.any(1)
    queries = selection.queries[asked]
    rank = int(np.linalg.matrix_rank(queries)) if len(queries) else 0
    most = int(competes.sum(1).max())
    if inside:
        return Feasibility(
            False, inside, len(queries), rank, most, width,
            f"infeasible: {len(inside)} chosen keys lie in the convex hull of their competitors "
            f"(first: query {inside[0]})",
        )  # fmt: skip
    if rank == len(queries):
        return Feasibility(
            True, (), len(queries), rank, most, width,
            f"feasible: the {rank} queries are independent and no chosen key is in a hull",
        )  # fmt: skip
    return Feasibility(
        None, (), len(queries), rank, most, width,
        f"undecided: no chosen key is in a hull, but {len(queries)} queries span only {rank} "
        "dimensions and share the weight; fit it to know",
    )  # fmt: skip


def _inside(selection: Selection, i: int, competes: NDArray[np.bool_]) -> bool:
    """Whether the chosen key is a convex combination of its competitors."""
    if not competes.any():
        return False
    keys = selection.keys[selection.sequence[i]]
    apart = keys[competes] - keys[selection.reference[i]]
    if not selection.queries[i].any():
        return True
    if not np.linalg.norm(apart, axis=1).all():
        return True
    if np.linalg.matrix_rank(apart) == len(apart):
        return False
    apart = apart / np.abs(apart).max()
    # A direction u with apart @ u <= -1 exists exactly if the origin is outside the hull.
    free = [(None, None)] * apart.shape[1]
    found = linprog(
        np.zeros(apart.shape[1]), apart, -np.ones(len(apart)), bounds=free, method="highs"
    )
    return bool(found.status == 2)


def cover_count(queries: int, width: int) -> float:
    """Cover's probability that random signs of `queries` points in general position in `width`
    dimensions are linearly separable: 2^(1-n) sum_{k<d} C(n-1, k).

    A lower bound on the probability that the selection of a linear head is feasible, because a
    separating c makes W = v c^T work. Source: Cover 1965; arXiv 2308.16898.
    """
    if queries < 1 or width < 1:
        raise AttoscopeError(
            f"queries, width: got {queries} and {width}; expected whole numbers from 1"
        )
    favourable = sum(comb(queries - 1, k) for k in range(min(width, queries)))
    return float(favourable / 2 ** (queries - 1))
