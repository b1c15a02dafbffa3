"""What is to be selected: keys, queries, and which keys each query has to choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks

Array = NDArray[np.float64]
# Rows of scores are made in blocks of about this many numbers: they stay in the cache.
BLOCK = 2**18


@dataclass(frozen=True, eq=False)
class Selection:
    """A selection problem: for each query, some keys to choose over all others it may see.

    The score of key t for query i is `key_t^T W query_i`. Each query's chosen keys have to score
    equally, and higher than every other allowed key by `required` (1 unless said):
    `(key_chosen - key_t)^T W query_i >= required_it`.

    Args:
        keys: (sequence, token, width); stored once, however many queries read them.
        queries: (query, width); may have another width than the keys.
        selected: (query, token) True where the query chooses the key; or (query,) positions.
        sequence: (query,) whose keys each query reads; left out, query i reads keys i, and all
            queries read them when there is only one sequence.
        allowed: (query, token) keys that compete; left out, all do.
        required: by how much the chosen keys have to win: a number, or (query, token).
        bias: (query, token) known terms of the scores, as position biases; moved to the right.

    Arrays are not copied where they fit as they are: do not change them afterwards.

    Raises `AttoscopeError` in one sentence for shapes that do not fit, NaN, infinite or complex
    numbers, a query that chooses nothing, and a selection in which nothing competes.
    Source: arXiv 2308.16898, "Att-SVM"; several chosen keys: its generalised form.
    """

    keys: Float[np.ndarray, "sequence token key_width"]
    queries: Float[np.ndarray, "query width"]
    selected: Bool[np.ndarray, "query token"]
    sequence: Int[np.ndarray, " query"]
    allowed: Bool[np.ndarray, "query token"] | None
    required: Float[np.ndarray, "rows columns"]
    bias: Float[np.ndarray, "query token"] | None

    def __init__(
        self,
        keys: Any,
        queries: Any,
        selected: Any,
        sequence: Any = None,
        *,
        allowed: Any = None,
        required: Any = 1.0,
        bias: Any = None,
    ) -> None:
        keys = checks.floats("keys", keys, 3, "(sequence, token, width)")
        queries = checks.floats("queries", queries, 2, "(query, width)")
        n, (sequences, tokens, _) = len(queries), keys.shape
        sequence = checks.sequence_of(sequence, n, sequences)
        selected = checks.chosen("selected", selected, n, tokens)
        allowed = None if allowed is None else checks.mask("allowed", allowed, n, tokens)
        checks.competition(selected, allowed)
        fields = {
            "keys": keys, "queries": queries, "selected": selected, "sequence": sequence,
            "allowed": allowed, "required": checks.required(required, n, tokens),
            "bias": None if bias is None else checks.table("bias", bias, n, tokens),
        }  # fmt: skip
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def cross(
        cls,
        keys: Any,
        queries: Any,
        selected: Any,
        sequence: Any = None,
        *,
        lengths: Any = None,
        allowed: Any = None,
        required: Any = 1.0,
        bias: Any = None,
    ) -> Selection:
        """Cross-attention: `keys` may be a list of ragged arrays, or come with `lengths`.

        What competes is the keys within the length of their sequence, and of these the `allowed`
        ones; the rest as in `Selection`.
        """
        keys, lengths = _padded(keys, lengths)
        queries = checks.floats("queries", queries, 2, "(query, width)")
        allowed = _competing(keys, lengths, queries, sequence, allowed)
        return cls(
            keys, queries, selected, sequence, allowed=allowed, required=required, bias=bias
        )

    @classmethod
    def self_attention(
        cls,
        tokens: Any,
        selected: Any,
        *,
        position: int = 0,
        lengths: Any = None,
        allowed: Any = None,
        required: Any = 1.0,
        bias: Any = None,
    ) -> Selection:
        """Self-attention of one position: the query of each sequence is its token `position`."""
        tokens, lengths = _padded(tokens, lengths)
        size = tokens.shape[1]
        if not checks.is_number(position, whole=True) or not -size <= position < size:
            raise AttoscopeError(
                f"position: got {position!r}; expected a position in a sequence of {size} tokens"
            )
        queries = tokens[:, position]
        allowed = _competing(tokens, lengths, queries, None, allowed)
        return cls(tokens, queries, selected, allowed=allowed, required=required, bias=bias)

    @classmethod
    def causal(cls, tokens: Any, selected: Any, *, lengths: Any = None) -> Selection:
        """Every position but the first is a query and sees itself and what comes before.

        `selected` is (sequence, token): the position that each position chooses (the first row's
        entry is not read), or (sequence, token, token) booleans.
        """
        return _all_positions(cls, tokens, selected, lengths, causal=True)

    @classmethod
    def every_position(cls, tokens: Any, selected: Any, *, lengths: Any = None) -> Selection:
        """Every position is a query and sees the whole of its sequence (sequence to sequence)."""
        return _all_positions(cls, tokens, selected, lengths, causal=False)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(queries, tokens, key width, query width)."""
        n, tokens = self.selected.shape
        return n, tokens, self.keys.shape[2], self.queries.shape[1]

    @property
    def reference(self) -> Int[np.ndarray, " query"]:
        """The first chosen key of each query; margins are taken from it."""
        return np.asarray(self.selected.argmax(1))

    @property
    def constraint_count(self) -> int:
        """How many keys compete with a chosen one, over all queries."""
        competing = ~self.selected if self.allowed is None else self.allowed & ~self.selected
        return int(np.count_nonzero(competing))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that state the problem."""
        parts = (self.keys, self.queries, self.selected, self.sequence, self.allowed, self.bias)
        return sum(part.nbytes for part in parts if part is not None) + self.required.nbytes

    def scores(self, weight: Float[np.ndarray, "key_width width"]) -> Array:
        """`key_t^T W query_i + bias_it`, (query, token); minus infinity where not allowed."""
        weight = checks.weight(weight, self.keys.shape[2], self.queries.shape[1])
        out = np.empty(self.selected.shape)
        for rows, block in self.score_blocks(weight):
            out[rows] = block
        if self.bias is not None:
            out += self.bias
        if self.allowed is not None:
            out[~self.allowed] = -np.inf
        return out

    def margins(self, weight: Float[np.ndarray, "key_width width"]) -> Array:
        """Score of the first chosen key minus score of each key, (query, token).

        Infinite where not allowed, 0 at the first chosen key, and at the others how unequal they
        are. All margins at unchosen keys >= `required` says that the weight separates.
        """
        scores = self.scores(weight)
        own = np.take_along_axis(scores, self.reference[:, None], 1)
        return np.asarray(own - scores)

    def score_blocks(self, weight: Array) -> Iterator[tuple[Any, Array]]:
        """Scores without bias, in blocks of queries: (which rows, scores of these rows)."""
        return _score_blocks(self.keys, self.queries, self.sequence, weight)

    def duplicates(self) -> Int[np.ndarray, "pair 2"]:
        """(query, token) of unchosen keys equal to the chosen one: nothing separates them."""
        from attoscope.svm._scan import find_equal

        same = np.empty(self.selected.shape, np.bool_)
        find_equal(self.keys, self.sequence, self.reference, same)
        same &= ~self.selected
        if self.allowed is not None:
            same &= self.allowed
        return np.argwhere(same)

    def without(self, pairs: Any) -> Selection:
        """The same problem with these (query, token) pairs no longer competing."""
        allowed = np.ones_like(self.selected) if self.allowed is None else self.allowed.copy()
        i, t = checks.pairs("pairs", pairs, self.selected.shape).T
        allowed[i, t] = False
        return self.replace(allowed=allowed)

    def replace(self, **changes: Any) -> Selection:
        """The same problem with some fields changed, checked again."""
        names = ("keys", "queries", "selected", "sequence", "allowed", "required", "bias")
        unknown = [name for name in changes if name not in names]
        if unknown:
            raise AttoscopeError(
                f"got {', '.join(unknown)}; expected any of {', '.join(names)}"
            )
        return Selection(**{name: changes.get(name, getattr(self, name)) for name in names})


def as_selection(value: Any) -> Selection:
    """The selection itself, or the error that says what was given."""
    if isinstance(value, Selection):
        return value
    raise AttoscopeError(
        f"selection: got {type(value).__name__}; expected a Selection, as "
        "Selection(keys, queries, selected)"
    )


def key_scores(keys: Any, queries: Any, sequence: Any, weight: Array) -> Array:
    """`key_t^T W query_i` of any keys and queries, (query, token); nothing need be selected."""
    keys = checks.floats("keys", keys, 3, "(sequence, token, width)")
    queries = checks.floats("queries", queries, 2, "(query, width)")
    sequence = checks.sequence_of(sequence, len(queries), len(keys))
    for name, given, width in zip(
        ("keys", "queries"), (keys, queries), weight.shape, strict=True
    ):
        if given.shape[-1] != width:
            raise AttoscopeError(
                f"{name}: got width {given.shape[-1]}; expected {width}, which the weight is for"
            )
    out = np.empty((len(queries), keys.shape[1]))
    for rows, block in _score_blocks(keys, queries, sequence, weight):
        out[rows] = block
    return out


def _score_blocks(
    keys: Array, queries: Array, sequence: Any, weight: Array
) -> Iterator[tuple[Any, Array]]:
    image = queries @ weight.T
    n, tokens = len(queries), keys.shape[1]
    step = max(1, BLOCK // tokens)
    if len(keys) == n and np.array_equal(sequence, np.arange(n)):
        for lo in range(0, n, step):
            part = slice(lo, lo + step)
            yield part, np.matmul(keys[part], image[part, :, None])[..., 0]
        return
    order = np.argsort(sequence, kind="stable")
    starts = np.searchsorted(sequence[order], np.arange(len(keys) + 1))
    for s in range(len(keys)):
        for lo in range(starts[s], starts[s + 1], step):
            rows = order[lo : min(lo + step, starts[s + 1])]
            yield rows, image[rows] @ keys[s].T


def _padded(keys: Any, lengths: Any) -> tuple[Array, Int[np.ndarray, " sequence"] | None]:
    """Ragged sequences side by side, zeros at the end, with their lengths."""
    if isinstance(keys, (list, tuple)) and len(keys):
        parts = [checks.floats("keys", k, 2, "(token, width) for each sequence") for k in keys]
        widths = sorted({part.shape[1] for part in parts})
        if len(widths) > 1:
            raise AttoscopeError(f"keys: got sequences of widths {widths}; expected one width")
        sizes = np.array([len(part) for part in parts])
        keys = np.zeros((len(parts), sizes.max(), widths[0]))
        for row, part in zip(keys, parts, strict=True):
            row[: len(part)] = part
        if (sizes < sizes.max()).any():
            if lengths is None:
                return keys, sizes
            raise AttoscopeError(
                "lengths: got lengths and a list of ragged sequences; expected one or the other"
            )
    keys = checks.floats("keys", keys, 3, "(sequence, token, width)")
    return keys, None if lengths is None else checks.lengths(lengths, *keys.shape[:2])


def _within(keys: Array, lengths: Any) -> Bool[np.ndarray, "sequence token"] | None:
    if lengths is None:
        return None
    return np.asarray(np.arange(keys.shape[1])[None, :] < np.asarray(lengths)[:, None])


def _competing(keys: Array, lengths: Any, queries: Array, sequence: Any, allowed: Any) -> Any:
    """The allowed keys that are no padding, by query."""
    within = _within(keys, lengths)
    if within is None:
        return allowed
    within = within[checks.sequence_of(sequence, len(queries), len(keys))]
    return (
        within if allowed is None else within & checks.mask("allowed", allowed, *within.shape)
    )


def _all_positions(
    cls: type[Selection], tokens: Any, selected: Any, lengths: Any, *, causal: bool
) -> Selection:
    tokens, lengths = _padded(tokens, lengths)
    sequences, size, _ = tokens.shape
    valid = _within(tokens, lengths)
    valid = np.ones((sequences, size), bool) if valid is None else valid
    meaning = f"{(sequences, size)} positions or {(sequences, size, size)} booleans"
    choice = checks.as_array("selected", selected, meaning)
    if choice.shape not in ((sequences, size), (sequences, size, size)):
        raise AttoscopeError(f"selected: got shape {choice.shape}; expected {meaning}")
    asks = valid.copy()
    if causal:
        asks[:, 0] = False
    s, k = np.nonzero(asks)
    allowed = valid[s]
    if causal:
        allowed = allowed & (np.arange(size)[None, :] <= k[:, None])
    return cls(tokens, tokens[s, k], choice[s, k], s, allowed=allowed)
