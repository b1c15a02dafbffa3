"""Layers and calls built by hand, so that the truth about them is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attoscope.measures import Measure, Reading
from attoscope.trace.types import AttentionCall, Batch, Layer, Site


def layer(
    stream: Tensor | None = None,
    *,
    before: Tensor | None = None,
    calls: Sequence[AttentionCall] = (),
    valid: Tensor | None = None,
    special: Tensor | None = None,
    index: int = 0,
    stack: str = "encoder",
    final: bool = False,
) -> Layer:
    """A layer; everything is valid and nothing special unless said."""
    shape = stream.shape[:2] if stream is not None else (calls[0].shape[0], calls[0].shape[2])
    valid = torch.ones(shape, dtype=torch.bool) if valid is None else valid
    return Layer(
        stack=stack,
        index=index,
        name=f"{stack}.layer.{index}",
        calls=tuple(calls),
        stream_in=before,
        stream_out=stream,
        valid=valid,
        special=torch.zeros(shape, dtype=torch.bool) if special is None else special,
        final=final,
    )


def call(scores: Tensor, *, index: int = 0, **options: object) -> AttentionCall:
    """A call whose scores are exactly `scores` (batch, head, query, key)."""
    keys = scores.shape[3]
    key = torch.eye(keys, dtype=scores.dtype).expand(*scores.shape[:2], keys, keys)
    return AttentionCall(
        query=scores,
        key=key,
        value=None,
        scale=1.0,
        route="sdpa",
        module=f"encoder.layer.{index}.attention",
        site=Site("encoder", index),
        **options,  # type: ignore[arg-type]
    )


def batch(*documents: int, tokens: tuple[tuple[str, ...], ...] | None = None) -> Batch:
    """A batch that only numbers its documents."""
    return Batch(inputs={}, documents=documents or (0,), tokens=tokens)


def read(measure: Measure) -> dict[str, Reading]:
    """Readings by name."""
    return {reading.name: reading for reading in measure.read()}


def padded(x: Tensor, left: int, right: int, value: float) -> Tensor:
    """Token axis 1 padded with `value` on both sides."""
    shape = list(x.shape)
    parts = []
    for size in (left, right):
        shape[1] = size
        parts.append(torch.full(shape, value, dtype=x.dtype))
    return torch.cat([parts[0], x, parts[1]], 1)


def with_stream(of: Layer, stream: Tensor) -> Layer:
    """The layer with another stream after it."""
    return replace(of, stream_out=stream)
