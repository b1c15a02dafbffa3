"""The problem as the solver sees it: queries sorted by sequence, widths reduced, one kind a key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from attoscope.errors import AttoscopeError
from attoscope.svm import _kernels as kernels
from attoscope.svm import _scan as scans
from attoscope.svm.selection import BLOCK, Array, Selection

EXTREME, NOTHING = 1e60, 1e-16


@dataclass(eq=False)
class Problem:
    """Arrays of a selection in the solver's order and basis.

    `basis_keys` and `basis_queries` (None: identity) are orthonormal; a weight C found here is
    `basis_keys @ C @ basis_queries.T` outside, with the same singular values.
    """

    keys: Array
    seq: NDArray[np.int64]
    ref: NDArray[np.int64]
    queries: Array
    zz: Array
    state: NDArray[np.int8]
    rhs: Array
    order: NDArray[np.int64] | None
    basis_keys: Array | None = None
    basis_queries: Array | None = None
    starts: NDArray[np.int64] = field(init=False)
    one_each: bool = field(init=False)

    def __post_init__(self) -> None:
        self.starts = np.searchsorted(self.seq, np.arange(len(self.keys) + 1))
        n = len(self.queries)
        self.one_each = len(self.keys) == n and bool((self.seq == np.arange(n)).all())

    @classmethod
    def of(cls, selection: Selection, reduce: bool = True) -> Problem:
        """The problem of a selection; `reduce` turns it into the span of its data if smaller."""
        _refuse_extremes(selection)
        seq = selection.sequence
        order = None
        if (np.diff(seq) < 0).any():
            order = np.argsort(seq, kind="stable")
        pick = slice(None) if order is None else order
        keys, queries = selection.keys, selection.queries
        basis_keys = basis_queries = None
        if reduce:
            keys, basis_keys = _reduced_keys(keys)
            queries, basis_queries = _reduced(queries)
        queries = np.ascontiguousarray(queries[pick])
        zz = np.einsum("nd,nd->n", queries, queries)
        _refuse_vanishing(queries, zz)
        return cls(
            keys, seq[pick], selection.reference[pick], queries, zz,
            _kinds(selection)[pick], _right_sides(selection)[pick if selection.bias is not None
            or selection.required.size > 1 else slice(None)], order, basis_keys, basis_queries,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a weight in the reduced basis."""
        return self.keys.shape[2], self.queries.shape[1]

    def quick(self, constraints: int) -> bool:
        """Whether non-negative least squares on so many constraints, written out, is quick."""
        size = self.shape[0] * self.shape[1]
        return constraints * size <= 4_000_000 and min(constraints, size) <= 600

    def outside(self, weight: Array) -> Array:
        """A weight of the reduced problem in the widths of the data."""
        if self.basis_keys is not None:
            weight = self.basis_keys @ weight
        return weight if self.basis_queries is None else weight @ self.basis_queries.T

    def inside(self, weight: Array) -> Array:
        """A weight in the widths of the data, as far as the problem sees it."""
        if self.basis_keys is not None:
            weight = self.basis_keys.T @ weight
        if self.basis_queries is not None:
            weight = weight @ self.basis_queries
        return np.array(weight, dtype=np.float64, order="C")

    def score_blocks(self, weight: Array) -> Iterator[tuple[int, Array]]:
        """(first query, scores of the queries from there), in order."""
        image = self.queries @ weight.T
        n, tokens = self.state.shape
        step = max(1, BLOCK // tokens)
        if self.one_each:
            for lo in range(0, n, step):
                part = slice(lo, lo + step)
                yield lo, np.matmul(self.keys[part], image[part, :, None])[..., 0]
            return
        for s in np.flatnonzero(np.diff(self.starts)):
            for lo in range(self.starts[s], self.starts[s + 1], step):
                hi = min(lo + step, self.starts[s + 1])
                yield lo, image[lo:hi] @ self.keys[s].T

    def scan(self, weight: Array, threshold: float, most: int, keep: bool = False) -> Array:
        """Statistics of all constraints at `weight` (see `_scan`); marks the close ones."""
        stats = scans.fresh_stats()
        for lo, scores in self.score_blocks(weight):
            scans.scan_block(
                scores, lo, self.ref, self.state, self.rhs, threshold, most, keep, stats
            )
        return stats


@dataclass(eq=False)
class WorkingSet:
    """The constraints that the solver visits, with their multipliers, query by query."""

    ptr: NDArray[np.int64]
    tok: NDArray[np.int32]
    lam: Array
    rhs: Array
    sq: Array
    equal: NDArray[np.bool_]
    gptr: NDArray[np.int64]
    gram: Array

    @cached_property
    def scale(self) -> float:
        """The size of right-hand sides: what a violation is compared with."""
        return float(np.abs(self.rhs).max(initial=0.0)) or 1.0

    @classmethod
    def empty(cls, n: int) -> WorkingSet:
        nothing = np.zeros(0)
        return cls(
            np.zeros(n + 1, np.int64), np.zeros(0, np.int32), nothing, nothing, nothing,
            np.zeros(0, np.bool_), np.full(n, -1, np.int64), nothing,
        )  # fmt: skip

    def rebuilt(self, problem: Problem, local: bool) -> WorkingSet:
        """The marked constraints of `problem` and all that carry a multiplier here."""
        p = problem
        return WorkingSet(*scans.rebuilt(
            p.keys, p.seq, p.ref, p.state, p.rhs, self.ptr, self.tok, self.lam, local
        ))  # fmt: skip

    def table(self, problem: Problem) -> Array:
        """Multipliers as (query, token), in the caller's order of queries."""
        out = np.zeros(problem.state.shape)
        i = np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))
        out[i if problem.order is None else problem.order[i], self.tok] = self.lam
        return out

    def weight(self, problem: Problem, coefficient: Array) -> Array:
        """sum coefficient (key[ref] - key[t]) query^T."""
        p = problem
        return np.ascontiguousarray(
            kernels.adjoint(p.keys, p.seq, p.ref, p.queries, self.ptr, self.tok, coefficient)
        )

    def margins(self, problem: Problem, weight: Array) -> Array:
        """(key[ref] - key[t])^T weight query of each constraint."""
        p = problem
        out = np.empty(len(self.tok))
        kernels.forward(p.keys, p.seq, p.ref, p.queries, weight, self.ptr, self.tok, out)
        return out


