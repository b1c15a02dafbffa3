"""Deep untrained stacks: what the term does to cosine and rank, and what the anchor is for."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from attoscope.papers.base import Control, Evidence, Fails, Run
from attoscope.papers.neutreno._draws import seeds
from attoscope.papers.neutreno._paper import PAPER
from attoscope.prediction.stacks import untrained_stack

Array = NDArray[np.float64]
# Strength, and what the term pulls to.
Case = tuple[float, str]
NONE, FULL, ZERO, MEAN = (0.0, "first"), (0.6, "first"), (0.6, "zero"), (0.6, "mean")
RISING: tuple[Case, ...] = (NONE, (0.2, "first"), (0.4, "first"), FULL)
REVERSED: tuple[Case, ...] = ((-0.2, "first"), (-0.4, "first"), (-0.6, "first"))
NAMES = {NONE: "no term", FULL: "first values", ZERO: "zero", MEAN: "their mean"}
QUANTITIES = ("cosine", "frequency_ratio", "effective_rank")
DIVERSE, ALIKE = 0.2, 0.9
RICH, POOR = 15.0, 10.0
SETTING = "32 tokens, width 48, 3 heads, 48 pre-norm layers of attention alone, fresh weights"


def profile(item: dict[str, Any]) -> dict[str, Array]:
    """One stack's measures at its input and after each of its 48 layers."""
    found = untrained_stack(
        np.random.default_rng(item["seed"]),
        strength=item["strength"],
        anchor=item["anchor"],
        residual=item["residual"],
    )
    return {name: getattr(found, name) for name in QUANTITIES}


def stacks(
    run: Run, cases: tuple[Case, ...], *, residual: bool = True
) -> dict[Case, dict[str, Array]]:
    """Each case's measures, (seed, point); all cases share the weights of a seed."""
    drawn = seeds(run, quick=5, paper=100)
    items = [
        {"seed": seed, "strength": strength, "anchor": anchor, "residual": residual}
        for strength, anchor in cases
        for seed in drawn
    ]
    # One label for all claims: what another claim has measured is used again.
    results = run.map(profile, items, label="untrained stacks")
    found = {}
    for i, case in enumerate(cases):
        mine = results[i * len(drawn) : (i + 1) * len(drawn)]
        found[case] = {name: np.stack([each[name] for each in mine]) for name in QUANTITIES}
    return found


def at_the_end(found: dict[Case, dict[str, Array]], quantity: str) -> dict[Case, float]:
    """The mean over seeds after the last layer."""
    return {case: float(each[quantity][:, -1].mean()) for case, each in found.items()}


@PAPER.claim(
    name="cosine-falls-with-strength",
    statement="In a deep stack with a residual stream the term keeps tokens from becoming alike, "
    "the more the stronger it is.",
    source="Cosine similarity against depth; here in untrained attention",
    criterion="the mean cosine after 48 layers falls strictly from strength 0 over 0.2 and 0.4 to "
    f"0.6, from above {ALIKE} to below {DIVERSE} ({SETTING})",
)
def cosine_falls_with_strength(run: Run) -> Evidence:
    found = stacks(run, RISING + REVERSED)
    cosine = at_the_end(found, "cosine")
    mine = np.array([cosine[case] for case in RISING])
    turned = [cosine[case] for case in REVERSED]
    return Evidence(
        measured={"cosine_at_0_0.2_0.4_0.6": mine, "seeds": len(found[FULL]["cosine"])},
        holds=bool((np.diff(mine) < 0).all() and mine[0] > ALIKE and mine[-1] < DIVERSE),
        control=Control(
            "the sign of the term reversed: strengths -0.2, -0.4 and -0.6",
            {"cosine": turned},
            fails=min(turned) >= DIVERSE,
        ),
        figure=_curves(
            {f"{case[0]:g}": each["cosine"] for case, each in found.items()},
            "strength",
            "mean cosine of tokens",
        ),
        table=_table(found),
    )


