"""Claims of "Setting the Record Straight": each holds in a small run, and not when it is broken."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pytest

from attoscope.papers import Evidence, Run
from attoscope.papers.oversmoothing_record_straight import (
    PAPER,
    _layers,
    predictor,
    regimes,
    threshold,
    untrained,
)
from attoscope.papers.registry import find
from attoscope.prediction.spectra import attention_spectrum, smoothing_threshold
from attoscope.prediction.stacks import StackProfile, iterate_fixed, map_from_spectrum
from tests.papers.judging import sound

T = TypeVar("T")
Patch = pytest.MonkeyPatch


class Few(Run):
    """A quick run with at most four of whatever is counted."""

    def pick(self, *, quick: T, paper: T) -> T:
        return min(quick, 4)  # type: ignore[return-value,type-var,call-overload]


def measure(name: str, run: Run | None = None) -> Evidence:
    (claim,) = PAPER.chosen([name])
    return claim.function(Few() if run is None else run)


def held(name: str, run: Run | None = None) -> Evidence:
    return sound(measure(name, run))


def test_the_registry_finds_the_paper_with_its_claims_in_order() -> None:
    entry = find("oversmoothing-record-straight")
    assert entry.load() is PAPER and entry.link == PAPER.link
    assert [claim.name for claim in PAPER.claims][:4] == [
        "spectrum-decides", "smoothing-threshold", "predictor", "untrained-stacks",
    ]  # fmt: skip


# Fixed layers.


def test_kernel_attention_has_a_real_spectrum_with_a_gap_at_its_end() -> None:
    for seed in range(30):
        attention = _layers.kernel_attention(np.random.default_rng(seed))
        values = np.linalg.eigvals(attention)
        assert not values.imag.any() and values.real.min() > 0
        least, next_ = np.sort(values.real)[:2]
        assert next_ - least >= _layers.GAP
        assert np.allclose(attention.sum(1), 1)


def test_what_counts_as_smoothed_and_as_sharpened() -> None:
    attention = _layers.kernel_attention(np.random.default_rng(1))[None]
    values, vectors = np.linalg.eig(attention[0])
    v, w = vectors[:, values.argmin()], np.arange(1.0, 5.0)
    line, equal = np.outer(v, w), np.outer(np.ones(8), w)
    turned = np.outer(np.abs(v), w)
    off = line + 1e-3 * np.random.default_rng(0).standard_normal(line.shape)
    ends = _layers.Ends.of(np.stack([line, equal, turned, off]))
    assert ends.smoothed().tolist() == [False, True, False, False]
    assert ends.sharpened(attention.repeat(4, 0)).tolist() == [True, False, False, False]


def test_expected_cosine_of_four_against_four_and_one_against_three() -> None:
    even = 0.5 * np.eye(4) + 0.5 * np.full((4, 4), 0.25) - 0.1 * np.outer(
        [1, -1, 1, -1], [1, -1, 1, -1]
    ) / 4  # fmt: skip
    assert _layers.expected_cosine(even[None])[0] == pytest.approx(-1 / 3)
    v = np.array([3.0, -1, -1, -1])
    odd = 0.5 * np.eye(4) + 0.5 * np.full((4, 4), 0.25) - 0.1 * np.outer(v, v) / (v @ v)
    assert _layers.expected_cosine(odd[None])[0] == pytest.approx(0, abs=1e-12)


def test_spectrum_decides() -> None:
    found = held("spectrum-decides")
    smooth, sharp, negative, bare = found.table or ()
    assert smooth["ratio_to"] < 1e-14 and negative["ratio_to"] < 1e-14
    assert sharp["ratio_from"] > 1 and sharp["cosine_to"] <= 0.5 + 1e-9
    assert (bare["smoothed"], bare["sharpened"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sharpening", regimes.POSITIVE),
        ("smoothing", -regimes.POSITIVE),
        ("too negative", -regimes.POSITIVE),
        ("sharpening", np.zeros(regimes.WIDTH)),
    ],
)
def test_other_spectra_break_the_claim(monkeypatch: Patch, name: str, values: Any) -> None:
    monkeypatch.setitem(regimes.SPECTRA, name, values)
    assert not measure("spectrum-decides").holds


def test_a_control_that_sharpens_is_seen(monkeypatch: Patch) -> None:
    monkeypatch.setattr(regimes, "BARE", "none")
    spectra = {k: v for k, v in regimes.SPECTRA.items() if "residual" not in k}
    reported = dict.fromkeys([*spectra, "none"], 0.0)
    monkeypatch.setattr(regimes, "SPECTRA", spectra | {"none": regimes.POSITIVE})
    monkeypatch.setattr(regimes, "REPORTED", reported)
    assert measure("spectrum-decides").control.fails

    def kept(attention: Any, maps: Any, x: Any, layers: int, residual: bool = True) -> Any:
        return iterate_fixed(attention, -np.abs(maps[0, 0, 0]) * np.eye(6)[None], x, layers)

    monkeypatch.setattr(regimes, "iterate_fixed", kept)
    assert not measure("spectrum-decides").control.fails


def test_the_threshold() -> None:
    found = held("smoothing-threshold")
    assert -2 < found.measured["threshold_from"] <= found.measured["threshold_to"] < -1.8
    result = threshold.scaled({"seeds": [3], "values": [0.0], "relative": True})
    least = attention_spectrum(result["attention"][0]).smallest
    assert result["threshold"].tolist() == [smoothing_threshold(least)]
    assert result["tokens"].shape == (1, 1, 8, 6)


@pytest.mark.parametrize("wrong", [0.1, -0.1])
def test_another_threshold_breaks_the_claim(monkeypatch: Patch, wrong: float) -> None:
    monkeypatch.setattr(
        threshold, "smoothing_threshold", lambda least: smoothing_threshold(least) + wrong
    )
    assert not measure("smoothing-threshold").holds


# Random pairs.


class Pairs(Run):
    def pick(self, *, quick: T, paper: T) -> T:
        return 90  # type: ignore[return-value]


def test_predictor() -> None:
    found = held("predictor", Pairs())
    assert found.measured["pairs"] + found.measured["skipped"] == 90
    rows = {row["map"]: row for row in found.table or ()}
    assert rows["eigenvalues in (0, 1)"]["smoothed"] == 1.0
    assert 0 < rows["eigenvalues in (-3, 0)"]["smoothed"] < 1
    assert found.measured["agreement_shuffled"] < 0.9


def test_a_predictor_of_the_other_sign_breaks_the_claim(monkeypatch: Patch) -> None:
    plain = predictor.dominance

    def turned(attention: Any, values: Any) -> Any:
        return plain(attention, -values)

    monkeypatch.setattr(predictor, "dominance", turned)
    assert not measure("predictor", Pairs()).holds


def test_the_control_is_seen_where_the_sign_would_be_enough(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        predictor,
        "_map",
        lambda rng, kind: map_from_spectrum(rng, rng.uniform(size=predictor.WIDTH)),
    )
    broken = measure("predictor", Pairs())
    assert broken.holds and not broken.control.fails


# Untrained stacks.


def test_untrained_stacks() -> None:
    found = held("untrained-stacks")
    assert found.measured["largest_difference_after_swap"] < 1e-12
    rows = {(row["maps"], row["gain"]): row for row in found.table or ()}
    assert rows["sharpen", 1.0]["cosine"] == pytest.approx(-1 / 31, abs=0.005)
    free, smooth = rows["free", 1.0], rows["smooth", 1.0]
    assert smooth["effective_rank"] < free["effective_rank"] < 16
    assert rows["mixed", 1.0]["cosine"] > 0.5


def test_maps_exchanged_break_the_claim_and_the_control(monkeypatch: Patch) -> None:
    plain = untrained.untrained_stack

    def sharp(rng: Any, *, maps: Any, gamma: float) -> StackProfile:
        return plain(rng, maps="sharpen" if maps == "mixed" else maps, gamma=gamma)

    monkeypatch.setattr(untrained, "untrained_stack", sharp)
    found = measure("untrained-stacks")
    assert found.holds and not found.control.fails

    def no_gain(rng: Any, *, maps: Any, gamma: float) -> StackProfile:
        return plain(rng, maps=maps)

    monkeypatch.setattr(untrained, "untrained_stack", no_gain)
    assert not measure("untrained-stacks").holds


@pytest.mark.parametrize(
    ("cosine", "ratio", "expected"),
    [(-0.03, 30.0, True), (0.05, 30.0, False), (-0.03, 5.0, False)],
)
def test_what_sharpening_asks(cosine: float, ratio: float, expected: bool) -> None:
    assert untrained.sharpens(cosine, ratio) is expected
