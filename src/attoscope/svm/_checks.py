"""Input checks: each gives clean arrays or raises one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attoscope.errors import AttoscopeError

Array = NDArray[np.float64]


def floats(name: str, value: Any, dims: int, meaning: str) -> Array:
    """A finite float64 array with so many axes."""
    try:
        array = np.ascontiguousarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise AttoscopeError(
            f"{name}: got {type(value).__name__} that is no array of numbers; expected {meaning}"
        ) from None
    if array.ndim != dims or 0 in array.shape:
        raise AttoscopeError(f"{name}: got shape {array.shape}; expected {meaning}, none empty")
    finite(name, array)
    return array


def finite(name: str, array: Array) -> None:
    # A sum is finite when all is, and one pass costs a fraction of testing each number.
    if np.isfinite(array.sum()) or np.isfinite(array).all():
        return
    where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
    count = int(array.size - np.isfinite(array).sum())
    raise AttoscopeError(
        f"{name}: got {count} values that are NaN or infinite (first at {where}); expected finite "
        "numbers, so remove or replace them"
    )


def sequence_of(value: Any, n: int, sequences: int) -> NDArray[np.int64]:
    if value is None:
        if sequences == 1:
            return np.zeros(n, np.int64)
        if n != sequences:
            raise AttoscopeError(
                f"sequence: got {n} queries and {sequences} sequences of keys; expected as many, "
                "or `sequence` to say which keys each query reads"
            )
        return np.arange(n)
    array = np.asarray(value)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise AttoscopeError(
            f"sequence: got shape {array.shape} of {array.dtype}; expected {n} whole numbers, one "
            "per query"
        )
    if array.min() < 0 or array.max() >= sequences:
        raise AttoscopeError(
            f"sequence: got numbers from {array.min()} to {array.max()}; expected 0 to "
            f"{sequences - 1}, as there are {sequences} sequences of keys"
        )
    return array.astype(np.int64)


def mask(name: str, value: Any, n: int, tokens: int) -> NDArray[np.bool_]:
    array = np.asarray(value)
    if array.dtype != bool or array.shape != (n, tokens):
        raise AttoscopeError(
            f"{name}: got shape {array.shape} of {array.dtype}; expected {(n, tokens)} booleans "
            "(query, token)"
        )
    return array


def chosen(name: str, value: Any, n: int, tokens: int) -> NDArray[np.bool_]:
    """Booleans (query, token), made from positions where positions are given."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.shape != (n,):
        return mask(name, array, n, tokens)
    if array.min() < 0 or array.max() >= tokens:
        raise AttoscopeError(
            f"{name}: got positions from {array.min()} to {array.max()}; expected 0 to {tokens - 1}"
        )
    return np.asarray(np.arange(tokens)[None, :] == array[:, None])


def choices(selected: NDArray[np.bool_], allowed: NDArray[np.bool_] | None) -> None:
    """Every query chooses something that it may see, and something competes somewhere."""
    has = selected.any(1)
    if not has.all():
        missing = np.flatnonzero(~has)
        raise AttoscopeError(
            f"selected: got {len(missing)} queries that choose no key (first: query {missing[0]}); "
            "expected at least one each, so choose a key or drop the query"
        )
    if allowed is not None and (selected & ~allowed).any():
        i, t = np.argwhere(selected & ~allowed)[0]
        raise AttoscopeError(
            f"selected: got query {i} choosing key {t}, which it may not see; expected chosen keys "
            "among the allowed ones"
        )
    everything = selected.all() if allowed is None else not (allowed & ~selected).any()
    if everything:
        raise AttoscopeError(
            "selected: got every allowed key chosen by its query; expected at least one query with "
            "a key to choose against (for equal or given probabilities alone, use finite_part)"
        )


def required(value: Any, n: int, tokens: int) -> Array:
    """Right-hand sides: (1, 1) where they are all the same, else (query, token)."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 0:
        array = array.reshape(1, 1)
    elif array.shape not in ((n, tokens), (1, 1)):
        raise AttoscopeError(
            f"required: got shape {array.shape}; expected a number or {(n, tokens)} (query, token)"
        )
    finite("required", array)
    return array


def table(name: str, value: Any, n: int, tokens: int) -> Array:
    array = floats(name, value, 2, "(query, token)")
    if array.shape != (n, tokens):
        raise AttoscopeError(f"{name}: got shape {array.shape}; expected {(n, tokens)}")
    return array


def lengths(value: Any, sequences: int, tokens: int) -> NDArray[np.int64]:
    array = np.asarray(value)
    if array.shape != (sequences,) or array.dtype.kind not in "iu":
        raise AttoscopeError(
            f"lengths: got shape {array.shape} of {array.dtype}; expected {sequences} whole numbers"
        )
    if array.min() < 1 or array.max() > tokens:
        raise AttoscopeError(
            f"lengths: got {array.min()} to {array.max()}; expected 1 to {tokens} tokens"
        )
    return array.astype(np.int64)


def weight(value: Any, key_width: int, width: int) -> Array:
    array = floats("weight", value, 2, "(key width, query width)")
    if array.shape != (key_width, width):
        raise AttoscopeError(
            f"weight: got shape {array.shape}; expected {(key_width, width)} (key width, query "
            "width)"
        )
    return array
