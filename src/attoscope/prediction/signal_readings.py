"""The cheap part of signal propagation, for every diagnosis: the stream's variance by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attoscope.errors import AttoscopeError
from attoscope.measures.base import Reading
from attoscope.measuring import Span
from attoscope.prediction.branch_weights import WeightReader
from attoscope.prediction.chain import Pair, forecast
from attoscope.prediction.initialisers import layer_ends
from attoscope.prediction.signal import length_of
from attoscope.prediction.smoothing import cut_all
from attoscope.prediction.stream_moments import Measured, measure
from attoscope.trace.subject import Subject
from attoscope.trace.sublayers import find_sublayers
from attoscope.trace.types import Batch

DOCUMENTS, TOKENS = 4, 16
# Entries of each matrix that are looked at: enough for a variance to 1 %.
_ENTRIES = 2**14
_SOURCE = "DeepScaleLM (arXiv 2403.09635), with measured weight variances"
_FORESEEN = (
    "what the theory of random weights foresees from the variances of the model's weights"
)


def signal_readings(
    subject: Subject,
    batches: Sequence[Batch],
    *,
    layers: Span = None,
    documents: int = DOCUMENTS,
) -> tuple[Reading, ...]:
    """Variance and token correlation behind each layer, the predicted ones as their nulls.

    Reads the first documents, cut to 16 tokens, forward only. Gives none where no residual branch
    is recognised; where the theory has nothing for a stack its null is NaN.
    """
    try:
        parts = cut_all(subject, batches, documents, TOKENS)
        found = find_sublayers(subject, parts[0])
        if not found.sublayers:
            return ()
        measured = measure(subject, parts, found.sublayers, gradients=False)
    except AttoscopeError:
        return ()
    reader = WeightReader(subject, parts[0], _ENTRIES)
    rows: list[tuple[str, float, float, Pair]] = []
    why = ""
    for stack in subject.layout(parts[0]).stacks:
        mine = [one for one in measured if one.sublayer.site.stack == stack.name]
        if not mine:
            continue
        length = length_of(parts, stack.length, stack.name in subject.layout(parts[0]).readers)
        told, reason = _told(reader, mine, length, stack.causal)
        why = why or reason
        for i in layer_ends([one.sublayer.site.layer for one in mine])[1]:
            layer = mine[i].sublayer.site.layer
            if layers is None or layers[0] <= layer < layers[1]:
                after = mine[i].after
                rows.append(
                    (f"{stack.name}.{layer}", after.variance, after.correlation, told[i])
                )
    return _readings(rows, why) if rows else ()


def _told(
    reader: WeightReader, mine: Sequence[Measured], length: int, causal: bool
) -> tuple[list[Pair], str]:
    """The predicted pair behind every sub-layer, or why there is none."""
    branches = [reader.read(one.sublayer) for one in mine]
    reason = next((f"{b.sublayer.site}: {b.reason}" for b in branches if b.reason), "")
    entering = mine[0].before
    if not reason and not (length > 1 and np.isfinite(entering.correlation)):
        reason = "what enters has no token correlation (one token, or numbers that are none)"
    if reason:
        return [Pair(np.nan, np.nan)] * len(mine), reason
    start = Pair(entering.variance / branches[0].skip ** 2, entering.correlation)
    curves = forecast(
        branches, start, Pair(1.0, 0.0), length=length, causal=causal, backward=False
    )
    return [one.after for one in curves], ""


def _readings(rows: Sequence[tuple[str, float, float, Pair]], why: str) -> tuple[Reading, ...]:
    places = tuple(row[0] for row in rows)
    reason = f"not predicted: {why}" if why else ""
    return (
        Reading(
            name="stream_variance", title="Variance of the stream",
            meaning="Variance of an entry over tokens and channels behind each layer (before a "
            "norm behind it). Far above what random weights of the same size would give: training "
            "has grown outlier channels, or branches that point the same way.",
            unit="", range=(0.0, None), dims=("layer",), coords={"layer": places},
            values=np.array([row[1] for row in rows]),
            null=np.array([row[3].variance for row in rows]),
            null_meaning=_FORESEEN, reason=reason, source=_SOURCE,
        ),
        Reading(
            name="token_correlation", title="Token correlation",
            meaning="Correlation of two tokens of a document at the same channel, behind each "
            "layer; one mean over everything is removed. 1: all tokens equal.",
            unit="", range=(-1.0, 1.0), dims=("layer",), coords={"layer": places},
            values=np.array([row[2] for row in rows]),
            null=np.array([row[3].correlation for row in rows]),
            null_meaning=_FORESEEN, reason=reason, source=_SOURCE,
        ),
    )  # fmt: skip
