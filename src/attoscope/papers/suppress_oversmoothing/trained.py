"""Vision transformers trained with the three losses, alone and together."""

from __future__ import annotations

import numpy as np

from attoscope.papers.base import Control, Evidence, Fails, Run
from attoscope.papers.digits_evidence import (
    SETTING,
    figure,
    last,
    other_seed,
    table,
    trained,
)
from attoscope.papers.digits_vit import Item
from attoscope.papers.suppress_oversmoothing._paper import PAPER

HALF, LESS = 0.5, 0.7
# Weight 1 for every loss; a loss on patch labels needs images that are cut, and so does what it is
# compared with.
PLAIN, CUTMIX, COSINE, CONTRASTIVE, MIXING, ALL = (
    "plain", "CutMix", "cosine loss", "contrastive loss", "mixing loss", "all three losses"
)  # fmt: skip
RECIPES: dict[str, Item] = {
    PLAIN: {},
    COSINE: {"losses": {"cosine": 1.0}},
    CONTRASTIVE: {"losses": {"contrastive": 1.0}},
    CUTMIX: {"cutmix": True},
    MIXING: {"cutmix": True, "losses": {"mixing": 1.0}},
    ALL: {"cutmix": True, "losses": {"cosine": 1.0, "contrastive": 1.0, "mixing": 1.0}},
}
BASELINE = {COSINE: PLAIN, CONTRASTIVE: PLAIN, MIXING: CUTMIX, ALL: CUTMIX}
SAME = "the same model from another seed in place of the loss"


@PAPER.claim(
    name="cosine-loss",
    statement="A penalty on the cosine of patches keeps the patches of the last block distinct.",
    source="The patch-wise cosine loss",
    criterion=f"with every seed the mean cosine is below {HALF} of that without the loss "
    f"({SETTING}; absolute cosine, weight 1)",
)
def cosine_loss_claim(run: Run) -> Evidence:
    return _compare(run, COSINE, HALF)


@PAPER.claim(
    name="contrastive-loss",
    statement="A contrastive loss that ties each last patch to its own early one keeps the patches "
    "of the last block from pointing the same way.",
    source="The patch-wise contrastive loss",
    criterion=f"with every seed the mean cosine is below {HALF} of that without the loss; absolute "
    f"cosine and rank are reported, and need not improve ({SETTING}; normalised, weight 1)",
)
def contrastive_loss_claim(run: Run) -> Evidence:
    return _compare(run, CONTRASTIVE, HALF)


@PAPER.claim(
    name="all-three-losses",
    statement="The three losses together keep the patches of the last block distinct.",
    source="The training objective, the sum of all losses",
    criterion=f"with every seed the mean cosine is below {LESS} of that of a model trained with "
    f"CutMix alone ({SETTING}; weights 1)",
)
def all_three_losses(run: Run) -> Evidence:
    return _compare(run, ALL, LESS)


@PAPER.claim(
    name="each-loss-alone",
    statement="Each of the three losses lowers the similarity of patches by itself.",
    source="What the paper's three losses are introduced for",
    criterion=f"for each loss, with every seed, the mean cosine is below {LESS} of that without "
    f"the loss; for patch mixing, of a model trained with CutMix alone ({SETTING})",
    expected=Fails(
        "patch mixing raises it: within an image all patches of a region share one label, so the "
        "loss pulls them together",
        "vision transformers on handwritten digits, each loss alone",
    ),
)
def each_loss_alone(run: Run) -> Evidence:
    names = (COSINE, CONTRASTIVE, MIXING)
    found = trained(run, {name: RECIPES[name] for name in (PLAIN, CUTMIX, *names)})
    ratios = {name: last(found, name) / last(found, BASELINE[name]) for name in names}
    seeds = np.concatenate([other_seed(found, PLAIN), other_seed(found, CUTMIX)])
    return Evidence(
        measured={f"ratio {name}": ratio for name, ratio in ratios.items()},
        holds=all((ratio < LESS).all() for ratio in ratios.values()),
        control=Control(SAME, {"ratios": seeds}, fails=bool((seeds >= LESS).all())),
        figure=figure(found),
        table=table(found),
    )


def _compare(run: Run, name: str, limit: float) -> Evidence:
    """A loss against its baseline; what must not pass: another seed, and patch mixing alone."""
    base = BASELINE[name]
    chosen = dict.fromkeys((base, name, CUTMIX, MIXING))
    found = trained(run, {each: RECIPES[each] for each in chosen})
    ratio = last(found, name) / last(found, base)
    seeds, mixing = other_seed(found, base), last(found, MIXING) / last(found, CUTMIX)
    shown = {each: found[each] for each in (base, name)}
    return Evidence(
        measured={
            "ratio": ratio,
            "cosine": last(found, name),
            "cosine_without": last(found, base),
            "absolute_cosine": last(found, name, "absolute_cosine"),
            "absolute_cosine_without": last(found, base, "absolute_cosine"),
            "effective_rank": last(found, name, "effective_rank"),
            "effective_rank_without": last(found, base, "effective_rank"),
        },
        holds=bool((ratio < limit).all()),
        control=Control(
            f"{SAME}; and patch mixing alone",
            {"ratio_another_seed": seeds, "ratio_mixing": mixing},
            fails=bool((seeds >= limit).all() and (mixing >= limit).all()),
        ),
        figure=figure(shown),
        table=table(found),
    )
