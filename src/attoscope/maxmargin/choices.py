"""What the heads of a model chose on a few documents, and the same problem changed.

Changed means: special tokens and sinks left out, only decided queries kept, or the choices of a
random weight put in place of the head's own. Keys and queries stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from scipy.special import softmax

from attoscope.errors import AttoscopeError
from attoscope.svm.selection import Selection
from attoscope.trace.selections import HeadSelection, Space, head_selections
from attoscope.trace.subject import Subject
from attoscope.trace.types import Batch

Array = NDArray[np.float64]
UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class Choices:
    """What one head chose in a few documents: a selection problem that remembers its tokens.

    `selection.sequence` says which document each query is of, `positions` where in it. `tokens`
    are token ids (-1: unknown or padding); `sinks` marks the first token of each document and the
    tokenizer's own. `weight` is the head's, in the space of the selection.
    """

    selection: Selection
    weight: Float[np.ndarray, "key_width width"]
    site: str
    head: int
    positions: Int[np.ndarray, " query"]
    tokens: Int[np.ndarray, "document token"]
    sinks: Bool[np.ndarray, "document token"]

    @property
    def allowed(self) -> Bool[np.ndarray, "query token"]:
        """Which keys each query may choose."""
        allowed = self.selection.allowed
        return np.ones_like(self.selection.selected) if allowed is None else allowed

    @property
    def chosen(self) -> Int[np.ndarray, " query"]:
        """The key that each query chooses."""
        return self.selection.reference

    @property
    def chance(self) -> Float[np.ndarray, " query"]:
        """The probability of a random allowed key to be the chosen one."""
        return np.asarray(1.0 / self.allowed.sum(1))

    def on_sinks(self) -> Bool[np.ndarray, " query"]:
        """Whether each query chooses the first or a special token."""
        return np.asarray(self.sinks[self.selection.sequence, self.chosen])

    def certainty(self) -> Float[np.ndarray, " query"]:
        """The head's own probability for what it chooses, among the keys that compete."""
        probability = softmax(self.selection.scores(self.weight), axis=1)
        return np.asarray(np.take_along_axis(probability, self.chosen[:, None], 1)[:, 0])

    def take(self, queries: Any) -> Choices | None:
        """Some of the queries (indices or booleans); None where nothing is left to choose."""
        s = self.selection
        allowed, selected = self.allowed[queries], s.selected[queries]
        if not len(selected) or not (allowed & ~selected).any():
            return None
        part = Selection(
            s.keys, s.queries[queries], selected, s.sequence[queries], allowed=allowed,
            bias=None if s.bias is None else s.bias[queries],
        )  # fmt: skip
        return replace(self, selection=part, positions=self.positions[queries])

    def rechosen(self, weight: Array, allowed: Any = None) -> Choices | None:
        """The same keys and queries, with the choices that `weight` makes among `allowed`.

        Queries with fewer than two keys, and keys equal to the chosen one, are left out.
        """
        allowed = self.allowed if allowed is None else allowed
        asks = allowed.sum(1) > 1
        if not asks.any():
            return None
        s, allowed = self.selection, allowed[asks]
        bias = None if s.bias is None else s.bias[asks]
        made = Selection(
            s.keys, s.queries[asks], allowed.argmax(1), s.sequence[asks], allowed=allowed,
            bias=bias,
        )  # fmt: skip
        made = made.replace(selected=made.scores(weight).argmax(1))
        pairs = made.duplicates()
        made = made.without(pairs) if len(pairs) else made
        return replace(self, selection=made, positions=self.positions[asks], weight=weight)

    def without_sinks(self) -> Choices | None:
        """What the head chooses when neither query nor key is the first or a special token."""
        sequence = self.selection.sequence
        asks = ~self.sinks[sequence, self.positions]
        allowed = self.allowed & ~self.sinks[sequence] & asks[:, None]
        return self.rechosen(self.weight, allowed)

    def decided(self, least: float = 0.5) -> Choices | None:
        """Only the queries that give what they choose a probability of at least `least`."""
        return self.take(self.certainty() >= least)

    def random_selector(self, rng: np.random.Generator) -> Choices | None:
        """The choices of a random weight with the singular values of the head's own.

        Keys and queries are the same, so that whatever they alone make easy is easy here too.
        """
        return self.rechosen(rotated(self.weight, rng))


