"""What the smoothness readings give away: rules, with their thresholds and why these.

*Collapsed*: the rank-one residual is below 2^-7, the spacing of bfloat16 numbers at 1. What
tells tokens apart is then below the rounding of the format that most models run in. The limit
is far from anything that a working model shows; similar tokens (a high cosine) alone are no
fault: classification with mean pooling wants them. Where one channel drowns all others, every
token lies near that axis; the residual is then compared with what that channel leaves, sqrt(1
- its share), since the channel is a fault of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attoscope.measures.rules import Book, Rule
from attoscope.measures.words import Number

BF16_SPACING = 2.0**-7


def collapsed(book: Book) -> NDArray[np.bool_]:
    """Content tokens lie on one line through the origin, to within bfloat16."""
    reading = book.readings["rank_one_residual"]
    left = np.ones_like(reading.values)
    if "channel_share" in book.readings:
        left = np.sqrt(1 - np.nan_to_num(book.values("channel_share", like=reading)))
    return np.asarray(reading.values < BF16_SPACING * left)


def alike_or_on_a_line(book: Book, rows: Sequence[int]) -> str:
    """Which kind of collapse: all tokens equal, or of different lengths or signs."""
    differ = book.values("dirichlet_energy")[list(rows)]
    cosine = Number(float(np.nanmean(book.values("cosine")[list(rows)])))
    if np.nanmax(np.sqrt(differ)) < BF16_SPACING:
        return f"they are all but equal (mean cosine {cosine})"
    return f"they differ only in length or sign (mean cosine {cosine})"


RULES: tuple[Rule, ...] = (
    Rule(
        id="rank_collapse",
        title="Tokens collapsed onto one direction",
        severity="severe",
        reading="rank_one_residual",
        fires=collapsed,
        scope="run",
        worst="smallest",
        sentence="After {where}, content tokens can no longer be told apart: they lie on one "
        "line, off which is only {measured:percent} of their norm, and {extra}.",
        paper="Dong et al. 2021 (arXiv 2103.03404): rank collapse; Nguyen et al. 2023, "
        "NeuTRENO (arXiv 2312.00751); Dovonon et al. 2024 (arXiv 2401.04301)",
        remedy="Look at the first of these layers: a skip connection that is missing or "
        "scaled away, a norm whose weights are zero, or attention that averages "
        "everything. When training from scratch, scale residual branches by 1 / sqrt(2 × "
        "layers), tie values to those of the first layer (NeuTRENO), or penalise the mean "
        "cosine between tokens as here.",
        code="""\
import torch

hidden = model(**batch, output_hidden_states=True).hidden_states[-1][:, 1:]
unit = torch.nn.functional.normalize(hidden.float(), dim=-1)
n = unit.shape[1]
alike = (unit.sum(1).square().sum(-1) - n) / (n * (n - 1))  # mean cosine between tokens
loss = loss + 0.1 * alike.mean()
""",
        extra=alike_or_on_a_line,
    ),
)
