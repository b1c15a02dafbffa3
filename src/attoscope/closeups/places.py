"""A number for each token of the residual stream, as the readings of findings take them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from attoscope.measures.points import Point
from attoscope.trace import Layer

Numbers = Float[Tensor, "sequence token"]
_TINY = 1e-30


def numbers(reading: str, layer: Layer, point: Point) -> Numbers | None:
    """The number of each token at a point, NaN where it has none; None for other readings."""
    if reading not in PLACES:
        return None
    found = PLACES[reading][1](layer, point)
    return None if found is None else found.masked_fill(~point.valid, torch.nan)


def _massive(_: Layer, point: Point) -> Numbers:
    """Largest |activation| of the token over the median one of the document."""
    size = point.x.abs()
    middle = [x[v].median() for x, v in zip(size, point.valid, strict=True)]
    return size.amax(-1) / torch.stack(middle)[:, None].clamp(min=_TINY)


def _channel(_: Layer, point: Point) -> Numbers:
    """Share of the token's energy in the channel that has most over the content tokens."""
    energy = point.x.square()
    share = energy / energy.sum(-1, keepdim=True).clamp(min=_TINY)
    mean = (share * point.content[..., None]).sum(1)
    top = mean.argmax(-1)
    found = share.gather(2, top[:, None, None].expand(-1, share.shape[1], 1))[..., 0]
    return found.masked_fill(~point.content, torch.nan)


def _off_line(_: Layer, point: Point) -> Numbers:
    """Share (in norm) of the token that the best line through all content tokens leaves out."""
    x = point.x * point.content[..., None]
    _, _, right = torch.linalg.svd(x, full_matrices=False)
    line = right[:, :1]
    left = x - (x @ line.transpose(1, 2)) @ line
    share = _length(left) / _length(x)
    return share.masked_fill(~point.content, torch.nan)


def _alike(_: Layer, point: Point) -> Numbers:
    """Mean cosine of the token with the other content tokens."""
    unit = point.x / _length(point.x)[..., None] * point.content[..., None]
    others = point.content.sum(1, keepdim=True) - 1
    cosine: Numbers = ((unit * unit.sum(1, keepdim=True)).sum(-1) - 1) / others
    return cosine.masked_fill(~point.content | (others < 1), torch.nan)


def _beside_mean(_: Layer, point: Point) -> Numbers:
    """Length of what tells the token apart from the mean of content tokens, over the mean's."""
    count = point.content.sum(1)[:, None, None].clamp(min=1)
    mean = (point.x * point.content[..., None]).sum(1, keepdim=True) / count
    return (_length(point.x - mean) / _length(mean)).masked_fill(~point.content, torch.nan)


def _length(x: Float[Tensor, "sequence token width"]) -> Numbers:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return length.clamp(min=_TINY)


def _update(layer: Layer, point: Point) -> Numbers | None:
    if layer.stream_in is None:
        return None
    before = layer.stream_in.to(point.x)
    return (_length(point.x - before) / _length(before)).masked_fill(~point.content, torch.nan)


def _growth(layer: Layer, point: Point) -> Numbers | None:
    if layer.stream_in is None:
        return None
    before = layer.stream_in.to(point.x)
    return (_length(point.x) / _length(before)).masked_fill(~point.content, torch.nan)


def _lost(_: Layer, point: Point) -> Numbers:
    return point.lost_at


# By the reading of a finding: what the number of a token is, in words and as a function.
PLACES: dict[str, tuple[str, Callable[[Layer, Point], Numbers | None]]] = {
    "massive_activation": ("largest |activation| over the median one of the text", _massive),
    "channel_share": ("share of the token's energy in the one channel", _channel),
    "rank_one_residual": ("share of the token off the common line", _off_line),
    "cosine": ("mean cosine with the other content tokens", _alike),
    "frequency_ratio": (
        "length beside the mean of content tokens, over the mean's",
        _beside_mean,
    ),
    "update_ratio": ("what the block changes, relative to what came in", _update),
    "growth": ("length after the block over length before it", _growth),
    "non_finite": ("share of values that are NaN or infinite", _lost),
}
