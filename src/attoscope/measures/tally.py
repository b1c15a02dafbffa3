"""Sums over documents that carry their own uncertainty.

Every reading is a mean over documents of what the document says. Its interval is a Poisson
bootstrap over documents: each document enters each of 400 replicates with a Poisson(1) number
of copies, drawn from a generator seeded by (seed, document number). The sums therefore add up
over shards, machines and orders of documents, and nothing is kept per document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from attoscope.measures.base import Array, Reading, Spec

REPLICATES = 400
# Ends of the 95 % interval, in percent.
_ENDS = (2.5, 97.5)


@lru_cache(maxsize=4096)
def _copies(seed: int, document: int, replicates: int) -> Array:
    """How many copies of a document each replicate holds."""
    draw = np.random.default_rng([seed, document]).poisson(1.0, replicates)
    return draw.astype(np.float64)


@dataclass(slots=True)
class _Sums:
    """Sums over documents at one place; cells are (quantity, …)."""

    documents: int
    total: Array
    count: Array
    boot_total: Array
    boot_count: NDArray[np.float32]
    row_variance: Array
    broken: NDArray[np.int64]

    def add(self, other: _Sums) -> None:
        self.documents += other.documents
        self.total += other.total
        self.count += other.count
        self.boot_total += other.boot_total
        self.boot_count += other.boot_count
        self.row_variance += other.row_variance
        self.broken += other.broken


class Tally:
    """Sums over documents of named quantities, at places (sites or points).

    Values are rounded to float32 on the way in. Sums of them in float64 are then exact, as long
    as the documents' values lie within about 2^25 of each other, so that the order of documents
    and the cut into shards change nothing, not even the last digit.
    """

    def __init__(
        self, names: Sequence[str], *, seed: int = 0, replicates: int = REPLICATES
    ) -> None:
        self.names = tuple(names)
        self.seed = seed
        self.replicates = replicates
        self.places: dict[str, _Sums] = {}

    def add(
        self,
        place: str,
        documents: Sequence[int],
        values: Array,
        *,
        broken: NDArray[np.bool_] | None = None,
        row_variance: Array | None = None,
    ) -> None:
        """Add values (document, quantity, …); NaN says that the document has none there.

        `broken` (document, …) marks documents in which something was not finite: the whole cell
        is then not computed. `row_variance` is the variance that sampling rows adds to a value.
        """
        if len(set(documents)) < len(documents):
            documents, values, broken, row_variance = _by_document(
                documents, values, broken, row_variance
            )
        values = values.astype(np.float32).astype(np.float64)
        present = np.isfinite(values)
        flat = np.where(present, values, 0.0).reshape(len(documents), -1)
        cells = values.shape[1:]
        # (replicate, total and count, cell); the product is torch's, which minds thread limits.
        both = np.stack([flat, present.reshape(len(documents), -1)], 1).reshape(len(flat), -1)
        copies = np.stack([_copies(self.seed, d, self.replicates) for d in documents], 1)
        boot = (torch.from_numpy(copies) @ torch.from_numpy(both)).numpy()
        boot_total, boot_count = boot.reshape(self.replicates, 2, *cells).swapaxes(0, 1)
        variance = np.zeros(cells)
        if row_variance is not None:
            kept = np.where(present, row_variance, 0.0)
            variance = kept.astype(np.float32).astype(np.float64).sum(0)
        sums = _Sums(
            documents=len(documents),
            total=flat.sum(0).reshape(cells),
            count=present.sum(0).astype(np.float64),
            boot_total=boot_total.copy(),
            boot_count=boot_count.astype(np.float32),
            row_variance=variance,
            broken=np.zeros(cells[1:], np.int64)
            if broken is None
            else np.asarray(broken.sum(0)),
        )
        self._take(place, sums)

    def merge(self, other: Tally) -> None:
        """Add another tally of the same quantities; raises ValueError when it is of others."""
        if (other.names, other.seed) != (self.names, self.seed):
            raise ValueError(
                f"cannot merge a tally of {other.names} (seed {other.seed}) into one of "
                f"{self.names} (seed {self.seed}): build both the same way"
            )
        for place, sums in other.places.items():
            self._take(place, deepcopy(sums))

    def _take(self, place: str, sums: _Sums) -> None:
        if place in self.places:
            self.places[place].add(sums)
        else:
            self.places[place] = sums

    def readings(
        self, specs: Iterable[Spec], dims: tuple[str, ...], *, row_error: bool = False
    ) -> list[Reading]:
        """One reading per spec over all places, in the order in which they came."""
        return [self._reading(spec, dims, row_error) for spec in specs]

    def mean(self, name: str) -> Array:
        """Mean over documents, (place,) or (place, head); NaN where not computed."""
        index = self.names.index(name)
        return self._padded(
            [_ratio(s.total[index, ...], s.count[index, ...]) for s in self._sound()]
        )

    def _reading(self, spec: Spec, dims: tuple[str, ...], row_error: bool) -> Reading:
        index = self.names.index(spec.name)
        values = self.mean(spec.name)
        ends = [_interval(s, index) for s in self._sound()]
        low, high = (self._padded([e[i] for e in ends]) for i in (0, 1))
        no_interval = bool(np.isnan(low).all())
        coords: dict[str, tuple[str | int, ...]] = {dims[0]: tuple(self.places)}
        if len(dims) > 1:
            coords[dims[1]] = tuple(range(values.shape[1]))
        errors = [
            np.sqrt(_ratio(s.row_variance[index, ...], np.asarray(s.count[index, ...] ** 2)))
            for s in self._sound()
        ]
        return Reading(
            name=spec.name,
            title=spec.title,
            meaning=spec.meaning,
            unit=spec.unit,
            range=spec.range,
            dims=dims,
            coords=coords,
            values=values,
            low=None if no_interval else low,
            high=None if no_interval else high,
            null=self.mean(spec.null) if spec.null else None,
            null_meaning=spec.null_meaning,
            row_error=self._padded(errors) if row_error else None,
            reason=self._reason(spec, index, no_interval),
            source=spec.source,
        )

    def _sound(self) -> Iterable[_Sums]:
        """The sums, with cells in which something was not finite taken out."""
        for sums in self.places.values():
            if not sums.broken.any():
                yield sums
                continue
            count = np.where(sums.broken > 0, 0.0, sums.count)
            yield replace(sums, count=count)

    def _padded(self, rows: list[Array]) -> Array:
        """Rows of heads made equally long with NaN, for models whose layers differ in heads."""
        if not rows or rows[0].ndim == 0:
            return np.array(rows, np.float64)
        widest = max(len(row) for row in rows)
        return np.stack(
            [np.pad(row, (0, widest - len(row)), constant_values=np.nan) for row in rows]
        )

    def _reason(self, spec: Spec, index: int, no_interval: bool) -> str:
        parts = []
        broken = [place for place, sums in self.places.items() if sums.broken.any()]
        if broken:
            where = (
                broken[0] if len(broken) == 1 else f"{len(broken)} places from {broken[0]} on"
            )
            parts.append(f"not computed at {where}: values there are not finite")
        documents = max((s.documents for s in self.places.values()), default=0)
        least = min(
            (s.count[index].max() for s in self.places.values() if not s.broken.any()),
            default=documents,
        )
        if least < documents and spec.missing:
            lacking = documents - int(least)
            parts.append(f"{lacking} of {documents} documents not counted: {spec.missing}")
        if no_interval and documents < 2:
            parts.append("no interval: it takes at least two documents")
        return "; ".join(parts)


def _by_document(
    documents: Sequence[int],
    values: Array,
    broken: NDArray[np.bool_] | None,
    row_variance: Array | None,
) -> tuple[Sequence[int], Array, NDArray[np.bool_] | None, Array | None]:
    """One row per document, where a layer cut documents into several sequences (windows)."""
    numbers, which = np.unique(np.asarray(documents), return_inverse=True)
    groups = [np.flatnonzero(which == i) for i in range(len(numbers))]
    there = np.isfinite(values)
    count = np.stack([there[g].sum(0) for g in groups]).astype(np.float64)
    filled = np.where(there, values, 0.0)
    means = _ratio(np.stack([filled[g].sum(0) for g in groups]), count)
    if broken is not None:
        broken = np.stack([broken[g].any(0) for g in groups])
    if row_variance is not None:
        kept = np.where(there, row_variance, 0.0)
        row_variance = _ratio(np.stack([kept[g].sum(0) for g in groups]), count**2)
    return [int(n) for n in numbers], means, broken, row_variance


def _ratio(top: Array, bottom: Array) -> Array:
    """top / bottom, NaN where the bottom is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(bottom > 0, top / bottom, np.nan), np.float64)


def _interval(sums: _Sums, index: int) -> tuple[Array, Array]:
    """Percentile interval of the replicates' means; NaN with fewer than two documents."""
    count = sums.count[index, ...]
    means = _ratio(sums.boot_total[:, index], sums.boot_count[:, index].astype(np.float64))
    means = np.where(count >= 2, means, np.nan)
    # A replicate may hold no document at all; such replicates are left out.
    empty = np.isnan(means).all(0)
    means = np.where(empty, 0.0, means)
    lacking = np.isnan(means)
    if means.ndim > 1:
        means = means[~lacking[:, ~empty].all(1)] if (~empty).any() else means
    # The function that minds NaN is many times slower: only where single heads lack something.
    percentile = np.nanpercentile if np.isnan(means).any() else np.percentile
    low, high = percentile(means, _ENDS, axis=0)
    return np.where(empty, np.nan, low), np.where(empty, np.nan, high)
