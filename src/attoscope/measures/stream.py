"""The residual stream: how long its vectors are, what a block adds, what sticks out."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attoscope.measures.base import (
    Array,
    Measure,
    Reading,
    RowSampler,
    Witness,
    WitnessKey,
    token_at,
)
from attoscope.measures.points import Point, points
from attoscope.measures.rules import Rule
from attoscope.measures.stream_rules import RULES
from attoscope.measures.stream_specs import BLOCK_SPECS, POINT_SPECS
from attoscope.measures.tally import Tally
from attoscope.trace.types import Batch, Layer

POINT_QUANTITIES = (
    "norm",
    "variance",
    "massive_activation",
    "token_norm_ratio",
    "channel_share",
    "channel_even",
)
BLOCK_QUANTITIES = ("growth", "update_ratio")
# Tokens per sequence from which the median activation is taken.
_MEDIAN_TOKENS = 32


class Stream:
    """Norm, variance, growth, massive activations, channels and updates along the stream.

    Args:
        seed: for the bootstrap, and for the tokens from which the median activation is taken.
    """

    name: ClassVar[str] = "stream"
    needs: ClassVar[Literal["attention", "stream"]] = "stream"
    rules: ClassVar[tuple[Rule, ...]] = RULES

    def __init__(self, *, seed: int = 0) -> None:
        self.sampler = RowSampler(_MEDIAN_TOKENS, seed)
        self.points = Tally(POINT_QUANTITIES, seed=seed)
        self.blocks = Tally(BLOCK_QUANTITIES, seed=seed)
        self.finite = Tally(("non_finite",), seed=seed)
        self.witnesses: dict[WitnessKey, Witness] = {}
        self.modules: dict[str, str] = {}

    def update(self, layer: Layer, batch: Batch) -> None:
        """Take in the stream where it enters the stack, and before and after the layer."""
        point = None
        for point in points(layer, torch.float32):
            self.modules.setdefault(point.name, layer.name)
            self._point(point, batch)
        if point is not None and layer.stream_in is not None and not layer.final:
            values = block(layer.stream_in, point)
            broken = point.broken.cpu().numpy()
            self.blocks.add(point.name, batch.documents, values, broken=broken)

    def merge(self, other: Measure) -> None:
        """Add what another `Stream` of the same seed took in."""
        if not isinstance(other, Stream):
            raise ValueError(f"cannot merge {type(other).__name__} into Stream")
        self.points.merge(other.points)
        self.blocks.merge(other.blocks)
        self.finite.merge(other.finite)
        self.modules.update(other.modules)
        for key, witness in other.witnesses.items():
            self._keep(key, witness)

    def read(self) -> list[Reading]:
        """All readings, dims (point,) or, where it is per block, (layer,)."""
        finite, rest = POINT_SPECS[:1], POINT_SPECS[1:]
        return [
            *self.finite.readings(finite, ("point",)),
            *self.points.readings(rest, ("point",)),
            *self.blocks.readings(BLOCK_SPECS, ("layer",)),
        ]

    def _point(self, point: Point, batch: Batch) -> None:
        lost = point.lost.cpu().double().numpy()[:, None]
        self.finite.add(point.name, batch.documents, lost)
        positions, real = self.sampler(point.valid, batch.documents)
        found, top = stick_out(point, positions, real)
        values = torch.where(point.broken, math.nan, found).T.cpu().double().numpy()
        broken = point.broken.cpu().numpy()
        self.points.add(point.name, batch.documents, values, broken=broken)
        self._witness(point, batch, top.cpu(), values)

    def _witness(
        self, point: Point, batch: Batch, top: Int[Tensor, "three batch"], values: Array
    ) -> None:
        """Keep the largest activation, the largest channel's token, the first broken token."""
        for row in range(len(batch.documents)):
            if bool(point.broken[row]):
                at = int(point.lost_at[row].argmax())
                self._show("non_finite", point, batch, row, at, None, float(point.lost[row]))
                continue
            token, channel, heaviest = (int(i) for i in top[:, row])
            size = float(values[row, POINT_QUANTITIES.index("massive_activation")])
            held = self.witnesses.get(("largest", point.name, -1))
            if math.isfinite(size) and (held is None or size >= held.score):
                self._show("largest", point, batch, row, token, channel, size)
            share = float(values[row, POINT_QUANTITIES.index("channel_share")])
            held = self.witnesses.get(("channel", point.name, -1))
            if math.isfinite(share) and (held is None or share >= held.score):
                column = point.x[row, :, heaviest].abs() * point.content[row]
                at = int(column.argmax())
                self._show("channel", point, batch, row, at, heaviest, share)

    def _show(
        self,
        kind: str,
        point: Point,
        batch: Batch,
        row: int,
        position: int,
        channel: int | None,
        score: float,
    ) -> None:
        witness = Witness(
            value=score if channel is None else float(point.x[row, position, channel]),
            score=score,
            document=batch.documents[row],
            position=position,
            token=token_at(batch, row, position),
            channel=channel,
            first=bool(point.first[row, position]),
        )
        self._keep((kind, point.name, -1), witness)

    def _keep(self, key: WitnessKey, witness: Witness) -> None:
        if witness.beats(self.witnesses.get(key)):
            self.witnesses[key] = witness


