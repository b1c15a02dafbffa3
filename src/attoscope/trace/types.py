"""What the trace hands out: sites, batches, attention calls and layers.

Axis names: batch (sequences), head (query heads), group (key heads), query and key (token
positions), width (of the residual stream), size (of one head).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Route = Literal["registry", "sdpa", "softmax"]
# An additive mask this low forbids. People write -1e4 (or 9,999) and below; a real bias is not as
# low (ALiBi reaches it 8,000 tokens away), and exp(-4096) is 0 in every dtype.
FORBIDDEN = -4096.0


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """Where an attention call sits: the stack, the layer in it, and which call of the layer."""

    stack: str
    layer: int
    call: str = "self"

    def __str__(self) -> str:
        where = f"{self.stack}.{self.layer}"
        return where if self.call == "self" else f"{where}.{self.call}"


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, ready to feed: keyword arguments, positional ones, or one tensor.

    `documents` numbers its sequences across the whole run. `valid` marks real tokens (padding is
    not), `special` the tokenizer's own; `decoder_valid` is for the decoder of a pair.
    """

    inputs: Any
    documents: tuple[int, ...]
    valid: Bool[Tensor, "batch token"] | None = None
    special: Bool[Tensor, "batch token"] | None = None
    decoder_valid: Bool[Tensor, "batch read"] | None = None
    tokens: tuple[tuple[str, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.documents)


@dataclass(slots=True)
class AttentionCall:
    """One call of attention, as the model made it. Rows of weights are made on demand.

    `mask` is what the model gave (boolean: True allows; float: added to the scores, very low
    values forbid), `causal` says that later keys are forbidden as well. `sinks` holds one extra
    logit per head that takes attention away from the keys. `probabilities` is there only where
    the model computed its own softmax and has no other form. `output_weight` is the part of the
    projection that follows, by head: what a head adds to the stream is
    `output[..., head, :] @ output_weight[head]`.
    """

    query: Float[Tensor, "batch head query size"] | None
    key: Float[Tensor, "batch group key size"] | None
    value: Float[Tensor, "batch group key value_size"] | None
    scale: float
    route: Route
    mask: Tensor | None = None
    causal: bool = False
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None
    probabilities: Float[Tensor, "batch head query key"] | None = None
    raw_scores: Float[Tensor, "batch head query key"] | None = None
    output: Float[Tensor, "batch query head value_size"] | None = None
    output_weight: Float[Tensor, "head value_size width"] | None = None
    module: str = ""
    site: Site = field(default_factory=lambda: Site("?", 0))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, head, query, key)."""
        if self.probabilities is not None:
            b, h, q, k = self.probabilities.shape
        else:
            assert self.query is not None and self.key is not None
            b, h, q, _ = self.query.shape
            k = self.key.shape[2]
        return b, h, q, k

    def key_head(self) -> Int[Tensor, " head"]:
        """Which key head each query head reads (grouped-query attention)."""
        heads = self.shape[1]
        groups = heads if self.key is None else self.key.shape[1]
        return torch.arange(heads) // (heads // groups)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer as it went by: the residual stream in and out, and its attention calls.

    `index` counts from 0 within the stack; `final` marks the normalisation after the last layer,
    which has no calls. `valid` and `special` are over the tokens of this stack; key-side masks
    for cross attention are `key_valid` and `key_special`.
    """

    stack: str
    index: int
    name: str
    calls: tuple[AttentionCall, ...]
    stream_in: Float[Tensor, "batch token width"] | None
    stream_out: Float[Tensor, "batch token width"] | None
    valid: Bool[Tensor, "batch token"]
    special: Bool[Tensor, "batch token"]
    key_valid: Bool[Tensor, "batch key"] | None = None
    key_special: Bool[Tensor, "batch key"] | None = None
    final: bool = False
