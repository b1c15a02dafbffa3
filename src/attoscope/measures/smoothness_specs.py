"""What the smoothness readings are called, mean, and are compared with."""

from __future__ import annotations

from attoscope.measures.base import Spec

_CONTENT = (
    "Over content tokens: padding, the first token and special tokens are left out, "
    "because one token with a massive norm would speak for all."
)
_SAMPLED = (
    "Computed on a sample of at most 128 content tokens per text unless all rows were "
    "asked for (padding, first and special tokens left out)."
)
_TWO = "fewer than two content tokens"
_TWO_ALL = "fewer than two tokens"
_GONG = "Gong et al. 2021 (arXiv 2104.12753)"
_WANG = "Wang et al. 2022 (arXiv 2203.05962), high over low frequencies"

SPECS: tuple[Spec, ...] = (
    Spec(
        name="cosine",
        title="Mean cosine between tokens",
        meaning=f"1: all tokens point the same way; 0: no common direction. {_CONTENT}",
        unit="cosine",
        range=(-1.0, 1.0),
        source=_GONG,
        missing=_TWO,
    ),
    Spec(
        name="cosine_all",
        title="Mean cosine between tokens, all of them",
        meaning="The same over all valid tokens, first and special ones included. Where it "
        "parts from the other, those tokens live elsewhere than the content.",
        unit="cosine",
        range=(-1.0, 1.0),
        source=_GONG,
        missing=_TWO_ALL,
    ),
    Spec(
        name="absolute_cosine",
        title="Mean absolute cosine between tokens",
        meaning="1: all tokens lie on one line through the origin, whatever their sign (rank "
        f"one); the signed cosine misses this when signs are mixed. {_SAMPLED}",
        unit="cosine",
        range=(0.0, 1.0),
        source=f"{_GONG}, later version",
        null="absolute_cosine_random",
        null_meaning="random directions in as many dimensions",
        missing=_TWO,
    ),
    Spec(
        name="frequency_ratio",
        title="High over low frequencies",
        meaning="Norm of what differs between tokens over the norm of their mean; 0 when all "
        f"tokens are equal, large when they have little in common. {_CONTENT}",
        unit="ratio",
        range=(0.0, None),
        source=_WANG,
        missing=_TWO,
    ),
    Spec(
        name="frequency_ratio_all",
        title="High over low frequencies, all tokens",
        meaning="The same over all valid tokens: a single massive first token raises it "
        "and says nothing of the rest.",
        unit="ratio",
        range=(0.0, None),
        source=_WANG,
        missing=_TWO_ALL,
    ),
    Spec(
        name="dirichlet_energy",
        title="Dirichlet energy",
        meaning="Share of the tokens' energy that is difference between them (uniform weights, "
        f"divided by the whole energy): 0 when all tokens are equal. {_CONTENT}",
        unit="share",
        range=(0.0, 1.0),
        source="Nguyen et al. 2023, NeuTRENO (arXiv 2312.00751), nonlocal functional",
        missing=_TWO,
    ),
    Spec(
        name="rank_one_residual",
        title="Residual after rank one",
        meaning="Share (in norm) of the tokens that the best rank-one matrix leaves out: "
        f"0 when all lie on one line, even with different lengths and signs. {_SAMPLED}",
        unit="share",
        range=(0.0, 1.0),
        source="Dong et al. 2021 (arXiv 2103.03404), with the Frobenius norm",
        missing=_TWO,
    ),
    Spec(
        name="effective_rank",
        title="Effective rank",
        meaning="How many directions the tokens use: exp of the entropy of their singular "
        f"values, without centring. 1 at rank collapse. {_SAMPLED}",
        unit="directions",
        range=(1.0, None),
        source="Roy and Vetterli 2007, effective rank",
        missing=_TWO,
    ),
    Spec(
        name="effective_rank_share",
        title="Effective rank, share of the possible",
        meaning="Effective rank over the most that it could be, the smaller of the number of "
        f"tokens looked at and the width. {_SAMPLED}",
        unit="share",
        range=(0.0, 1.0),
        source="Roy and Vetterli 2007, effective rank",
        missing=_TWO,
    ),
)
