"""Which rows of attention to show of each head: only queries of content tokens count.

The most and the least decided one, judged on content alone, by the entropy over keys that are
neither the first nor special tokens: a head that rests on its sink is shown by what it does with
the rest. And the rows that rest most on the first token, and on special ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from attoscope.measures.base import Array, Witness, token_at
from attoscope.measures.rowstats import STATISTICS
from attoscope.trace.rows import Rows
from attoscope.trace.types import Batch

# A row had something to choose from only with this many content keys.
LEAST_CHOICE = 4
# Kind of witness: the statistic to look for, its sign, and among which keys (see `key_kinds`).
KINDS = {
    "decided": ("content_entropy", -1.0, 2),
    "undecided": ("content_entropy", 1.0, 2),
    "first": ("first_share", 1.0, 0),
    "special": ("special_share", 1.0, 1),
}


class RowPicker:
    """Keeps the best row of each kind and head over the blocks of one call."""

    def __init__(self, batch: Batch, asks: Bool[Tensor, "batch position"], heads: int) -> None:
        self.batch, self.asks = batch, asks
        documents = np.array(batch.documents)
        self.order = torch.from_numpy(np.argsort(documents, kind="stable"))
        self.documents = documents
        self.best = {kind: np.full((5, heads), -np.inf) for kind in KINDS}

    def look(
        self,
        block: slice,
        positions: Int[Tensor, "batch position"],
        rows: Rows,
        statistics: Float[Tensor, "statistic batch head row"],
        kinds: Float[Tensor, "batch kind key"],
    ) -> None:
        """Look through one block of rows, given their statistics and the kinds of their keys."""
        choice = (rows.allowed.float() @ kinds[:, None, 2, :, None])[..., 0] >= LEAST_CHOICE
        asks = self.asks[:, None, block]
        order = self.order.to(asks.device)
        here = positions[:, block]
        heads = torch.arange(statistics.shape[2], device=asks.device)
        for kind, (name, sign, among) in KINDS.items():
            statistic = sign * statistics[STATISTICS.index(name)]
            fit = asks & torch.isfinite(statistic) & (choice if among == 2 else True)
            score = torch.where(fit, statistic, -math.inf)[order]
            best, flat = score.transpose(0, 1).flatten(1).max(-1)
            sequence = order[flat // here.shape[1]]
            row = flat % here.shape[1]
            keys = kinds[sequence, among]
            weight, chosen = (rows.weights[sequence, heads, row] * keys).max(-1)
            found = (best, sequence, here[sequence, row], chosen, weight)
            self._keep(kind, torch.stack([f.double() for f in found]).cpu().numpy())

    def _keep(self, kind: str, found: Array) -> None:
        held = self.best[kind]
        if not np.isfinite(held[0]).any():
            self.best[kind] = found
            return
        mine, theirs = self._rank(found), self._rank(held)
        tie = found[0] == held[0]
        earlier = (mine[0] < theirs[0]) | ((mine[0] == theirs[0]) & (mine[1] < theirs[1]))
        self.best[kind] = np.where((found[0] > held[0]) | (tie & earlier), found, held)

    def _rank(self, rows: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        real = np.isfinite(rows[0])
        sequence = np.where(real, rows[1], 0).astype(np.int64)
        return self.documents[sequence].astype(np.float64), rows[2]

    def witnesses(
        self, beats: Callable[[str, int, float], bool]
    ) -> Iterator[tuple[str, int, Witness]]:
        """(kind, head, witness) of those whose score may beat what is held already."""
        for kind in KINDS:
            for head, (score, sequence, at, chosen, weight) in enumerate(self.best[kind].T):
                if not np.isfinite(score) or not beats(kind, head, float(score)):
                    continue
                row = int(sequence)
                yield (
                    kind,
                    head,
                    Witness(
                        value=float(weight),
                        score=float(score),
                        document=int(self.documents[row]),
                        position=int(at),
                        token=token_at(self.batch, row, int(at)),
                        chosen=int(chosen),
                        chosen_token=token_at(self.batch, row, int(chosen)),
                    ),
                )
