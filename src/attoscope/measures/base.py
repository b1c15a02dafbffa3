"""What a reading is, what a measure is, and the helpers that all measures share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from attoscope.trace.types import Batch, Layer

if TYPE_CHECKING:
    from attoscope.measures.rules import Rule

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reading:
    """One reading of a model: a number per site and head, per point, or per layer.

    Args:
        name: the key in `report.json` and the variable in the data set.
        title: what a chart is called.
        meaning: how to read it, in one or two sentences.
        unit: "share", "nats", "keys", "ratio" …
        range: the least and the largest possible value; None where there is no bound.
        dims: ("site", "head"), ("point",) or ("layer",).
        coords: the labels along each dim.
        values: NaN where not computed; `reason` says why.
        low: lower end of the 95 % bootstrap interval over documents.
        high: upper end of it.
        null: the same number where nothing is selected or read; `null_meaning` says how.
        null_meaning: what the null is.
        row_error: standard error that sampling query rows adds.
        reason: why some or all values, or intervals, were not computed.
        source: paper and equation.
    """

    name: str
    title: str
    meaning: str
    unit: str
    range: tuple[float | None, float | None]
    dims: tuple[str, ...]
    coords: dict[str, tuple[str | int, ...]]
    values: Array
    low: Array | None = None
    high: Array | None = None
    null: Array | None = None
    null_meaning: str = ""
    row_error: Array | None = None
    reason: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """What stays the same about a reading whatever the data: a measure declares one for each.

    `null` names the tallied quantity that is its closed-form null (empty: none), `missing` says
    in words when a document has no value.
    """

    name: str
    title: str
    meaning: str
    unit: str
    range: tuple[float | None, float | None]
    source: str
    null: str = ""
    null_meaning: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Witness:
    """One input that shows what a reading says: the document, the token, the number there.

    `chosen` is the key that the query at `position` attends to most; `channel` the coordinate
    of the stream. `value` is what is shown (a weight, an activation); `score` is what it was
    picked by (the larger, the better).
    """

    value: float
    score: float
    document: int
    position: int
    token: str | None = None
    chosen: int | None = None
    chosen_token: str | None = None
    channel: int | None = None
    first: bool = False

    def beats(self, other: Witness | None) -> bool:
        """Whether this one is to be kept; ties go to the earlier document and position."""
        if other is None:
            return True
        mine = (-self.score, self.document, self.position)
        return mine < (-other.score, other.document, other.position)


# Kind of witness, place, head (-1 where there is none).
WitnessKey = tuple[str, str, int]


@runtime_checkable
class Measure(Protocol):
    """What every measure offers: it sees layers as they go by, adds up, and reads out.

    `needs` says what it takes from a layer, `rules` what is made of the readings, and `modules`
    which module of the model each place belongs to. Two measures that saw different documents
    merge into what one would have read on all of them.
    """

    name: ClassVar[str]
    needs: ClassVar[Literal["attention", "stream"]]
    rules: ClassVar[tuple[Rule, ...]]
    witnesses: dict[WitnessKey, Witness]
    modules: dict[str, str]

    def update(self, layer: Layer, batch: Batch) -> None:
        """Take in one layer of one batch."""
        ...

    def merge(self, other: Measure) -> None:
        """Add what another measure of the same kind took in."""
        ...

    def read(self) -> list[Reading]:
        """The readings so far."""
        ...


def with_null(
    readings: Sequence[Reading], nulls: Sequence[Reading], meaning: str
) -> list[Reading]:
    """The readings with the values of `nulls` as their null, where they have none of their own.

    `nulls` are readings of the same measures on data in which nothing is to be found; places
    that they lack become NaN. `meaning` says what they are.
    """
    by_name = {reading.name: reading for reading in nulls}
    return [
        reading
        if reading.null is not None or reading.name not in by_name
        else replace(
            reading, null=_aligned(by_name[reading.name], reading), null_meaning=meaning
        )
        for reading in readings
    ]


def _aligned(source: Reading, target: Reading) -> Array:
    """Values of `source` at the labels of `target`."""
    values = np.full(target.values.shape, np.nan)
    spots = []
    for dim in target.dims:
        index = {label: i for i, label in enumerate(source.coords[dim])}
        spots.append([index.get(label, -1) for label in target.coords[dim]])
    here = np.ix_(*[[i for i, s in enumerate(spot) if s >= 0] for spot in spots])
    there = np.ix_(*[[s for s in spot if s >= 0] for spot in spots])
    values[here] = source.values[there]
    return values


@lru_cache(maxsize=8192)
def _picks(seed: int, document: int, among: int, rows: int) -> tuple[int, ...]:
    """`rows` of `among` indices, in order, the same for a document wherever it is seen."""
    chosen = np.random.default_rng([seed, document, 1]).choice(among, rows, replace=False)
    return tuple(int(i) for i in np.sort(chosen))


@dataclass(frozen=True, slots=True)
class RowSampler:
    """Picks positions of a document, the same ones every time: all of them when `rows` is None.

    The choice depends on the seed, the document's number and how many of its positions are
    there to choose from, not on padding.
    """

    rows: int | None = 128
    seed: int = 0

    def __call__(
        self, among: Bool[Tensor, "batch token"], documents: Sequence[int]
    ) -> tuple[Int[Tensor, "batch row"], Bool[Tensor, "batch row"]]:
        """Positions packed to the left, and which of them are real (the others are 0)."""
        packed = []
        for mask, document in zip(among.cpu().numpy(), documents, strict=True):
            positions = np.flatnonzero(mask)
            if self.rows is not None and len(positions) > self.rows:
                picks = _picks(self.seed, document, len(positions), self.rows)
                positions = positions[list(picks)]
            packed.append(positions)
        longest = max(1, max(map(len, packed)))
        table = np.zeros((len(packed), longest), np.int64)
        real = np.zeros((len(packed), longest), bool)
        for row, positions in enumerate(packed):
            table[row, : len(positions)] = positions
            real[row, : len(positions)] = True
        return torch.from_numpy(table).to(among.device), torch.from_numpy(real).to(among.device)


def first_tokens(valid: Bool[Tensor, "batch token"]) -> Bool[Tensor, "batch token"]:
    """Marks each sequence's first valid token."""
    return valid & (valid.cumsum(1) == 1)


def content_tokens(layer: Layer) -> Bool[Tensor, "batch token"]:
    """Valid tokens other than the first and the special ones: where sinks do not live."""
    return layer.valid & ~first_tokens(layer.valid) & ~layer.special


def token_at(batch: Batch, row: int, position: int) -> str | None:
    """The token in words, when the batch knows its tokens and the position is one of them."""
    tokens = batch.tokens
    if tokens is None or len(tokens) != len(batch.documents) or position >= len(tokens[row]):
        return None
    return tokens[row][position]
