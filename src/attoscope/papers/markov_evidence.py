"""Training several language models on the Markov chain, and what a claim shows of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from attoscope.papers.markov_lm import Item, bounds, train
from attoscope.papers.running import Run

Array = NDArray[np.float64]
# What a run takes: the paper scale is the one that thresholds are meant for.
QUICK = {"seeds": 1, "batch": 8}
PAPER = {"seeds": 5, "batch": 16, "steps": 250}
_EVERY = 10


def sizes(quick_steps: int) -> str:
    """The two scales in words."""
    return (
        f"paper scale: {PAPER['seeds']} seeds, batches of {PAPER['batch']}, {PAPER['steps']} "
        f"steps; quick: {QUICK['seeds']} seed, batches of {QUICK['batch']}, {quick_steps} steps"
    )


def trained(
    run: Run, recipes: Mapping[str, Item], *, quick_steps: int
) -> dict[str, list[dict[str, Any]]]:
    """Every recipe trained from every seed; an entry per recipe, in the order of the seeds.

    The small batches of a quick run take more steps to learn the same.
    """
    size = run.pick(quick={**QUICK, "steps": quick_steps}, paper=PAPER)
    seeds = [int(n) for n in run.rng("markov").integers(2**31, size=size["seeds"])]
    shared = {"batch": size["batch"], "steps": size["steps"], "remedy": None}
    items = [
        {**shared, **recipe, "seed": seed} for recipe in recipes.values() for seed in seeds
    ]
    results = run.map(train, items, label="language models on a Markov chain")
    return {
        name: results[i * len(seeds) : (i + 1) * len(seeds)] for i, name in enumerate(recipes)
    }


def scores(found: Mapping[str, list[dict[str, Any]]], name: str) -> Array:
    """Scores of one recipe, one per seed."""
    return np.array([one["score"] for one in found[name]])


def measured(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """All scores, with the two exact losses that they lie between."""
    exact = bounds()
    return {"floor": exact.floor, "plateau": exact.plateau} | {
        f"loss {name}": scores(found, name) for name in found
    }


def table(found: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row per model: mean, least and largest score."""
    return [
        {"model": name, "mean": float(own.mean()), "least": float(own.min()),
         "largest": float(own.max())}
        for name in found
        for own in [scores(found, name)]
    ]  # fmt: skip


def figure(found: Mapping[str, list[dict[str, Any]]]) -> Any:
    """Loss against step, means over seeds and 10 steps, with the two exact losses."""
    rows = []
    for name, results in found.items():
        mean = np.mean([one["losses"] for one in results], 0)
        for start in range(0, len(mean), _EVERY):
            part = float(mean[start : start + _EVERY].mean())
            rows.append({"model": name, "step": start, "loss": part})
    exact = bounds()
    lines = [{"loss": exact.floor}, {"loss": exact.plateau}]
    curves = (
        alt.Chart(alt.Data(values=rows), width=400, height=260)
        .mark_line()
        .encode(
            x=alt.X("step:Q", title="step of training"),
            y=alt.Y("loss:Q", title="loss (nats)", scale=alt.Scale(zero=False)),
            color=alt.Color("model:N", title="model", sort=list(found)),
        )
    )
    rules = alt.Chart(alt.Data(values=lines)).mark_rule(strokeDash=[4, 4]).encode(y="loss:Q")
    return curves + rules
