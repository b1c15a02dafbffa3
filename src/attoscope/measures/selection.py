"""What each head's door selects: how sharply, how decidedly, and for whom.

Everything is per site and head: a mean over documents of the document's mean over query rows.
Rows are a sample of the valid queries (128 per sequence unless told otherwise), the same ones
at every layer; `row_error` says what the sampling costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from attoscope.measures.base import (
    Array,
    Measure,
    Reading,
    RowSampler,
    Witness,
    WitnessKey,
    content_tokens,
)
from attoscope.measures.rowstats import STATISTICS, head_write, key_kinds, row_statistics
from attoscope.measures.rowwitness import RowPicker
from attoscope.measures.rules import Rule
from attoscope.measures.selection_rules import RULES
from attoscope.measures.selection_specs import FINITE_SPECS, SPECS
from attoscope.measures.tally import Tally
from attoscope.trace.rows import row_blocks
from attoscope.trace.types import AttentionCall, Batch, Layer

_QUANTITIES = (*STATISTICS, "head_write")
BLOCK_BYTES = 32 * 2**20
# Blocks of 24 to 48 rows take the same time: they stay in a processor's cache from one pass to the
# next, and are large enough for the products. More rows take more memory.
_BLOCK_ROWS = 32


class Selection:
    """Entropy, effective keys, sinks, margins, score scale and write of every head.

    Args:
        rows: query rows sampled per sequence and layer; None takes all of them.
        seed: for the sample of rows and the bootstrap.
        budget_bytes: how large one block of scores may be at most.
    """

    name: ClassVar[str] = "selection"
    needs: ClassVar[Literal["attention", "stream"]] = "attention"
    rules: ClassVar[tuple[Rule, ...]] = RULES

    def __init__(
        self, *, rows: int | None = 128, seed: int = 0, budget_bytes: int = BLOCK_BYTES
    ) -> None:
        self.sampler = RowSampler(rows, seed)
        self.budget_bytes = budget_bytes
        self.tally = Tally(_QUANTITIES, seed=seed)
        self.finite = Tally(("non_finite_rows",), seed=seed)
        self.witnesses: dict[WitnessKey, Witness] = {}
        self.modules: dict[str, str] = {}
        self._without_weight: dict[str, str] = {}

    def update(self, layer: Layer, batch: Batch) -> None:
        """Take in every attention call of the layer."""
        if not layer.calls:
            return
        positions, real = self.sampler(layer.valid, batch.documents)
        for call in layer.calls:
            self._take(call, layer, batch, positions, real)

    def merge(self, other: Measure) -> None:
        """Add what another `Selection` of the same seed took in."""
        if not isinstance(other, Selection):
            raise ValueError(f"cannot merge {type(other).__name__} into Selection")
        self.tally.merge(other.tally)
        self.finite.merge(other.finite)
        self.modules.update(other.modules)
        self._without_weight.update(other._without_weight)
        for key, witness in other.witnesses.items():
            self._keep(key, witness)

    def read(self) -> list[Reading]:
        """All readings, dims (site, head)."""
        dims = ("site", "head")
        readings = [
            *self.finite.readings(FINITE_SPECS, dims, row_error=True),
            *self.tally.readings(SPECS, dims, row_error=True),
        ]
        if not self._without_weight:
            return readings
        notes = "; ".join(
            f"{note} ({len(sites)} of {len(self.tally.places)} sites)"
            for note, sites in _grouped(self._without_weight).items()
        )
        for reading in readings:
            if reading.name == "head_write":
                reason = "; ".join(filter(None, (reading.reason, notes)))
                readings[readings.index(reading)] = _with_reason(reading, reason)
        return readings

    def _take(
        self,
        call: AttentionCall,
        layer: Layer,
        batch: Batch,
        positions: Int[Tensor, "batch row"],
        real: Bool[Tensor, "batch row"],
    ) -> None:
        site = str(call.site)
        self.modules.setdefault(site, call.module)
        kinds = key_kinds(*_key_masks(call, layer))
        guessed = call.probabilities is not None and call.raw_scores is None
        asks = content_tokens(layer).gather(1, positions) & real
        picker = RowPicker(batch, asks, call.shape[1])
        parts, lost = [], []
        for block, rows in row_blocks(call, positions, self._budget(call)):
            part, broken = row_statistics(rows, kinds, only_probabilities=guessed)
            picker.look(block, positions, rows, part, kinds)
            parts.append(part)
            lost.append(broken)
        for kind, head, witness in picker.witnesses(self._may_beat(site)):
            self._keep((kind, site, head), witness)
        statistics = torch.cat(
            [torch.cat(parts, -1), self._head_write(site, call, layer, positions)[None]]
        )
        left_out = ~real[:, None]
        broken = torch.cat(lost, -1) & real[:, None]
        queries = layer.valid.sum(1)
        means = _document_means(statistics.masked_fill_(left_out, math.nan), queries)
        self._add(self.tally, site, batch, means, broken.any(-1).cpu().numpy())
        share = broken[None].double().masked_fill_(left_out, math.nan)
        self._add(self.finite, site, batch, _document_means(share, queries))

    def _add(
        self,
        tally: Tally,
        site: str,
        batch: Batch,
        means: tuple[Array, Array],
        broken: NDArray[np.bool_] | None = None,
    ) -> None:
        values, variance = means
        tally.add(site, batch.documents, values, broken=broken, row_variance=variance)

    def _head_write(
        self,
        site: str,
        call: AttentionCall,
        layer: Layer,
        positions: Int[Tensor, "batch row"],
    ) -> Float[Tensor, "batch head row"]:
        batch, heads, _, _ = call.shape
        if call.output is None:
            self._without_weight[site] = "not computed: the heads' outputs were not seen"
            return torch.full(
                (batch, heads, positions.shape[1]),
                math.nan,
                dtype=torch.float64,
                device=positions.device,
            )
        if call.output_weight is None or layer.stream_in is None:
            self._without_weight[site] = (
                "relative to the mean head of the layer, not to the stream: the projection "
                "after the heads, or the stream, was not found"
            )
        write = head_write(call.output, call.output_weight, layer.stream_in, positions)
        return write.to(positions.device).double()

    def _budget(self, call: AttentionCall) -> int:
        batch, heads, _, keys = call.shape
        return min(self.budget_bytes, _BLOCK_ROWS * batch * heads * keys * 4)

    def _may_beat(self, site: str) -> Callable[[str, int, float], bool]:
        def beats(kind: str, head: int, score: float) -> bool:
            held = self.witnesses.get((kind, site, head))
            return held is None or score >= held.score

        return beats

    def _keep(self, key: WitnessKey, witness: Witness) -> None:
        if witness.beats(self.witnesses.get(key)):
            self.witnesses[key] = witness


def _key_masks(
    call: AttentionCall, layer: Layer
) -> tuple[Bool[Tensor, "batch key"], Bool[Tensor, "batch key"]]:
    """Valid and special keys of a call: the other side's for cross attention."""
    batch, _, queries, keys = call.shape
    device = layer.valid.device
    if not call.site.call.startswith("cross") and queries == keys:
        return layer.valid, layer.special
    valid, special = layer.key_valid, layer.key_special
    if valid is None:
        valid = torch.ones(batch, keys, dtype=torch.bool, device=device)
    return valid, torch.zeros_like(valid) if special is None else special


def _document_means(
    statistics: Float[Tensor, "statistic batch head row"], queries: Int[Tensor, " batch"]
) -> tuple[Array, Array]:
    """Mean over rows (document, statistic, head), and the variance that sampling rows adds.

    Sampling r of R rows without replacement: variance of the mean = s^2 / r · (1 - r / R).
    """
    x = statistics.cpu().numpy()
    there = np.isfinite(x)
    count = there.sum(-1)
    sampled = there.any((0, 2)).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        total = np.where(there, x, 0.0).sum(-1)
        mean = total / count
        square = np.where(there, x - mean[..., None], 0.0) ** 2
        variance = square.sum(-1) / (count - 1) / count
        left_out = 1 - sampled / np.maximum(queries.cpu().numpy(), 1)
    left_out = left_out[None, :, None]
    variance = np.where(left_out > 0, variance * left_out, np.where(count > 0, 0.0, np.nan))
    mean = np.where(count > 0, mean, np.nan)
    return mean.transpose(1, 0, 2), variance.transpose(1, 0, 2)


def _grouped(notes: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for site, note in notes.items():
        found.setdefault(note, []).append(site)
    return found


def _with_reason(reading: Reading, reason: str) -> Reading:
    return replace(reading, reason=reason)
