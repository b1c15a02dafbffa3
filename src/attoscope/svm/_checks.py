"""Input checks: each gives clean arrays or raises one sentence."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attoscope.errors import AttoscopeError

Array = NDArray[np.float64]
MOST = np.iinfo(np.int64).max


def as_array(name: str, value: Any, meaning: str) -> NDArray[Any]:
    """Whatever numpy makes an array of, as a plain one."""
    try:
        return np.asarray(_plain(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise _no_array(name, value, meaning) from None


def real(name: str, value: Any, meaning: str) -> Array:
    """Real numbers of any shape as a float64 array that kernels can take."""
    found = as_array(name, value, meaning)
    kind = found.dtype.kind
    if kind == "c":
        raise AttoscopeError(
            f"{name}: got complex numbers; expected {meaning} of real ones, so give real and "
            "imaginary parts side by side, or the one that is meant"
        )
    # "V" holds the small float types of other libraries, which cast.
    fits = kind in "biufV" or kind == "O" and all(isinstance(x, Real) for x in found.flat)
    try:
        if fits:
            return _for_kernels(found, np.float64)
    except (TypeError, ValueError, OverflowError):
        pass
    raise _no_array(name, value, meaning)


def floats(name: str, value: Any, dims: int, meaning: str) -> Array:
    """A finite float64 array with so many axes."""
    array = real(name, value, meaning)
    if array.ndim != dims or 0 in array.shape:
        raise AttoscopeError(f"{name}: got shape {array.shape}; expected {meaning}, none empty")
    finite(name, array)
    return array


def finite(name: str, array: Array) -> None:
    # A sum is finite when all is, and one pass costs a fraction of testing each number.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.sum()) or np.isfinite(array).all():
            return
    where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
    count = int(array.size - np.isfinite(array).sum())
    raise AttoscopeError(
        f"{name}: got {count} values that are NaN or infinite (first at {where}); expected finite "
        "numbers, so remove or replace them"
    )


def whole(
    name: str, value: Any, meaning: str, shape: tuple[int, ...] | None = None
) -> NDArray[np.int64]:
    """Whole numbers, of this shape where one is given."""
    found = as_array(name, value, meaning)
    if found.dtype.kind not in "iu" or shape not in (None, found.shape):
        raise AttoscopeError(
            f"{name}: got shape {found.shape} of {found.dtype}; expected {meaning}"
        )
    if found.size and found.max() > MOST:
        raise AttoscopeError(f"{name}: got {found.max()}; expected numbers of at most {MOST}")
    return _for_kernels(found, np.int64)


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Whether this is a real (or whole) number: neither NaN nor a truth value."""
    kind = Integral if whole else Real
    return bool(isinstance(value, kind) and not isinstance(value, bool) and value == value)


def _plain(value: Any) -> Any:
    """Tensors without their gradients, in a precision that numpy has."""
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "detach"):
        return [_plain(part) for part in value]
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value


def _for_kernels(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    # Numba compiles every kernel again, for seconds, for read-only, unaligned or strided arrays.
    return np.require(array, dtype, ["C", "A", "W"])


def _no_array(name: str, value: Any, meaning: str) -> AttoscopeError:
    return AttoscopeError(
        f"{name}: got {type(value).__name__} that is no array of numbers, or whose rows differ in "
        f"length; expected {meaning}"
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
    array = whole("sequence", value, f"{n} whole numbers, one per query", (n,))
    if array.min() < 0 or array.max() >= sequences:
        raise AttoscopeError(
            f"sequence: got numbers from {array.min()} to {array.max()}; expected 0 to "
            f"{sequences - 1}, as there are {sequences} sequences of keys"
        )
    return array


def mask(name: str, value: Any, n: int, tokens: int) -> NDArray[np.bool_]:
    meaning = f"{(n, tokens)} booleans (query, token)"
    array = as_array(name, value, meaning)
    if array.dtype != bool or array.shape != (n, tokens):
        raise AttoscopeError(
            f"{name}: got shape {array.shape} of {array.dtype}; expected {meaning}"
        )
    return _for_kernels(array, np.bool_)


def chosen(name: str, value: Any, n: int, tokens: int) -> NDArray[np.bool_]:
    """Booleans (query, token), made from positions where positions are given; one each."""
    array = as_array(name, value, f"{n} positions, or {(n, tokens)} booleans (query, token)")
    if array.dtype.kind not in "iu" or array.shape != (n,):
        array = mask(name, array, n, tokens)
    elif array.min() < 0 or array.max() >= tokens:
        raise AttoscopeError(
            f"{name}: got positions from {array.min()} to {array.max()}; expected 0 to {tokens - 1}"
        )
    else:
        array = np.asarray(np.arange(tokens)[None, :] == array[:, None])
    has = array.any(1)
    if not has.all():
        missing = np.flatnonzero(~has)
        raise AttoscopeError(
            f"{name}: got {len(missing)} queries that choose no key (first: query {missing[0]}); "
            "expected at least one each, so choose a key or drop the query"
        )
    return array


def competition(selected: NDArray[np.bool_], allowed: NDArray[np.bool_] | None) -> None:
    """Every query chooses among what it may see, and something competes somewhere."""
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


def pairs(name: str, value: Any, shape: tuple[int, int]) -> NDArray[np.int64]:
    """(query, token) numbers within a table of this shape, (pair, 2)."""
    meaning = "(query, token) numbers, (pair, 2)"
    array = as_array(name, value, meaning)
    if array.size == 0:
        return np.zeros((0, 2), np.int64)
    array = whole(name, array, meaning, (len(array), 2) if array.ndim else (1, 2))
    low, high = array.min(0).tolist(), array.max(0).tolist()
    if min(low) < 0 or high[0] >= shape[0] or high[1] >= shape[1]:
        raise AttoscopeError(
            f"{name}: got numbers from {low} to {high}; expected (query, token) from [0, 0] to "
            f"{[shape[0] - 1, shape[1] - 1]}"
        )
    return array


def required(value: Any, n: int, tokens: int) -> Array:
    """Right-hand sides: (1, 1) where they are all the same, else (query, token)."""
    meaning = f"a number or {(n, tokens)} (query, token)"
    array = real("required", value, meaning)
    if array.ndim == 0:
        array = array.reshape(1, 1)
    elif array.shape not in ((n, tokens), (1, 1)):
        raise AttoscopeError(f"required: got shape {array.shape}; expected {meaning}")
    finite("required", array)
    return array


def table(name: str, value: Any, n: int, tokens: int) -> Array:
    meaning = f"{(n, tokens)} (query, token)"
    array = floats(name, value, 2, meaning)
    if array.shape != (n, tokens):
        raise AttoscopeError(f"{name}: got shape {array.shape}; expected {meaning}")
    return array


def lengths(value: Any, sequences: int, tokens: int) -> NDArray[np.int64]:
    array = whole("lengths", value, f"{sequences} whole numbers", (sequences,))
    if array.min() < 1 or array.max() > tokens:
        raise AttoscopeError(
            f"lengths: got {array.min()} to {array.max()}; expected 1 to {tokens} tokens"
        )
    return array


def weight(value: Any, key_width: int, width: int) -> Array:
    array = floats("weight", value, 2, "(key width, query width)")
    if array.shape != (key_width, width):
        raise AttoscopeError(
            f"weight: got shape {array.shape}; expected {(key_width, width)} (key width, query "
            "width)"
        )
    return array
