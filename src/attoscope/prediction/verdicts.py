"""The prediction of smoothing in words: a line for each layer, two sentences for each stack."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from attoscope.measures.base import Reading
from attoscope.measures.places import parse
from attoscope.prediction.agreement import Agreement, layer_means
from attoscope.prediction.smoothing import Smoothing
from attoscope.prediction.spectra import UNDECIDED

# Which comparisons the verdict tells of.
_SAID = (("heads", "the head's step"), ("layers", "attention's step"))
KINDS = ("smooths", "sharpens", "inactive", "undecided")


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """What the spectra say of one layer, and what it did on the data.

    `heads` counts its heads by kind (see `dominance`), each by what it is on most documents;
    `turned` counts those whose kind turns between smoothing and sharpening when the norm's gain
    is left out. `margin` is the mean over heads, `dc_share` the constant share of the leading
    eigenvector of all heads at once; `attention_step` and `rest_step` are measured (below 0:
    more alike), with `low` and `high` the 95 % interval of attention's. NaN where not known.
    """

    layer: str
    heads: dict[str, int]
    turned: int
    margin: float
    dc_share: float
    attention_step: float
    low: float
    high: float
    rest_step: float
    scope: tuple[str, ...]

    @property
    def kind(self) -> str:
        """What the layer as a whole tends to: by all heads at once, else by their mean margin."""
        if not math.isfinite(self.margin):
            return "not predicted"
        if math.isfinite(self.dc_share):
            return "smooths" if self.dc_share >= 0.5 else "sharpens"
        if abs(self.margin) < UNDECIDED:
            return "undecided"
        return "smooths" if self.margin > 0 else "sharpens"

    @property
    def did(self) -> str:
        """What attention did to the tokens of the data, in words."""
        if not math.isfinite(self.attention_step):
            return "not measured"
        if math.isfinite(self.low) and self.low <= 0 <= self.high:
            return "no clear change"
        return "more alike" if self.attention_step < 0 else "less alike"

    @property
    def sentence(self) -> str:
        """The layer in one sentence."""
        if self.kind == "not predicted":
            return f"{self.layer}: {'; '.join(self.scope) or 'not predicted'}"
        text = f"{self.layer} {self.kind} by its spectra (of its heads {_counted(self.heads)})"
        text = text.replace(" undecided by", " is undecided by")
        if self.turned:
            text += f", {self.turned} turned by the norm's gain"
        text += f"; on the data its attention: {self.did}"
        return f"{text}. Outside the theory: {'; '.join(self.scope)}" if self.scope else text

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "kind": self.kind, "did": self.did, "sentence": self.sentence}


def layer_verdicts(
    smoothing: Smoothing, readings: Sequence[Reading], scope: dict[str, tuple[str, ...]]
) -> tuple[LayerVerdict, ...]:
    """One verdict for each attention call."""
    by_name = {reading.name: reading for reading in readings}
    margin = by_name["smoothing_margin"]
    sites = [str(site) for site in margin.coords["site"]]
    means = layer_means(margin, sites)
    verdicts = []
    for row, site in enumerate(sites):
        kinds: Counter[str] = Counter()
        turned = 0
        for head in range(margin.values.shape[1]):
            seen = smoothing.kinds.get((site, head))
            if seen:
                kinds[seen.most_common(1)[0][0]] += 1
                turned += 2 * smoothing.flipped.get((site, head), 0) > seen.total()
        step = by_name["attention_step"]
        verdicts.append(
            LayerVerdict(
                site,
                dict(kinds),
                turned,
                float(means[row]),
                _at(by_name.get("layer_dc_share"), site),
                _at(step, site),
                _at(step, site, "low"),
                _at(step, site, "high"),
                _at(by_name["rest_step"], site),
                scope.get(site, ()),
            )  # fmt: skip
        )
    return tuple(verdicts)


def stack_verdict(
    verdicts: Sequence[LayerVerdict],
    readings: Sequence[Reading],
    agreement: Sequence[Agreement],
) -> str:
    """Two sentences for each stack: what the spectra foresee, and what happened."""
    lines = []
    for stack in dict.fromkeys(parse(v.layer).stack for v in verdicts):
        mine = [v for v in verdicts if parse(v.layer).stack == stack]
        lines.append(_foreseen(stack, mine, readings))
        lines.append(_happened(stack, mine, readings, agreement))
    return " ".join(lines)


def _foreseen(stack: str, mine: Sequence[LayerVerdict], readings: Sequence[Reading]) -> str:
    heads: Counter[str] = Counter()
    for verdict in mine:
        heads.update(verdict.heads)
    if not heads:
        return f"The {stack} cannot be predicted: {'; '.join(mine[0].scope) or 'no maps'}."
    kinds = Counter(v.kind for v in mine if v.kind != "not predicted")
    text = (
        f"By its spectra, of the {stack}'s heads {_counted(heads)}; "
        f"of its layers {_counted(kinds)}"
    )
    ends = _ends("attention_only_frequency_ratio", stack, readings)
    if ends is None:
        return f"{text}."
    start, end, change, null = ends
    return (
        f"{text}: attention alone would leave the tokens {change} (high over low frequencies "
        f"{start:.3g} to {end:.3g}; with random maps to {null:.3g})."
    )


def _happened(
    stack: str,
    mine: Sequence[LayerVerdict],
    readings: Sequence[Reading],
    agreement: Sequence[Agreement],
) -> str:
    ends = _ends("model_frequency_ratio", stack, readings)
    did = Counter(v.did for v in mine)
    words = ("more alike", "less alike", "no clear change", "not measured")
    steps = ", ".join(f"{w} in {did[w]}" for w in words if did[w])
    text = f"Measured, attention made them {steps} of {len(mine)} layers"
    if ends is not None:
        start, end, change, _ = ends
        text = (
            f"The whole model left them {change} ({start:.3g} to {end:.3g}); attention made them "
            f"{steps} of {len(mine)} layers"
        )
    ranked = "; ".join(
        _ranked(one)
        for one in agreement
        if (one.places, one.measurement) in _SAID and one.prediction.endswith("margin")
        if math.isfinite(one.rank_correlation)
    )
    return f"{text}, and margins rank what was measured, {ranked}." if ranked else f"{text}."


def _ranked(one: Agreement) -> str:
    """A rank correlation, and whether shuffled measurements reach it."""
    low, high = one.rank_null
    where = (
        "above" if one.beyond_chance else "below" if one.rank_correlation < low else "within"
    )
    return (
        f"over {one.count} {one.places}, with a rank correlation of {one.rank_correlation:+.2f} "
        f"({where} the {low:+.2f} to {high:+.2f} of shuffled measurements)"
    )


def _counted(kinds: Mapping[str, int]) -> str:
    """ "3 smooth, 1 sharpens, 2 are undecided"."""
    many = {"smooths": "smooth", "sharpens": "sharpen"}
    parts = []
    for kind in KINDS:
        count = kinds.get(kind, 0)
        if count and kind in many:
            parts.append(f"{count} {kind if count == 1 else many[kind]}")
        elif count:
            parts.append(f"{count} {'is' if count == 1 else 'are'} {kind}")
    return ", ".join(parts)


def _ends(
    name: str, stack: str, readings: Sequence[Reading]
) -> tuple[float, float, str, float] | None:
    """A curve's first and last value, what that is in words, and where its null ends."""
    reading = next((r for r in readings if r.name == name), None)
    if reading is None:
        return None
    rows = [i for i, p in enumerate(reading.coords["point"]) if parse(str(p)).stack == stack]
    rows = [i for i in rows if np.isfinite(reading.values[i])]
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    null = math.nan if reading.null is None else float(reading.null[last])
    change = "more alike" if reading.values[last] < reading.values[first] else "less alike"
    if reading.low is not None and reading.high is not None:
        apart = (
            reading.high[last] < reading.low[first] or reading.low[last] > reading.high[first]
        )
        change = change if apart else "about as alike as they were"
    return float(reading.values[first]), float(reading.values[last]), change, null


def _at(reading: Reading | None, place: str, part: str = "values") -> float:
    values = None if reading is None else getattr(reading, part)
    if reading is None or values is None or place not in reading.coords[reading.dims[0]]:
        return math.nan
    return float(values[reading.coords[reading.dims[0]].index(place)])
