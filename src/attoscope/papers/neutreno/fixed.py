"""Layers that share one attention: where they end, and up to which strength they do."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attoscope.papers.base import Control, Evidence, Run
from attoscope.papers.neutreno._draws import frequency_ratio, normal, seeds
from attoscope.papers.neutreno._paper import PAPER
from attoscope.remedies.functional import neutreno_attention, stability_limit, stacked_limit

Array = NDArray[np.float64]
TOKENS, WIDTH, LAYERS = 6, 4, 300
STRENGTHS = (0.0, 0.4, 0.6)
# 300 layers shrink a mode of this size to 2e-14; a slower draw could not show its end.
SLOWEST = 0.9
COLLAPSED, DIVERSE, EXACT = 1e-12, 0.3, 1e-12
CASES = {"0": 0.0, "0.4": 0.4, "0.6": 0.6, "0.6, constant anchor": 0.6, "0.6, zero anchor": 0.6}


def settling_attention(rng: np.random.Generator) -> tuple[Tensor, int]:
    """Softmax of Gaussians on which all strengths settle in time, and draws that it took."""
    for drawn in range(1, 1001):
        attention = normal(rng, TOKENS, TOKENS).softmax(-1)
        values = torch.linalg.eigvals(attention)
        # The constant mode starts where it ends, whatever the strength.
        moving = values[(values - 1).abs() > 1e-9]
        if all(float((moving - each).abs().max()) < SLOWEST for each in STRENGTHS):
            return attention, drawn
    raise RuntimeError("none of 1000 draws of attention settles in time")


def stack(item: dict[str, Any]) -> dict[str, Any]:
    """Frequency ratio after each layer for each case, and what is off at the end."""
    rng = np.random.default_rng(item["seed"])
    attention, drawn = settling_attention(rng)
    first = normal(rng, TOKENS, WIDTH)
    constant = first.mean(0, keepdim=True).expand_as(first)
    anchors = {"0.6, constant anchor": constant, "0.6, zero anchor": torch.zeros_like(first)}
    ratios, ends = {}, {}
    for name, strength in CASES.items():
        points = [first]
        for _ in range(LAYERS):
            anchor = anchors.get(name, first)
            points.append(neutreno_attention(attention, points[-1], anchor, strength))
        path = torch.stack(points)
        ratios[name], ends[name] = frequency_ratio(path).numpy(), path
    errors = [
        float((ends[f"{each:g}"][-1] - stacked_limit(attention, first, each)).abs().max())
        for each in STRENGTHS[1:]
    ]
    zero = float(ends["0.6, zero anchor"][60].norm() / first.norm())
    return {"ratio": ratios, "error": max(errors), "zero_norm_at_60": zero, "drawn": drawn}


@PAPER.claim(
    name="anchored-fixed-point",
    statement="Layers that share their attention end with equal tokens; with a pull towards the "
    "first values they end at strength ((1 + strength) I - A)^-1 X_0, where tokens stay diverse.",
    source="NeuTRENO's layer with one attention, identity values and no residual stream",
    criterion=f"after {LAYERS} layers the frequency ratio is below {COLLAPSED:g} at strength 0 in "
    f"every draw; at 0.4 and 0.6 every draw is within {EXACT:g} of the closed form, and the median "
    f"ratio is above {DIVERSE:g}",
)
def anchored_fixed_point(run: Run) -> Evidence:
    """Six tokens; attention is drawn anew where 300 layers are too few to reach the end."""
    items = [{"seed": seed} for seed in seeds(run, quick=20, paper=1000)]
    found = run.map(stack, items, label="stacks of one attention")
    ends = {name: np.array([each["ratio"][name][-1] for each in found]) for name in CASES}
    medians = {name: float(np.median(values)) for name, values in ends.items()}
    error = max(each["error"] for each in found)
    constant = ends["0.6, constant anchor"]
    return Evidence(
        measured={
            "draws": len(found),
            "draws_of_attention_for_each": float(np.mean([each["drawn"] for each in found])),
            "largest_ratio_at_0": ends["0"].max(),
            "median_ratio_at_0.4": medians["0.4"],
            "median_ratio_at_0.6": medians["0.6"],
            "least_ratio": min(ends["0.4"].min(), ends["0.6"].min()),
            "largest_error_of_the_closed_form": error,
        },
        holds=bool(
            ends["0"].max() < COLLAPSED
            and error < EXACT
            and min(medians["0.4"], medians["0.6"]) > DIVERSE
        ),
        control=Control(
            "strength 0.6 with a constant anchor, the token mean; a zero anchor leaves nothing",
            {
                "largest_ratio": constant.max(),
                "median_norm_zero_anchor_60_layers": float(
                    np.median([each["zero_norm_at_60"] for each in found])
                ),
            },
            fails=bool(constant.max() < COLLAPSED),
        ),
        figure=_fixed_figure(found),
    )


# From each draw's own limit: below it has to settle, above it has to diverge.
OFFSETS = (-0.01, 0.01)
MANY = 3000
KINDS = ("symmetric scores", "causal", "any scores")


def attention_of(rng: np.random.Generator, kind: str, draws: int) -> Tensor:
    """Softmax of Gaussian scores (draw, query, key), 6 tokens."""
    scores = normal(rng, draws, TOKENS, TOKENS)
    if kind == "symmetric scores":
        scores = (scores + scores.mT) / 2**0.5
    if kind == "causal":
        hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1)


def predicted_limit(attention: Tensor, rule: str) -> Tensor:
    """The strength up to which a rule says that layers settle."""
    if rule == "exact":
        return stability_limit(attention)
    if rule == "one":
        return attention.new_ones(len(attention))
    least: Tensor = torch.linalg.eigvals(attention).real.amin(-1)
    return 1 + least


def outcomes(item: dict[str, Any]) -> dict[str, Array]:
    """Distance from the fixed point after many layers over that at the start, (offset, draw)."""
    rng = np.random.default_rng(item["seed"])
    attention = attention_of(rng, item["kind"], item["draws"])
    first = normal(rng, item["draws"], TOKENS, WIDTH)
    limit = predicted_limit(attention, item["rule"])
    grown = []
    for offset in OFFSETS:
        strength = limit[:, None, None] + offset
        eye = torch.eye(TOKENS, dtype=first.dtype)
        end = torch.linalg.solve((1 + strength) * eye - attention, strength * first)
        x = first
        for _ in range(MANY):
            x = neutreno_attention(attention, x, first, strength)
        away = torch.linalg.matrix_norm(x - end) / torch.linalg.matrix_norm(first - end)
        grown.append(away.numpy())
    return {"limit": limit.numpy(), "grown": np.stack(grown)}


def surprises(grown: Array) -> int:
    """Draws that neither settle below their limit nor diverge above it as they should."""
    below, above = grown
    return int((~(below <= 1e-6) | ~(above >= 1e3)).sum())


@PAPER.claim(
    name="stability-limit",
    statement="Layers that share their attention settle below the strength 1 + lambda_min(A) and "
    "diverge above it, where the spectrum is real; else the limit is the smallest "
    "Re a + sqrt(1 - (Im a)^2).",
    source="NeuTRENO's layer with one attention, identity values and no residual stream",
    criterion="0.01 below the limit the distance from the fixed point falls by 1e6 within "
    f"{MANY:,} layers, 0.01 above it it grows by 1e3: in every draw, for symmetric scores and "
    "causal attention (1 + lambda_min) and for any scores (the general form)",
)
def limit_of_stability(run: Run) -> Evidence:
    rules = dict(zip(KINDS, ("real part", "real part", "exact"), strict=True))
    cases = [*rules.items(), (KINDS[2], "real part"), (KINDS[2], "one")]
    chunks = seeds(run, quick=2, paper=20)
    items = [
        {"kind": kind, "rule": rule, "seed": seed, "draws": 100}
        for kind, rule in cases
        for seed in chunks
    ]
    results = run.map(outcomes, items, label="limits of strength")
    found = []
    for i in range(len(cases)):
        mine = results[i * len(chunks) : (i + 1) * len(chunks)]
        found.append(
            {name: np.concatenate([r[name] for r in mine], axis=-1) for name in mine[0]}
        )
    wrong = [surprises(each["grown"]) for each in found]
    limits = np.concatenate([each["limit"] for each in found[:3]])
    return Evidence(
        measured={
            "draws_of_each_kind": 100 * len(chunks),
            **{f"surprises, {kind}": count for kind, count in zip(KINDS, wrong, strict=False)},
            "least_limit": limits.min(),
            "median_limits": {
                kind: float(np.median(each["limit"]))
                for kind, each in zip(KINDS, found, strict=False)
            },
        },
        holds=sum(wrong[:3]) == 0,
        control=Control(
            "any scores, with 1 + the smallest real part for the limit, and with 1 for all",
            {"surprises, real part": wrong[3], "surprises, one": wrong[4]},
            fails=min(wrong[3:]) > 0,
        ),
        figure=_limit_figure(found),
    )


def _fixed_figure(found: list[dict[str, Any]]) -> Any:
    rows = [
        {"strength": name, "layer": layer, "ratio": float(ratio), "draw": i}
        for i, each in enumerate(found[:5])
        for name in CASES
        if name != "0.6, zero anchor"
        for layer, ratio in enumerate(each["ratio"][name][:61])
        if ratio > 1e-15
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(
            x=alt.X("layer:Q", title="layer"),
            y=alt.Y("ratio:Q", title="frequency ratio |(I-J)X| / |JX|").scale(type="log"),
            color=alt.Color("strength:N", title="strength", sort=None),
            detail="draw:N",
        )
        .properties(width=400, height=280)
    )


def _limit_figure(found: list[dict[str, Array]]) -> Any:
    names = (*KINDS, f"{KINDS[2]}, 1 + real part")
    rows = [
        {
            "attention": name,
            "limit": float(limit),
            "grown": float(np.clip(value, 1e-18, 1e30)),
            "strength": f"limit {offset:+g}",
        }
        for name, each in zip(names, found, strict=False)
        for offset, grown in zip(OFFSETS, each["grown"][:, :200], strict=True)
        for limit, value in zip(each["limit"], grown, strict=False)
    ]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_circle(size=12)
        .encode(
            x=alt.X("limit:Q", title="predicted limit of the strength").scale(zero=False),
            y=alt.Y("grown:Q", title=f"distance after {MANY:,} layers, of the start").scale(
                type="log"
            ),
            color=alt.Color("strength:N", title="strength"),
        )
        .properties(width=240, height=180)
    )
    return chart.facet(alt.Facet("attention:N", title=None, sort=list(names)), columns=2)
