"""One layer on one document: its attention maps, its tokens, and what it did to their likeness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attoscope.measures.base import content_tokens
from attoscope.measures.smoothness import family
from attoscope.prediction.maps import ValueMaps
from attoscope.trace.rows import attention_rows
from attoscope.trace.types import AttentionCall, Batch, Layer

# Eigenvalues of larger attention maps take minutes per model.
MOST_TOKENS = 512


@dataclass(frozen=True, eq=False)
class Document:
    """One document's valid tokens at one layer, in float64.

    Rows of `attention` sum to 1: where a sink took a share (`sink`, the largest), they were
    divided by what is left. `content` leaves the first and special tokens out.
    """

    number: int
    attention: Float[Tensor, "head token token"]
    x: Float[Tensor, "token width"]
    out: Float[Tensor, "token width"]
    written: Float[Tensor, "token head width"]
    content: Bool[Tensor, " token"]
    sink: float

    @property
    def causal(self) -> bool:
        """Whether no token looks at a later one."""
        return not bool(self.attention.triu(1).any())


def documents_of(
    layer: Layer, batch: Batch, call: AttentionCall, maps: ValueMaps
) -> Iterator[Document]:
    """The documents of a batch one by one, padding cut; broken ones are left out."""
    assert layer.stream_in is not None and layer.stream_out is not None
    assert call.output is not None
    content = content_tokens(layer)
    positions = torch.arange(call.shape[2], device=layer.valid.device)
    rows = attention_rows(call, positions.expand(call.shape[0], -1))
    weights = rows.weights.double().cpu()
    for row, number in enumerate(batch.documents):
        here = layer.valid[row].cpu()
        attention = weights[row][:, here][:, :, here]
        kept = attention.sum(-1, keepdim=True)
        parts = [t[row].double().cpu()[here] for t in (layer.stream_in, layer.stream_out)]
        written = maps.writes(call.output[row]).cpu()[here]
        sound = all(bool(torch.isfinite(t).all()) for t in (attention, *parts, written))
        if not sound or not bool((kept > 0).all()):
            continue
        yield Document(
            number, attention / kept, parts[0], parts[1], written, content[row].cpu()[here],
            float(rows.sink_mass[row].max()),
        )  # fmt: skip


def log_ratio(
    x: Float[Tensor, "*some token width"], content: Bool[Tensor, " token"]
) -> Float[Tensor, "*some"]:
    """ln of the high over low frequencies of the content tokens; NaN where there are not two."""
    flat = x.reshape(-1, *x.shape[-2:])
    return family(flat, content.expand(len(flat), -1))[1].log().reshape(x.shape[:-2])


def high_and_low(
    x: Float[Tensor, "*some token width"], content: Bool[Tensor, " token"]
) -> tuple[Float[Tensor, "*some"], Float[Tensor, "*some"]]:
    """||(I - J) X||^2 and ||J X||^2 over the content tokens."""
    kept = x[..., content, :]
    mean = kept.mean(-2, keepdim=True)
    low = mean.square().sum((-1, -2)) * kept.shape[-2]
    return (kept - mean).square().sum((-1, -2)), low


def cut(batch: Batch, documents: int, tokens: int) -> Batch:
    """The first documents of a batch and the first tokens of each, closing tokens kept.

    A special token that ends a document (as [SEP]) is moved up to the cut: many heads look at
    it. Inputs that are no token ids (images) stay whole.
    """
    rows, inputs, valid = min(documents, len(batch)), batch.inputs, batch.valid
    if not isinstance(inputs, dict):
        return batch
    if valid is None:
        kept = {k: _rows(v, len(batch), rows) for k, v in inputs.items()}
        return replace(batch, inputs=kept, documents=batch.documents[:rows], tokens=None)
    where = torch.stack(
        [
            _places(valid[row], None if batch.special is None else batch.special[row], tokens)
            for row in range(rows)
        ]
    )
    longest = max(1, int(valid[:rows].sum(1).clamp(max=tokens).max()))
    where = where[:, :longest]

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != len(batch):
            return value
        value = value[:rows]
        if value.dim() == 1 or value.shape[1] != valid.shape[1]:
            return value[:, :tokens] if _decodes(batch, value) else value
        index = where.to(value.device)
        return value[torch.arange(rows, device=value.device)[:, None], index]

    return replace(
        batch,
        inputs={name: part(value) for name, value in inputs.items()},
        documents=batch.documents[:rows],
        valid=part(valid),
        special=part(batch.special),
        decoder_valid=part(batch.decoder_valid),
        tokens=None,
    )


def _rows(value: Any, size: int, rows: int) -> Any:
    whole = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size
    return value[:rows] if whole else value


def _decodes(batch: Batch, value: Tensor) -> bool:
    """Whether a tensor is over the tokens that the decoder of a pair reads."""
    other = batch.decoder_valid
    return other is not None and value.dim() > 1 and value.shape[1] == other.shape[1]


def _places(
    valid: Bool[Tensor, " token"], special: Bool[Tensor, " token"] | None, tokens: int
) -> Tensor:
    """Which positions of a document are kept, in order; then padding, as many as are asked."""
    real = valid.nonzero()[:, 0]
    if len(real) > tokens:
        closing = 0
        while special is not None and closing < tokens - 1 and special[real[-1 - closing]]:
            closing += 1
        real = torch.cat([real[: tokens - closing], real[len(real) - closing :]])
    padding = (~valid).nonzero()[:, 0]
    lacking = max(0, min(tokens, len(valid)) - len(real))
    return torch.cat([real, padding[:lacking]])