def from_table(problem: Problem, table: Any) -> WorkingSet:
    """A working set that carries the multipliers of a (query, token) table, where allowed."""
    rows = sparse.csr_array(table)
    if problem.order is not None:
        rows = rows[problem.order]
    rows = sparse.csr_array(rows)
    rows.sum_duplicates()
    i = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
    keep = ((problem.state[i, rows.indices] & 3) != 0) & (rows.data != 0.0)
    start = WorkingSet.empty(rows.shape[0])
    np.cumsum(np.bincount(i[keep], minlength=rows.shape[0]), out=start.ptr[1:])
    start.tok, start.lam = rows.indices[keep].astype(np.int32), rows.data[keep].copy()
    # The rest of what the solver needs is read off the data.
    return start.rebuilt(problem, local=True)


def _refuse_extremes(selection: Selection) -> None:
    """Products of four of these numbers have to fit into double precision."""
    arrays = {"keys": selection.keys, "queries": selection.queries}
    for name, array in {**arrays, "required": selection.required}.items():
        largest = max(float(array.max()), -float(array.min()))
        if largest > 0.0 and not 1.0 / EXTREME < largest < EXTREME:
            raise AttoscopeError(
                f"{name}: got numbers of size {largest:.0e}; expected sizes between 1e-60 and "
                "1e60, so scale them (the weight scales the other way)"
            )


def _refuse_vanishing(queries: Array, zz: Array) -> None:
    """Beside the largest query a vanishing one could be served by rounding alone."""
    vanishing = np.flatnonzero((zz < NOTHING**2 * zz.max()) & queries.any(1))
    if len(vanishing):
        raise AttoscopeError(
            f"queries: got {len(vanishing)} of size below {NOTHING:.0e} of the largest; expected "
            "sizes that double precision can hold side by side, so drop or scale them"
        )


def _kinds(selection: Selection) -> NDArray[np.int8]:
    kinds = selection.selected.astype(np.int8)
    # 0 competes and 1 is chosen: COMPETES = 1 and EQUAL = 2 are one more.
    kinds += scans.COMPETES
    if selection.allowed is not None:
        kinds[~selection.allowed] = scans.NONE
    kinds[np.arange(len(kinds)), selection.reference] = scans.NONE
    return kinds


def _right_sides(selection: Selection) -> Array:
    if selection.bias is None and selection.required.size == 1:
        return selection.required
    rhs = np.where(selection.selected, 0.0, selection.required)
    if selection.bias is not None:
        own = np.take_along_axis(selection.bias, selection.reference[:, None], 1)
        rhs = rhs - (own - selection.bias)
    return np.ascontiguousarray(rhs)


def _reduced(rows: Array) -> tuple[Array, Array | None]:
    """Rows in an orthonormal basis of their span, where there are far fewer rows than columns."""
    if len(rows) > 0.7 * rows.shape[1]:
        return rows, None
    basis, _ = np.linalg.qr(rows.T)
    return rows @ basis, basis


def _reduced_keys(keys: Array) -> tuple[Array, Array | None]:
    sequences, tokens, width = keys.shape
    if sequences * (tokens - 1) > 0.7 * width:
        return keys, None
    # Only differences within a sequence matter.
    apart = keys - keys[:, :1]
    basis, _ = np.linalg.qr(apart[:, 1:].reshape(-1, width).T)
    return np.ascontiguousarray(apart @ basis), basis
