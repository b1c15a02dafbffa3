"""What the readings of attention are called, mean, and are compared with."""

from __future__ import annotations

from attoscope.measures.base import Spec

_TWO_KEYS = "fewer than two keys to choose from"

FINITE_SPECS: tuple[Spec, ...] = (
    Spec(
        name="non_finite_rows",
        title="Rows that are not finite",
        meaning="Share of query rows whose scores or weights hold NaN or infinity. "
        "Anything but 0 is a fault.",
        unit="share",
        range=(0.0, 1.0),
        source="attoscope's own check",
    ),
)

SPECS: tuple[Spec, ...] = (
    Spec(
        name="normalised_entropy",
        title="Normalised entropy",
        meaning="How evenly a query spreads its attention: entropy over ln(number of "
        "allowed keys). 1 is even over all keys (no choice), 0 is all on one key. "
        "Attention that goes to a sink term counts as not spent: what is left is made to "
        "sum to 1.",
        unit="share",
        range=(0.0, 1.0),
        source="Zhai et al. 2023 (arXiv 2303.06296), attention entropy",
        missing=_TWO_KEYS,
    ),
    Spec(
        name="effective_keys",
        title="Effective number of keys",
        meaning="exp(entropy): over how many keys a query spreads its attention. Compare with "
        "the length of the text: the same number says less in a short one.",
        unit="keys",
        range=(1.0, None),
        source="perplexity of the attention weights (exponential of the Shannon entropy)",
        missing=_TWO_KEYS,
    ),
    Spec(
        name="effective_keys_max",
        title="Effective number of keys, by the largest weight",
        meaning="1 / (largest weight): attention is spread over at least this many keys. It "
        "looks at the chosen key only and is never above the entropy's count.",
        unit="keys",
        range=(1.0, None),
        source="Renyi entropy of infinite order of the attention weights, exponentiated",
        missing="no allowed key",
    ),
    Spec(
        name="first_share",
        title="Attention on the first token",
        meaning="Share of the attention that goes to the first valid token. Far above the even "
        "share it is a sink: a place to put attention that is not needed.",
        unit="share",
        range=(0.0, 1.0),
        source="Xiao et al. 2023 (arXiv 2309.17453); Gu et al. 2024 (arXiv 2410.10781)",
        null="first_even",
        null_meaning="the first token's share if attention were even over the allowed keys",
        missing="no allowed key",
    ),
    Spec(
        name="special_share",
        title="Attention on special tokens",
        meaning="Share of the attention that goes to the tokenizer's own tokens (such as [CLS] "
        "and [SEP]), the first one included when it is special.",
        unit="share",
        range=(0.0, 1.0),
        source="Clark et al. 2019 (arXiv 1906.04341)",
        null="special_even",
        null_meaning="their share if attention were even over the allowed keys",
        missing="no allowed key",
    ),
    Spec(
        name="content_entropy",
        title="Normalised entropy on content",
        meaning="Entropy over content keys only, after the first and the special tokens "
        "are left out and the rest is made to sum to 1, over ln(number of those keys). "
        "Says how choosy a head is once its sink is taken away.",
        unit="share",
        range=(0.0, 1.0),
        source="Zhai et al. 2023 (arXiv 2303.06296), on content keys",
        missing="fewer than two content keys to choose from",
    ),
    Spec(
        name="margin",
        title="Score margin of the chosen key",
        meaning="Top score minus the runner-up's, before the softmax. The chosen key gets "
        "exp(margin) times the attention of the next. Compare with the null: random scores of "
        "the same spread have a margin, too.",
        unit="nats",
        range=(0.0, None),
        source="Tarzanagh et al. 2023 (arXiv 2308.16898): the margin that training widens",
        null="margin_random",
        null_meaning="expected margin of as many Gaussian scores with the row's own spread",
        missing=_TWO_KEYS,
    ),
    Spec(
        name="undecided",
        title="Undecided rows",
        meaning="Share of query rows whose top key gets less than twice the even share, 1 / "
        "(number of allowed keys); rows with fewer than three keys are left out.",
        unit="share",
        range=(0.0, 1.0),
        source="attoscope's own definition",
        missing="fewer than three keys to choose from",
    ),
    Spec(
        name="saturated",
        title="Saturated rows",
        meaning="Share of query rows whose runner-up gets less than 2^-24 of the chosen key's "
        "attention, the rounding of float32: no gradient passes to the scores.",
        unit="share",
        range=(0.0, 1.0),
        source="attoscope's own definition",
        missing=_TWO_KEYS,
    ),
    Spec(
        name="score_scale",
        title="Score scale",
        meaning="Standard deviation of a row's scores over its allowed keys. Near 0 the "
        "softmax is even; well above the freezing point it is all on one key and passes no "
        "gradient.",
        unit="nats",
        range=(0.0, None),
        source="freezing point sqrt(2 ln n): Derrida 1981, random energy model",
        null="freezing",
        null_meaning="freezing point: the spread sqrt(2 ln n) above which the softmax of n "
        "random scores rests on a few keys, however many there are",
        missing=_TWO_KEYS,
    ),
    Spec(
        name="sink_mass",
        title="Attention on a sink term",
        meaning="Share of the attention taken by a learned sink in the softmax's denominator, "
        "which belongs to no token. 0 where the kernel has none.",
        unit="share",
        range=(0.0, 1.0),
        source="OpenAI 2025, gpt-oss model card (arXiv 2508.10925)",
    ),
    Spec(
        name="head_write",
        title="Write of a head",
        meaning="Norm of what a head adds to the residual stream, relative to the norm of the "
        "stream before the layer. Heads that write next to nothing can be removed.",
        unit="ratio",
        range=(0.0, None),
        source="Kobayashi et al. 2020 (arXiv 2004.10102), norm-based analysis",
        missing="the stream has no length there",
    ),
)
