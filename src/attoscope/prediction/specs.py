"""What the readings of the prediction are called, mean, and are compared with."""

from __future__ import annotations

from attoscope.measures.base import Spec

PAPER = "Dovonon et al. 2024 (arXiv 2401.04301)"
_OWN = f"attoscope's own, after {PAPER}"
_MAP = (
    "The map is value weight times output weight, with the gain of the norm in front folded in, "
    "divided by the size of the tokens that the norm sees; biases have no part in it."
)
_RANDOM = "random Gaussian maps of the same norms, in closed form"
_UNIFORM = "attention that weighs all keys alike"
_NO_MAP = "no square value-output map or no square attention map"
_TWO = "fewer than two content tokens"
_RATIO = (
    "Change of the logarithm of the high over low frequencies of the content tokens: below 0 they "
    "become more alike, above 0 less. "
)

HEADS: tuple[Spec, ...] = (
    Spec(
        name="smoothing_margin",
        title="Smoothing margin",
        meaning="ln(p / o): p is the largest |1 + lambda| over eigenvalues lambda of the "
        "value-output map, o the largest |1 + a lambda| over eigenvalues a of the attention map "
        "other than 1. Above 0 the head alone, repeated, makes all tokens equal; below 0 it does "
        "not; it takes about 1 / margin layers.",
        unit="nats",
        range=(None, None),
        source=f"{PAPER}, dominating eigenvalue",
        null="random_margin",
        null_meaning=_RANDOM,
        missing=_NO_MAP,
    ),
    Spec(
        name="smoothing_margin_without_gain",
        title="Smoothing margin, without the norm's gain",
        meaning="The same with the gain of the norm in front left out. Where the sign differs, the "
        "gain decides whether the head smooths.",
        unit="nats",
        range=(None, None),
        source=f"{PAPER}, sign of LayerNorm weights",
        missing="no norm in front of attention",
    ),
    Spec(
        name="map_largest",
        title="Largest eigenvalue of the value-output map",
        meaning=f"Largest real part. Positive: what the head reads along it is added to. {_MAP}",
        unit="",
        range=(None, None),
        source=PAPER,
        null="random_largest",
        null_meaning=_RANDOM,
        missing=_NO_MAP,
    ),
    Spec(
        name="map_smallest",
        title="Smallest eigenvalue of the value-output map",
        meaning="Smallest real part. Negative: what the head reads along it is taken away, and the "
        f"mean of the tokens more than their differences. {_MAP}",
        unit="",
        range=(None, None),
        source=PAPER,
        null="random_smallest",
        null_meaning=_RANDOM,
        missing=_NO_MAP,
    ),
    Spec(
        name="map_positive_share",
        title="Positive eigenvalues of the value-output map",
        meaning="Share of the eigenvalues (as many as the head is wide) with a positive real part: "
        "1 all smooth, 0 none.",
        unit="share",
        range=(0.0, 1.0),
        source=PAPER,
        null="half",
        null_meaning=_RANDOM,
        missing=_NO_MAP,
    ),
    Spec(
        name="map_asymmetry",
        title="Asymmetry of the value-output map",
        meaning="||H - H^T|| / ||H||, Frobenius: 0 for a symmetric map, whose eigenvalues are "
        "real, 1.41 for one that has nothing to do with its transpose, 2 at most.",
        unit="",
        range=(0.0, 2.0),
        source=f"{_OWN} (normalisation ours)",
        null="random_asymmetry",
        null_meaning=_RANDOM,
        missing=_NO_MAP,
    ),
    Spec(
        name="attention_second",
        title="Second eigenvalue of the attention map",
        meaning="Second-largest modulus of its eigenvalues, of which the largest is 1: near 0 one "
        "step makes all tokens alike, near 1 nothing is mixed. Of causal attention the eigenvalues "
        "are the diagonal: what tokens give to themselves.",
        unit="",
        range=(0.0, 1.0),
        source=PAPER,
        null="uniform_second",
        null_meaning=_UNIFORM,
        missing=_NO_MAP,
    ),
    Spec(
        name="attention_smallest",
        title="Smallest eigenvalue of the attention map",
        meaning="Smallest real part. Below 0 a difference between tokens turns its sign.",
        unit="",
        range=(-1.0, 1.0),
        source=PAPER,
        null="uniform_smallest",
        null_meaning=_UNIFORM,
        missing=_NO_MAP,
    ),
    Spec(
        name="head_step",
        title="What a head's update does to likeness",
        meaning=f"{_RATIO}From the stream to the stream plus what this head alone adds.",
        unit="nats",
        range=(None, None),
        source=f"{_OWN}, high over low frequencies as in arXiv 2203.05962",
        null="random_step",
        null_meaning="random maps of the same norms, with the same attention maps, in closed form",
        missing=_TWO,
    ),
)
LAYERS: tuple[Spec, ...] = (
    Spec(
        name="attention_step",
        title="What attention does to likeness",
        meaning=f"{_RATIO}From the stream to the stream plus attention's update.",
        unit="nats",
        range=(None, None),
        source=f"{_OWN}, high over low frequencies as in arXiv 2203.05962",
        null="random_attention_step",
        null_meaning="random maps of the same norms, with the same attention maps, in closed form",
        missing=_TWO,
    ),
    Spec(
        name="rest_step",
        title="What the rest of the block does to likeness",
        meaning=f"{_RATIO}From the stream plus attention's update to what leaves the block: the "
        "MLP, and norms behind.",
        unit="nats",
        range=(None, None),
        source=f"{_OWN}, high over low frequencies as in arXiv 2203.05962",
        missing=_TWO,
    ),
)
DC_SHARE: tuple[Spec, ...] = (
    Spec(
        name="layer_dc_share",
        title="Constant share of the layer's leading eigenvector",
        meaning="All heads of a layer at once: the share of the leading eigenvector of "
        "X + sum A_h X H_h that is equal in all tokens. 1: the layer, repeated, makes all tokens "
        "equal; near the null: what wins is differences.",
        unit="share",
        range=(0.0, 1.0),
        source=f"{_OWN}, exact for several heads",
        null="one_over_tokens",
        null_meaning="a random vector: one over the number of tokens",
        missing="not computed for this document",
    ),
)
POINTS: tuple[Spec, ...] = (
    Spec(
        name="attention_only_frequency_ratio",
        title="High over low frequencies, attention alone",
        meaning="The stream carried forward by attention alone: the model's own input, attention "
        "maps and value-output maps, no MLP and no bias. Norm of what differs between content "
        "tokens over the norm of their mean.",
        unit="ratio",
        range=(0.0, None),
        source=_OWN,
        null="random_frequency_ratio",
        null_meaning="the same with one draw of random maps of the same norms",
        missing=_TWO,
    ),
    Spec(
        name="model_frequency_ratio",
        title="High over low frequencies, the whole model",
        meaning="What the model really did with the same documents.",
        unit="ratio",
        range=(0.0, None),
        source="Wang et al. 2022 (arXiv 2203.05962), high over low frequencies",
        missing=_TWO,
    ),
    Spec(
        name="attention_only_cosine",
        title="Mean cosine between tokens, attention alone",
        meaning="The same stream as in attention_only_frequency_ratio. 1: all content tokens point "
        "the same way.",
        unit="cosine",
        range=(-1.0, 1.0),
        source=_OWN,
        null="random_cosine",
        null_meaning="the same with one draw of random maps of the same norms",
        missing=_TWO,
    ),
    Spec(
        name="model_cosine",
        title="Mean cosine between tokens, the whole model",
        meaning="What the model really did with the same documents.",
        unit="cosine",
        range=(-1.0, 1.0),
        source="Gong et al. 2021 (arXiv 2104.12753)",
        missing=_TWO,
    ),
)