def stick_out(
    point: Point, positions: Int[Tensor, "batch row"], real: Bool[Tensor, "batch row"]
) -> tuple[Float[Tensor, "quantity batch"], Int[Tensor, "three batch"]]:
    """`POINT_QUANTITIES` of a point; and token and channel of the largest activation, and the
    heaviest channel on content.

    The median of |x| is taken over the tokens at `positions`, everything else over all tokens.
    """
    x, width = point.x, point.x.shape[2]
    content = point.content.to(x.dtype)
    count = content.sum(1)
    some = torch.where(count > 0, 0.0, math.nan)
    square = x.square()
    energy = square.sum(-1)
    norms = energy.sqrt()
    norm = (norms * content).sum(1) / count
    spread = energy / width - x.mean(-1).square()
    variance = (spread.clamp(min=0.0) * content).sum(1) / count
    # Each token's energy is made to sum to 1 first: one massive token must not speak for all.
    each = torch.where(point.content & (energy > 0), 1 / energy, 0.0)
    by_channel = (each[:, None] @ square)[:, 0]
    heaviest = by_channel.max(-1)
    share = heaviest.values / by_channel.sum(-1)
    peaks = square.amax(-1).sqrt()
    largest = peaks.max(-1)
    rows = torch.arange(len(x), device=x.device)
    channel = square[rows, largest.indices].argmax(-1)
    median = _median_activation(x, positions, real)
    massive = torch.where(median > 0, largest.values / median, math.nan)
    middle = torch.where(point.valid, norms, math.nan).nanmedian(-1).values
    ratio = torch.where(middle > 0, norms.amax(-1) / middle, math.nan)
    even = torch.full_like(share, 1 / width)
    quantities = (norm, variance + some, massive, ratio, share, even + some)
    return torch.stack(quantities), torch.stack([largest.indices, channel, heaviest.indices])


def block(stream_in: Float[Tensor, "batch token width"], after: Point) -> Array:
    """Growth (norm out over norm in) and update (norm of the change over norm in), on content.

    Both are ratios of means over the document's content tokens, (document, quantity).
    """
    before = stream_in.to(after.x.dtype)
    norms = [torch.linalg.vector_norm(x, dim=-1) for x in (before, after.x, after.x - before)]
    # A product with 0 would let a NaN of the padding through.
    kept = torch.where(after.content, torch.stack(norms), 0.0)
    start, end, change = kept.sum(-1).double().cpu().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios: Array = np.stack([end, change], 1) / start[:, None]
    return np.where(start[:, None] > 0, ratios, np.nan)


def _median_activation(
    x: Float[Tensor, "batch token width"],
    positions: Int[Tensor, "batch row"],
    real: Bool[Tensor, "batch row"],
) -> Float[Tensor, " batch"]:
    """Median |x| over the tokens at `positions` that are real."""
    rows = torch.arange(len(x), device=x.device)[:, None]
    sample = torch.where(real[..., None], x[rows, positions], math.nan)
    return sample.abs().flatten(1).nanmedian(-1).values
