"""Positions in the residual stream, and the tokens that are looked at there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attoscope.measures.base import content_tokens, first_tokens
from attoscope.trace.types import Layer


@dataclass(frozen=True, slots=True)
class Point:
    """The stream at one position, in float32 or float64, with invalid tokens set to 0.

    `broken` marks sequences that hold a NaN or an infinity at a valid token; they are set to 0
    altogether, so that arithmetic on them is harmless, and `lost` is their share of such
    values.
    """

    name: str
    x: Float[Tensor, "batch token width"]
    valid: Bool[Tensor, "batch token"]
    content: Bool[Tensor, "batch token"]
    first: Bool[Tensor, "batch token"]
    broken: Bool[Tensor, " batch"]
    lost: Float[Tensor, " batch"]
    lost_at: Float[Tensor, "batch token"]


def points(layer: Layer, dtype: torch.dtype) -> Iterator[Point]:
    """Where the layer passes the stream: what goes into the first one, then what comes out.

    "encoder.in" is the stream before layer 0, "encoder.3" the one after layer 3, and
    "encoder.final" the one after the last norm.
    """
    if layer.index == 0 and layer.stream_in is not None and not layer.final:
        yield make_point(f"{layer.stack}.in", layer.stream_in, layer, dtype)
    if layer.stream_out is not None:
        name = "final" if layer.final else str(layer.index)
        yield make_point(f"{layer.stack}.{name}", layer.stream_out, layer, dtype)


def make_point(
    name: str, stream: Float[Tensor, "batch token width"], layer: Layer, dtype: torch.dtype
) -> Point:
    """The point, cleaned: in `dtype`, padding and broken sequences set to 0."""
    valid = layer.valid.to(stream.device)
    # Some accelerators have no float64.
    x = stream.to(torch.float32 if stream.device.type == "mps" else dtype)
    if not bool(valid.all()):
        # A copy, never in place: the stream is the model's own.
        x = x.masked_fill(~valid[..., None], 0.0)
    lost_at = torch.zeros(valid.shape, dtype=x.dtype, device=x.device)
    broken = ~torch.isfinite(x.sum((1, 2)))
    if bool(broken.any()):
        # The sum of finite numbers may overflow: only the values themselves decide.
        lost_at = (~torch.isfinite(x)).to(x.dtype).mean(-1)
        broken = lost_at.amax(1) > 0
        x = torch.where(broken[:, None, None], 0.0, x)
    counts = valid.sum(1).clamp(min=1)
    return Point(
        name=name,
        x=x,
        valid=valid,
        content=content_tokens(layer).to(stream.device),
        first=first_tokens(valid),
        broken=broken,
        lost=lost_at.sum(1) / counts,
        lost_at=lost_at,
    )
