"""Attention written with `torch.einsum`, brought to the layout of a batched product."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def scores_of(args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """(…, query, size) and (…, size, key) of an einsum that gives scores (…, query, key)."""
    parsed = _parse(args)
    if parsed is None:
        return None
    (left, right), out, (a, b) = parsed
    inner = [x for x in left if x in right and x not in out]
    if len(out) < 3 or len(inner) != 1:
        return None
    rest, query, key = out[:-2], out[-2], out[-1]
    if set(left) != {*rest, query, *inner} or set(right) != {*rest, key, *inner}:
        return None
    return (
        _ordered(a, left, rest + query + inner[0]),
        _ordered(b, right, rest + inner[0] + key),
    )


def output_of(args: tuple[Any, ...], result: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Weights (…, query, key), values (…, key, size) and outputs (…, query, size) of an einsum."""
    parsed = _parse(args)
    if parsed is None:
        return None
    (left, right), out, (a, b) = parsed
    if len(left) < 3:
        return None
    rest, query, key = left[:-2], left[-2], left[-1]
    size = [x for x in right if x not in left]
    if len(size) != 1 or set(right) != {*rest, key, *size}:
        return None
    if key in out or set(out) != {*rest, query, *size}:
        return None
    return (
        a,
        _ordered(b, right, rest + key + size[0]),
        _ordered(result, out, rest + query + size[0]),
    )


def _parse(
    args: tuple[Any, ...],
) -> tuple[tuple[str, str], str, tuple[Tensor, Tensor]] | None:
    """Labels of two operands and of the result, in explicit notation without ellipsis."""
    if not args or not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    inputs, arrow, out = args[0].replace(" ", "").partition("->")
    labels = inputs.split(",")
    if not arrow or "." in args[0] or len(labels) != 2 or len(operands) != 2:
        return None
    if not all(isinstance(x, Tensor) for x in operands):
        return None
    if any(len(set(x)) != len(x) for x in (*labels, out)):
        return None
    return (labels[0], labels[1]), out, (operands[0], operands[1])


def _ordered(tensor: Tensor, labels: str, wanted: str) -> Tensor:
    return tensor.permute([labels.index(x) for x in wanted])
