"""Cheap numbers of one layer as it goes by in training, from a few sequences and query rows.

The same sequences and positions every time, so that two looks differ by what was learned and
by the batch, not by the draw. In float32, without gradients, outside autocast.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attoscope.measures.base import RowSampler, content_tokens
from attoscope.measures.rowstats import STATISTICS, key_kinds, row_statistics
from attoscope.measures.selection_rules import FROZEN_TIMES, LOST_ROWS
from attoscope.measures.smoothness import family, spectrum
from attoscope.trace.rows import attention_rows
from attoscope.trace.types import AttentionCall, Layer

# What is averaged over rows, heads and sequences.
MEANS = ("normalised_entropy", "score_scale", "margin", "undecided", "saturated")
ATTENTION = (
    *MEANS,
    "least_entropy",
    "largest_scale",
    "largest_score",
    "saturated_heads",
)
STREAM = ("norm", "growth", "update_ratio", "cosine", "rank_one_residual", "non_finite")
MEANINGS = {
    "normalised_entropy": "entropy of a query's attention over ln(keys), mean over heads",
    "score_scale": "standard deviation of a query's scores (attention logits), mean over heads",
    "margin": "top score minus the runner-up's, in nats",
    "undecided": "share of queries whose top key has less than twice its even share",
    "saturated": "share of queries whose runner-up float32 cannot hold beside the top key",
    "least_entropy": "normalised entropy of the head that has least",
    "largest_scale": "score scale of the head that has most",
    "largest_score": "largest absolute attention logit",
    "saturated_heads": "share of heads past three times the freezing point sqrt(2 ln n), with "
    "one row in ten saturated",
    "norm": "norm of a token's residual stream after the layer",
    "growth": "norm after the layer over norm before it",
    "update_ratio": "norm of what the layer adds over norm before it",
    "cosine": "mean cosine between a sequence's tokens after the layer",
    "rank_one_residual": "share of the tokens' norm off their common line: 0 is rank collapse",
    "non_finite": "1 where scores or stream hold NaN or infinity",
}


class LayerReader:
    """Reads a layer at a sample of sequences and query rows.

    Args:
        rows: query rows, and tokens of the stream, per sequence.
        sequences: sequences of the batch, evenly spaced.
    """

    def __init__(self, rows: int = 32, sequences: int = 4) -> None:
        self.sequences = sequences
        self.sampler = RowSampler(rows)

    @torch.no_grad()
    def __call__(self, layer: Layer) -> dict[str, float]:
        """Readings by "name/site"; sites are "decoder.3", or "decoder.3.cross" for a second call.

        The mean over what is defined; NaN where nothing is.
        """
        device = layer.valid.device.type
        found: dict[str, float] = {}
        with torch.autocast(device, enabled=False):
            for call in layer.calls:
                for name, value in self._attention(call, layer).items():
                    found[f"{name}/{call.site}"] = value
            if layer.stream_in is not None and layer.stream_out is not None:
                where = f"{layer.stack}.{layer.index}"
                for name, value in self._stream(layer).items():
                    at = f"{name}/{where}"
                    # NaN or not: attention may have said so already.
                    found[at] = max(value, found.get(at, 0.0)) if name in _FLAGS else value
        return found

    def _attention(self, call: AttentionCall, layer: Layer) -> dict[str, float]:
        chosen = self._chosen(call.shape[0], layer.valid.device)
        some = at_sequences(call, chosen)
        valid = layer.valid[chosen] if len(layer.valid) == call.shape[0] else layer.valid
        positions, real = self.sampler(valid, chosen.tolist())
        rows = attention_rows(some, positions)
        keys = valid
        if call.shape[3] != valid.shape[1]:
            keys = torch.ones(len(chosen), call.shape[3], dtype=torch.bool, device=valid.device)
        kinds = key_kinds(keys, torch.zeros_like(keys))
        guessed = call.probabilities is not None and call.raw_scores is None
        table, broken = row_statistics(rows, kinds, only_probabilities=guessed)
        table = table.masked_fill(~real[:, None], math.nan)
        # (statistic, head)
        heads = table.transpose(1, 2).flatten(2).nanmean(-1)
        column = {name: heads[i] for i, name in enumerate(STATISTICS)}
        here = rows.allowed & real[:, None, :, None]
        largest = rows.scores.abs().where(here, 0.0).amax()
        frozen = (column["score_scale"] > FROZEN_TIMES * column["freezing"]) & (
            column["saturated"] >= LOST_ROWS
        )
        bad = (broken & real[:, None]).any() | ~torch.isfinite(largest)
        values = [column[name].nanmean() for name in MEANS]
        values += [
            column["normalised_entropy"].nan_to_num(nan=math.inf).amin(),
            column["score_scale"].nan_to_num(nan=-math.inf).amax(),
            largest,
            frozen.double().mean(),
            bad,
        ]
        names = (*ATTENTION, "non_finite")
        numbers = torch.stack([value.double() for value in values]).tolist()
        return {
            n: v if math.isfinite(v) else math.nan for n, v in zip(names, numbers, strict=True)
        }

    def _stream(self, layer: Layer) -> dict[str, float]:
        assert layer.stream_in is not None and layer.stream_out is not None
        chosen = self._chosen(len(layer.stream_out), layer.stream_out.device)
        among = content_tokens(layer).to(chosen.device)[chosen]
        positions, real = self.sampler(among, chosen.tolist())
        before, after = (
            taken(x, chosen, positions, real) for x in (layer.stream_in, layer.stream_out)
        )
        start, end, change = (
            torch.linalg.vector_norm(x, dim=-1).sum() for x in (before, after, after - before)
        )
        finite = torch.isfinite(start + end)
        whole = after if bool(finite) else torch.zeros_like(after)
        cosine = family(whole, real)[0].nanmean()
        residual = spectrum(whole, real)[1].nanmean()
        values = [end / real.sum(), end / start, change / start, cosine, residual, ~finite]
        numbers = torch.stack([value.double() for value in values]).tolist()
        return dict(zip(STREAM, numbers, strict=True))

    def _chosen(self, sequences: int, device: torch.device) -> Int[Tensor, " sequence"]:
        count = min(self.sequences, sequences)
        return torch.arange(count, device=device) * sequences // count


_FLAGS = ("non_finite",)


def at_sequences(call: AttentionCall, chosen: Int[Tensor, " sequence"]) -> AttentionCall:
    """The call for some sequences of the batch, without values and outputs."""

    def some(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.detach()
        return tensor if len(tensor) == 1 else tensor[chosen.to(tensor.device)]

    return replace(
        call,
        query=some(call.query),
        key=some(call.key),
        value=None,
        output=None,
        output_weight=None,
        mask=some(call.mask),
        probabilities=some(call.probabilities),
        raw_scores=some(call.raw_scores),
        sinks=None if call.sinks is None else call.sinks.detach(),
    )


def taken(
    x: Tensor,
    chosen: Int[Tensor, " sequence"],
    positions: Int[Tensor, "sequence row"],
    real: Bool[Tensor, "sequence row"],
) -> Tensor:
    """(sequence, row, width) of the stream in float32, 0 where not real."""
    picked = x[chosen[:, None], positions].float()
    return torch.where(real[..., None], picked, 0.0)