@PAPER.claim(
    name="anchor-keeps-rank",
    statement="Without a residual stream it is the anchor that keeps the tokens' rank: the term "
    "with nothing to pull to, or with the mean of the first values, loses it.",
    source="The choice f = v^0 of the fidelity term; derived here",
    criterion=f"at strength 0.6 the mean effective rank after 48 layers is at least {RICH:g} with "
    f"the first values as the anchor, at most {POOR:g} with zero and with their mean, and 1 within "
    f"1e-6 without the term ({SETTING}, no residual stream)",
)
def anchor_keeps_rank(run: Run) -> Evidence:
    found = stacks(run, (NONE, FULL, ZERO, MEAN), residual=False)
    rank, cosine = at_the_end(found, "effective_rank"), at_the_end(found, "cosine")
    each = {NAMES[case]: values["effective_rank"][:, -1] for case, values in found.items()}
    return Evidence(
        measured={
            "seeds": len(each["zero"]),
            "effective_rank": {NAMES[case]: value for case, value in rank.items()},
            "least": {name: values.min() for name, values in each.items()},
            "largest": {name: values.max() for name, values in each.items()},
        },
        holds=rank[FULL] >= RICH
        and max(rank[ZERO], rank[MEAN]) <= POOR
        and abs(rank[NONE] - 1.0) <= 1e-6,
        control=Control(
            "zero in place of the first values, whose cosine is as low: cosine would not tell",
            {
                "effective_rank": rank[ZERO],
                "cosine": cosine[ZERO],
                "cosine_first_values": cosine[FULL],
            },
            fails=rank[ZERO] < RICH,
        ),
        figure=_curves(
            {NAMES[case]: values["effective_rank"] for case, values in found.items()},
            "anchor",
            "effective rank of the tokens",
        ),
        table=_table(found),
    )


@PAPER.claim(
    name="anchor-lowers-cosine",
    statement="It is the anchor, the pull towards the first values, that lowers the cosine.",
    source="What a comparison of cosines against depth is taken to show",
    criterion=f"at strength 0.6 the mean cosine after 48 layers is below {DIVERSE} with the first "
    f"values as the anchor, and at least {DIVERSE} with zero in their place ({SETTING})",
    expected=Fails(
        "subtracting the layer's own values lowers the cosine as much: A - strength I no longer "
        "favours equal tokens, whatever is added; so a test on cosine alone does not prove the "
        "anchor, whose part is the rank (anchor-keeps-rank)",
        "untrained and trained stacks with zero in place of the first values",
    ),
)
def anchor_lowers_cosine(run: Run) -> Evidence:
    found = stacks(run, (NONE, FULL, ZERO, MEAN))
    bare = stacks(run, (FULL, ZERO), residual=False)
    cosine, without = at_the_end(found, "cosine"), at_the_end(bare, "cosine")
    rank = at_the_end(found, "effective_rank")
    fall = cosine[NONE] - cosine[FULL]
    return Evidence(
        measured={
            "cosine": {NAMES[case]: value for case, value in cosine.items()},
            "share_of_the_fall_with_zero": (cosine[NONE] - cosine[ZERO]) / fall,
            "share_of_the_fall_with_their_mean": (cosine[NONE] - cosine[MEAN]) / fall,
            "effective_rank": {NAMES[case]: value for case, value in rank.items()},
        },
        holds=_needed(cosine),
        control=Control(
            "no residual stream, where the subtraction alone is known to do it",
            {"cosine": {NAMES[case]: value for case, value in without.items()}},
            fails=not _needed(without),
        ),
        figure=_curves(
            {NAMES[case]: values["cosine"] for case, values in found.items()},
            "anchor",
            "mean cosine of tokens",
        ),
        table=_table(found),
    )


def _needed(cosine: dict[Case, float]) -> bool:
    return cosine[FULL] < DIVERSE <= cosine[ZERO]


def _table(found: dict[Case, dict[str, Array]]) -> list[dict[str, Any]]:
    return [
        {"strength": strength, "anchor": anchor}
        | {name: float(each[name][:, -1].mean()) for name in QUANTITIES}
        for (strength, anchor), each in found.items()
    ]


def _curves(found: dict[str, Array], colour: str, title: str) -> Any:
    """Mean over seeds against depth, with the range of all seeds."""
    rows = [
        {colour: name, "layer": layer, "mean": mean, "low": low, "high": high}
        for name, each in found.items()
        for layer, (mean, low, high) in enumerate(
            zip(each.mean(0).tolist(), each.min(0).tolist(), each.max(0).tolist(), strict=True)
        )
    ]
    base = alt.Chart(alt.Data(values=rows), width=400, height=280).encode(
        x=alt.X("layer:Q", title="layer"),
        color=alt.Color(f"{colour}:N", title=colour, sort=list(found)),
    )
    band = base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title=title), y2="high:Q")
    return alt.layer(band, base.mark_line().encode(y=alt.Y("mean:Q", title=title)))
