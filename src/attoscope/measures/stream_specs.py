"""What the readings of the residual stream are called, mean, and are compared with."""

from __future__ import annotations

from attoscope.measures.base import Spec

_NO_CONTENT = "no content token (all are first or special)"
_CONTENT = "Over content tokens (padding, first and special tokens left out)."

POINT_SPECS: tuple[Spec, ...] = (
    Spec(
        name="non_finite",
        title="Values that are not finite",
        meaning="Share of the stream's values that are NaN or infinite. Anything but 0 is a "
        "fault; nothing else can be read there.",
        unit="share",
        range=(0.0, 1.0),
        source="attoscope's own check",
    ),
    Spec(
        name="norm",
        title="Norm of the stream",
        meaning=f"Mean length of a token's vector. {_CONTENT}",
        unit="norm",
        range=(0.0, None),
        source="Kedia et al. 2024, DeepScaleLM (arXiv 2403.09635), moments along depth",
        missing=_NO_CONTENT,
    ),
    Spec(
        name="variance",
        title="Variance of the stream",
        meaning="Variance over the width of a token's vector; without a norm in between "
        f"it adds up block by block. {_CONTENT}",
        unit="variance",
        range=(0.0, None),
        source="Liu et al. 2020, Admin (arXiv 2004.08249), variance of residual branches",
        missing=_NO_CONTENT,
    ),
    Spec(
        name="massive_activation",
        title="Massive activations",
        meaning="Largest |activation| over the median one, all valid tokens. A thousand "
        "and more is what is called massive; quantisation and half precision suffer from "
        "it. The median is taken over at most 32 tokens per text.",
        unit="ratio",
        range=(1.0, None),
        source="Sun et al. 2024 (arXiv 2402.17762)",
        missing="the median activation is 0",
    ),
    Spec(
        name="token_norm_ratio",
        title="Longest token over the median one",
        meaning="Norm of the longest token over the median token's. Far above 1, one token "
        "(often the first) carries a stream of its own.",
        unit="ratio",
        range=(1.0, None),
        source="Sun et al. 2024 (arXiv 2402.17762)",
        missing="the median token has norm 0",
    ),
    Spec(
        name="channel_share",
        title="Share of the largest channel",
        meaning="Share of a token's energy that sits in the one channel that has most over "
        "the whole document, mean over tokens. Above one half it outweighs all others "
        f"together. {_CONTENT}",
        unit="share",
        range=(0.0, 1.0),
        source="Kovaleva et al. 2021 (arXiv 2105.06990), outlier dimensions",
        null="channel_even",
        null_meaning="energy spread evenly over the width",
        missing=_NO_CONTENT,
    ),
)

BLOCK_SPECS: tuple[Spec, ...] = (
    Spec(
        name="growth",
        title="Growth per block",
        meaning="Mean norm of the stream after a block over the mean norm before it; 1 when it "
        f"leaves it as long as it was. {_CONTENT}",
        unit="ratio",
        range=(0.0, None),
        source="Kedia et al. 2024, DeepScaleLM (arXiv 2403.09635)",
        missing=_NO_CONTENT,
    ),
    Spec(
        name="update_ratio",
        title="Update per block",
        meaning="Mean norm of what a block changes over the mean norm of the stream before it; "
        f"near 0 the block does nothing. {_CONTENT}",
        unit="ratio",
        range=(0.0, None),
        source="Liu et al. 2020, Admin (arXiv 2004.08249), dependency on the residual branch",
        missing=_NO_CONTENT,
    ),
)
