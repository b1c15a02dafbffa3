"""Rows of attention, recomputed from a call: scores, which keys are allowed, weights.

Rows are made for chosen query positions only, in float32, and in blocks under a memory budget,
so that nothing of size length × length has to exist. Forbidden scores are minus infinity, never
a large finite number: a very negative true score can then not let a forbidden key in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attoscope.trace.types import FORBIDDEN, AttentionCall

DEFAULT_BUDGET = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Rows:
    """Attention rows at chosen query positions.

    `scores` are scaled, soft-capped and biased, minus infinity where forbidden; `weights` are
    their softmax (a row sums to `1 - sink_mass`; a row with no allowed key is all zero).
    """

    scores: Float[Tensor, "batch head row key"]
    allowed: Bool[Tensor, "batch heads row key"]
    weights: Float[Tensor, "batch head row key"]
    sink_mass: Float[Tensor, "batch head row"]


def attention_rows(call: AttentionCall, positions: Int[Tensor, "batch row"]) -> Rows:
    """Attention rows of `call` at the query positions given for each sequence.

    Positions out of range raise `IndexError`. The weights are
    softmax(cap(q k^T · scale) + bias) over the allowed keys, with the sink's logit (when the
    kernel has one) in the denominator only.
    """
    scores = raw_scores(call, positions)
    allowed = allowed_rows(call, positions)
    forbidden = ~allowed
    scores = _forbid(scores, forbidden)
    if call.probabilities is not None:
        weights = _gather_queries(call.probabilities, positions).float()
        weights = weights.masked_fill(forbidden, 0.0)
        # A softmax that the model took over these very keys: no sink has a part in it.
        return Rows(scores, allowed, weights, weights.new_zeros(weights.shape[:3]))
    if call.sinks is None:
        weights = torch.softmax(scores, -1)
        empty = ~allowed.any(-1, keepdim=True)
        if empty.any():
            weights = weights.masked_fill(empty, 0.0)
        return Rows(scores, allowed, weights, scores.new_zeros(scores.shape[:3]))
    sink = call.sinks.float().reshape(1, -1, 1, 1).to(scores.device)
    weights = torch.softmax(
        torch.cat([scores, sink.expand(*scores.shape[:3], 1)], -1),
        -1,
    )
    return Rows(scores, allowed, weights[..., :-1], weights[..., -1])


def row_blocks(
    call: AttentionCall,
    positions: Int[Tensor, "batch row"],
    budget_bytes: int = DEFAULT_BUDGET,
) -> Iterator[tuple[slice, Rows]]:
    """The same rows in blocks, so that one block's scores stay under `budget_bytes`."""
    batch, heads, _, keys = call.shape
    one_row = max(1, batch * heads * keys * 4)
    size = max(1, budget_bytes // one_row)
    for start in range(0, positions.shape[1], size):
        block = slice(start, min(start + size, positions.shape[1]))
        yield block, attention_rows(call, positions[:, block])


def _forbid(
    scores: Float[Tensor, "batch head row key"], forbidden: Bool[Tensor, "batch heads row key"]
) -> Float[Tensor, "batch head row key"]:
    """Minus infinity where forbidden. Adding it is five times faster than filling, but only
    filling is right where a forbidden score is itself infinite or not a number."""
    if not forbidden.any():
        return scores
    minus = float("-inf")
    if not torch.isfinite(scores.sum()):
        return scores.masked_fill(forbidden, minus)
    wall = torch.zeros(forbidden.shape, device=scores.device).masked_fill_(forbidden, minus)
    return scores + wall


def raw_scores(
    call: AttentionCall, positions: Int[Tensor, "batch row"]
) -> Float[Tensor, "batch head row key"]:
    """Scaled, capped and biased scores in float32, nothing forbidden yet."""
    if call.probabilities is not None:
        source = call.raw_scores if call.raw_scores is not None else call.probabilities.log()
        return _gather_queries(source, positions).float()
    assert call.query is not None and call.key is not None
    batch, heads, _, _ = call.shape
    query = _gather_queries(call.query, positions).float() * call.scale
    key = call.key.float()
    groups = key.shape[1]
    query = query.reshape(batch, groups, heads // groups * positions.shape[1], -1)
    scores = (query @ key.transpose(-1, -2)).reshape(batch, heads, positions.shape[1], -1)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores = scores + _gather_queries(call.mask, positions).float()
    return scores


def allowed_rows(
    call: AttentionCall, positions: Int[Tensor, "batch row"]
) -> Bool[Tensor, "batch heads row key"]:
    """Which keys each chosen query may see; the head axis is 1 when all heads share it."""
    batch, _, queries, keys = call.shape
    device = positions.device
    allowed = torch.ones(batch, 1, positions.shape[1], keys, dtype=torch.bool, device=device)
    if call.causal:
        # Kernels align the causal triangle to the top left: query i sees keys 0..i.
        steps = torch.arange(keys, device=device)
        allowed = allowed & (steps <= positions[:, None, :, None])
    if call.mask is not None:
        rows = _gather_queries(call.mask, positions)
        allowed = allowed & (rows if rows.dtype == torch.bool else rows > FORBIDDEN)
    if call.probabilities is not None and call.raw_scores is not None:
        # The mask is in the scores already: a forbidden key is far below zero and below the top.
        rows = _gather_queries(call.raw_scores, positions).float()
        top = rows.nan_to_num(nan=0.0).amax(-1, keepdim=True)
        far = (rows <= FORBIDDEN) & (rows - top <= FORBIDDEN)
        allowed = allowed & ~(far | (rows == float("-inf")))
    return allowed


def _gather_queries(tensor: Tensor, positions: Int[Tensor, "batch row"]) -> Tensor:
    """Rows of a (batch|1, head|1, query|1, …) tensor at the given query positions."""
    batch, rows = positions.shape
    positions = positions.to(tensor.device)
    if tensor.shape[2] == 1:
        return tensor.expand(batch, -1, rows, -1)
    if rows == tensor.shape[2] and tensor.shape[0] in (1, batch) and _is_all(positions):
        return tensor.expand(batch, -1, -1, -1)
    tensor = tensor.expand(batch, *tensor.shape[1:])
    index = torch.arange(batch, device=tensor.device)[:, None]
    # (batch, row, head, last) after advanced indexing over axes 0 and 2.
    return tensor.transpose(1, 2)[index, positions].transpose(1, 2)


def _is_all(positions: Int[Tensor, "batch row"]) -> bool:
    steps = torch.arange(positions.shape[1], device=positions.device)
    return bool((positions == steps).all())
