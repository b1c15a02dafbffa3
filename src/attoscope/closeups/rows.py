"""Rows of one attention call, ranked by what they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attoscope.diagnosis import Mark
from attoscope.measures.base import content_tokens, first_tokens
from attoscope.trace import AttentionCall, Layer, Rows, row_blocks

DOCUMENTS = 3
# Of a longer sequence, such as the patches of an image, so many queries are looked at.
QUERIES = 64
RIVALS = 3
# A row had something to choose from only with this many keys.
LEAST_CHOICE = 4
_LAST = 1e6

Score = Float[Tensor, "sequence row"]


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of the first sequences of a call, with what kind of token each key is.

    `asks` marks rows of content tokens, `real` those that are not padding.
    """

    call: AttentionCall
    layer: Layer
    rows: Rows
    positions: Int[Tensor, "sequence row"]
    asks: Bool[Tensor, "sequence row"]
    real: Bool[Tensor, "sequence row"]
    content: Bool[Tensor, "sequence key"]
    first: Bool[Tensor, "sequence key"]
    special: Bool[Tensor, "sequence key"]

    @property
    def own(self) -> bool:
        """Whether queries and keys are the same tokens."""
        return not reads_another(self.call)

    def weights(self, head: int) -> Float[Tensor, "sequence row key"]:
        """The weights of a head, 0 where they are no number."""
        return self.rows.weights[: len(self.positions), head].double().nan_to_num()

    def allowed(self, head: int) -> Bool[Tensor, "sequence row key"]:
        """Which keys each row of a head may choose."""
        shared = self.rows.allowed.shape[1] == 1
        return self.rows.allowed[: len(self.positions), 0 if shared else head]

    def ranked(self, score: Score, head: int) -> Score:
        """The score, so that rows with little choice or of other tokens come after all others,
        and padding never."""
        much = self.allowed(head).sum(-1) >= LEAST_CHOICE
        score = score.double() - _LAST * (~self.asks).double() - _LAST * (~much).double()
        return score.masked_fill(~self.real, -math.inf)

    def is_distant(self, sequence: int, query: int, key: int) -> bool:
        """Whether the key is a content token of the same text and no neighbour of the query."""
        return self.own and abs(query - key) > 1 and bool(self.content[sequence, key])

    def marks(
        self, sequence: int, head: int, row: int
    ) -> tuple[tuple[Mark, ...], float | None]:
        """The chosen key, its strongest competitors, and the attention on all others.

        Nothing and None where no weight is a number.
        """
        weights = self.rows.weights[sequence, head, row].double()
        scores = self.rows.scores[sequence, head, row].double()
        seen = self.allowed(head)[sequence, row] & torch.isfinite(weights)
        if not seen.any():
            return (), None
        # By the scores, since weights far below the first are all zero.
        rank = torch.where(seen, scores, -math.inf).nan_to_num(nan=-math.inf)
        order = [int(i) for i in rank.argsort(descending=True, stable=True)[: RIVALS + 1]]
        order = [i for i in order if seen[i]]
        scored = self.call.probabilities is None or self.call.raw_scores is not None
        gaps = [float(scores[order[0]] - scores[i]) for i in order]
        marks = tuple(
            Mark(i, float(weights[i]), gap if scored and math.isfinite(gap) else None)
            for i, gap in zip(order, gaps, strict=True)
        )
        return marks, max(0.0, 1.0 - sum(mark.value for mark in marks))


def reads_another(call: AttentionCall) -> bool:
    """Whether the keys of a call are other tokens than its queries."""
    return call.shape[2] != call.shape[3] or call.site.call.startswith("cross")


def blocks(call: AttentionCall, layer: Layer) -> Iterator[Block]:
    """The rows of a call that are looked at, in blocks that fit into memory."""
    batch, _, queries, keys = call.shape
    steps = torch.linspace(0, queries - 1, min(queries, QUERIES), device=layer.valid.device)
    positions = steps.round().long().expand(batch, -1)
    content = content_tokens(layer)
    valid, special, choices = layer.valid, layer.special, content
    if reads_another(call):
        every = torch.ones(batch, keys, dtype=torch.bool, device=layer.valid.device)
        valid = every if layer.key_valid is None else layer.key_valid
        special = ~every if layer.key_special is None else layer.key_special
        choices = valid & ~special & ~first_tokens(valid)
    for block, rows in row_blocks(call, positions):
        at = positions[:DOCUMENTS, block]
        yield Block(
            call, layer, rows, at,
            content[:DOCUMENTS].gather(1, at), layer.valid[:DOCUMENTS].gather(1, at),
            choices[:DOCUMENTS], first_tokens(valid)[:DOCUMENTS], special[:DOCUMENTS],
        )  # fmt: skip


def telling(block: Block, head: int) -> Score:
    """The largest weight on a distant content key; rows without one come after the others."""
    weights = block.weights(head)
    fit = block.content[:, None].expand(weights.shape)
    if block.own:
        steps = torch.arange(weights.shape[-1], device=weights.device)
        fit = fit & ((block.positions[..., None] - steps).abs() > 1)
    most = (weights * fit).amax(-1)
    return block.ranked(torch.where(most > 0, most, weights.amax(-1) - 2), head)


def _first(block: Block, head: int) -> Score:
    return block.ranked((block.weights(head) * block.first[:, None]).sum(-1), head)


def _special(block: Block, head: int) -> Score:
    keys = block.special & ~block.first
    return block.ranked((block.weights(head) * keys[:, None]).sum(-1), head)


def _decided(block: Block, head: int) -> Score:
    """Top score minus the runner-up's."""
    scores = block.rows.scores[: len(block.positions), head].nan_to_num(nan=-math.inf)
    top = scores.topk(min(2, scores.shape[-1]), -1).values
    gap = (top[..., 0] - top[..., -1]).nan_to_num(nan=-1.0, posinf=-1.0)
    return block.ranked(gap, head)


def _broken(block: Block, head: int) -> Score:
    """How many weights are no finite number."""
    lost = ~torch.isfinite(block.rows.weights[: len(block.positions), head])
    return lost.sum(-1).double().masked_fill(~block.real, -math.inf)


Criterion = Callable[[Block, int], Score]
_CRITERIA: dict[str, tuple[str, Criterion]] = {
    "first_share": ("with most attention on the first token", _first),
    "special_share": ("with most attention on special tokens but the first", _special),
    "non_finite_rows": ("with most weights that are no finite number", _broken),
}
_DECIDED: tuple[str, Criterion] = ("where the chosen token leads by most", _decided)


def criterion(reading: str) -> tuple[str, Criterion]:
    """How rows are ranked to show a finding from this reading: in words, and as a function."""
    return _CRITERIA.get(reading, _DECIDED)