def rotated(weight: Array, rng: np.random.Generator) -> Array:
    """A weight with the same singular values between uniformly random orthonormal bases."""
    values = np.linalg.svd(weight, compute_uv=False)
    values = values[values > 1e-12 * values[0]]
    left, right = (_orthonormal(size, len(values), rng) for size in weight.shape)
    return np.asarray((left * values) @ right.T)


def _orthonormal(size: int, columns: int, rng: np.random.Generator) -> Array:
    q, r = np.linalg.qr(rng.standard_normal((size, columns)))
    return np.asarray(q * np.sign(np.diag(r)))


def collect(
    subject: Subject,
    batches: Sequence[Batch],
    *,
    sites: tuple[str, ...] | None = None,
    heads: tuple[int, ...] | None = None,
    space: Space = "head",
    queries: int | None = 128,
    seed: int = 0,
) -> list[Choices]:
    """What every head chose on these batches, at most `queries` queries a head.

    As `attoscope.trace.head_selections`, which raises the errors; several batches become one
    problem per head. Queries are drawn evenly from the batches.
    """
    if not batches:
        raise AttoscopeError("batches: got none; expected at least one batch to read")
    share = None if queries is None else max(1, queries // len(batches))
    found: dict[tuple[str, int], list[tuple[HeadSelection, Batch]]] = {}
    for number, batch in enumerate(batches):
        for one in head_selections(
            subject, batch, sites=sites, heads=heads, space=space, queries=share,
            seed=seed + number,
        ):  # fmt: skip
            found.setdefault((one.site, one.head), []).append((one, batch))
    return [_joined(parts) for parts in found.values()]


def _joined(parts: list[tuple[HeadSelection, Batch]]) -> Choices:
    """One problem from those of several batches: keys side by side, padded to one length."""
    longest = max(one.selection.keys.shape[1] for one, _ in parts)
    biased = any(one.selection.bias is not None for one, _ in parts)
    keys, sequence, tables, start = [], [], [], 0
    for one, batch in parts:
        s = one.selection
        keys.append(_wide(s.keys, longest))
        sequence.append(s.sequence + start)
        start += len(s.keys)
        allowed = np.ones_like(s.selected) if s.allowed is None else s.allowed
        bias = np.zeros(s.selected.shape) if s.bias is None else s.bias
        ids, sinks = _tokens(batch, s.keys.shape[1])
        tables.append(
            (
                _wide(s.selected, longest), _wide(allowed, longest), _wide(bias, longest),
                _wide(ids, longest, UNKNOWN), _wide(sinks, longest),
            )
        )  # fmt: skip
    selected, allowed, bias, ids, sinks = (np.concatenate(t) for t in zip(*tables, strict=True))
    first = parts[0][0]
    selection = Selection(
        np.concatenate(keys), np.concatenate([one.selection.queries for one, _ in parts]),
        selected, np.concatenate(sequence), allowed=allowed, bias=bias if biased else None,
    )  # fmt: skip
    positions = np.concatenate([one.positions for one, _ in parts])
    return Choices(selection, first.weight, first.site, first.head, positions, ids, sinks)


def _wide(array: NDArray[Any], size: int, fill: int = 0) -> NDArray[Any]:
    """The second axis padded to `size`."""
    out = np.full((array.shape[0], size, *array.shape[2:]), fill, array.dtype)
    out[:, : array.shape[1]] = array
    return out


def _tokens(batch: Batch, size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids and sinks of the keys; other sequences than the text's have neither."""
    ids = batch.inputs.get("input_ids") if isinstance(batch.inputs, dict) else batch.inputs
    shape = (len(batch), size)
    if (
        isinstance(ids, torch.Tensor)
        and tuple(ids.shape) == shape
        and not ids.is_floating_point()
    ):
        known = ids.cpu().numpy().astype(np.int64)
    else:
        known = np.full(shape, UNKNOWN, np.int64)
    sinks = np.zeros(shape, bool)
    if batch.special is not None and tuple(batch.special.shape) == shape:
        sinks |= batch.special.cpu().numpy()
    valid = np.ones(shape, bool)
    if batch.valid is not None and tuple(batch.valid.shape) == shape:
        valid = batch.valid.cpu().numpy()
    sinks |= valid & (valid.cumsum(1) == 1)
    return np.where(valid, known, UNKNOWN), sinks & valid
