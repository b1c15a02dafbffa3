"""Whether what the spectra predict is what the model did: signs and ranks, beside chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.stats import rankdata

from attoscope.measures.base import Reading

PERMUTATIONS = 2000
_ENDS = (2.5, 97.5)
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Agreement:
    """One prediction beside one measurement, over `count` heads or layers.

    `same_sign` is the share of places where both say smoothing or both say sharpening;
    `rank_correlation` is Spearman's. Both are 1 where prediction and measurement agree fully.
    Each has the 95 % range that it takes when the measurements are shuffled (heads: within
    their layer, so that depth alone explains nothing). NaN where fewer than three places are
    known, or all are equal.
    """

    places: str
    prediction: str
    measurement: str
    count: int
    same_sign: float
    same_sign_null: tuple[float, float]
    rank_correlation: float
    rank_null: tuple[float, float]

    @property
    def beyond_chance(self) -> bool:
        """Whether the rank correlation lies above the range of shuffled measurements."""
        return self.rank_correlation > self.rank_null[1]

    def __str__(self) -> str:
        what = f"{self.prediction} and {self.measurement} over {self.count} {self.places}"
        if not math.isfinite(self.same_sign):
            return f"{what}: too few to compare"
        low, high = self.same_sign_null
        text = f"{what}: same sign {self.same_sign:.2f} (shuffled {low:.2f} to {high:.2f})"
        if not math.isfinite(self.rank_correlation):
            return f"{text}, no rank correlation: all {self.places} are predicted alike"
        low, high = self.rank_null
        return (
            f"{text}, rank correlation {self.rank_correlation:+.2f} "
            f"(shuffled {low:+.2f} to {high:+.2f})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def compare(
    places: str,
    prediction: str,
    measurement: str,
    predicted: Float[np.ndarray, " place"],
    measured: Float[np.ndarray, " place"],
    groups: Sequence[str] | None = None,
    *,
    seed: int = 0,
) -> Agreement:
    """Agreement of predictions (above 0: smooths) with steps (below 0: more alike).

    Measurements are shuffled within `groups` where these are given, over all places otherwise.
    """
    known = np.isfinite(predicted) & np.isfinite(measured)
    ours, theirs = predicted[known], -measured[known]
    kept = np.zeros(len(ours)) if groups is None else np.asarray(groups)[known]
    if len(ours) < 3:
        nothing = (np.nan, np.nan)
        return Agreement(
            places, prediction, measurement, len(ours), np.nan, nothing, np.nan, nothing
        )
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(kept == group) for group in dict.fromkeys(kept.tolist())]
    orders = np.tile(np.arange(len(ours)), (PERMUTATIONS, 1))
    for one in members:
        orders[:, one] = rng.permuted(np.tile(one, (PERMUTATIONS, 1)), axis=1)
    ranks, other = (rankdata(each) - (len(ours) + 1) / 2 for each in (ours, theirs))
    size = float(np.sqrt((ranks**2).sum() * (other**2).sum()))
    shuffled_signs = (np.sign(ours) == np.sign(theirs)[orders]).mean(1)
    shuffled = (other[orders] @ ranks) / size if size > 0 else np.full(PERMUTATIONS, np.nan)
    return Agreement(
        places, prediction, measurement, len(ours),
        float((np.sign(ours) == np.sign(theirs)).mean()), _range(shuffled_signs),
        float(ranks @ other / size) if size > 0 else np.nan, _range(shuffled),
    )  # fmt: skip


def agreements(readings: Sequence[Reading], seed: int = 0) -> tuple[Agreement, ...]:
    """Margins of heads beside their steps; of layers beside attention's and the block's step."""
    by_name = {reading.name: reading for reading in readings}
    margin = by_name["smoothing_margin"]
    head_step = by_name["head_step"]
    sites = [str(site) for site in margin.coords["site"]]
    groups = np.repeat(sites, margin.values.shape[1]).tolist()
    found = [
        compare(
            "heads", "margin", "the head's step", margin.values.ravel(),
            _along(head_step, sites).ravel(), groups, seed=seed,
        )
    ]  # fmt: skip
    steps, rest = by_name["attention_step"], by_name["rest_step"]
    layers = [str(layer) for layer in steps.coords["layer"]]
    mean = layer_means(margin, layers)
    whole = steps.values + _along(rest, layers)
    predictions = {"mean margin": mean}
    if "layer_dc_share" in by_name:
        # Half is where a leading eigenvector is as constant as it is not.
        share = _along(by_name["layer_dc_share"], layers)
        predictions["constant share"] = np.round(share, 6) - 0.5
    for name, predicted in predictions.items():
        for title, measured in (
            ("attention's step", steps.values),
            ("the block's step", whole),
        ):
            found.append(compare("layers", name, title, predicted, measured, seed=seed))
    return tuple(found)


def layer_means(reading: Reading, layers: Sequence[str]) -> Array:
    """The mean over heads of a reading over (site, head), at these layers; NaN where unknown."""
    index = {str(site): row for row, site in enumerate(reading.coords["site"])}
    means = np.full(len(layers), np.nan)
    for place, layer in enumerate(layers):
        if layer in index:
            row = reading.values[index[layer]]
            if np.isfinite(row).any():
                means[place] = float(np.nanmean(row))
    return means


def _along(reading: Reading, places: Sequence[str]) -> Array:
    """Values at these places; NaN where a reading lacks one (its numbers were not finite)."""
    index = {str(place): row for row, place in enumerate(reading.coords[reading.dims[0]])}
    values = np.full((len(places), *reading.values.shape[1:]), np.nan)
    for row, place in enumerate(places):
        if place in index:
            values[row] = reading.values[index[place]]
    return values


def _range(values: Array) -> tuple[float, float]:
    low, high = np.percentile(values, _ENDS)
    return float(low), float(high)
