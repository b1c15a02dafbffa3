"""Spectra of attention and value-output maps, and which eigenvalue wins."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import softmax

from attoscope import AttoscopeError
from attoscope.prediction.spectra import (
    Dominance,
    attention_spectrum,
    dominance,
    smoothing_threshold,
    value_output_spectrum,
)

THREE = np.full((3, 3), 0.25) + 0.25 * np.eye(3)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ordered(values: np.ndarray) -> np.ndarray:
    return np.sort_complex(np.round(values, 9))


# Attention.


def test_spectra_of_small_attention_maps() -> None:
    two = attention_spectrum(np.array([[0.75, 0.25], [0.25, 0.75]]))
    assert np.allclose(two.values, [1, 0.5], atol=1e-15)
    three = attention_spectrum(THREE)
    assert np.allclose(three.values, [1, 0.25, 0.25], atol=1e-15)
    assert three.perron == 0
    assert three.smallest == pytest.approx(0.25) and three.second == pytest.approx(0.25)


def test_a_cycle_has_complex_eigenvalues_and_a_swap_has_minus_one() -> None:
    cycle = attention_spectrum(np.roll(np.eye(3), 1, 1))
    root = np.exp(2j * np.pi / 3)
    assert np.allclose(ordered(cycle.values), ordered(np.array([root, root**2, 1])))
    assert cycle.values[cycle.perron] == pytest.approx(1)
    assert cycle.smallest == pytest.approx(-0.5) and cycle.second == pytest.approx(1)
    swap = attention_spectrum(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert swap.smallest == pytest.approx(-1) and swap.values[swap.perron] == pytest.approx(1)


def test_eigenvalues_of_causal_attention_are_its_diagonal_even_where_it_is_defective() -> None:
    scores = rng().standard_normal((40, 40))
    scores[np.triu_indices(40, 1)] = -np.inf
    causal = softmax(scores, axis=1)
    found = attention_spectrum(causal)
    assert np.array_equal(np.sort(found.values.real), np.sort(causal.diagonal()))
    assert not found.values.imag.any() and found.values[found.perron] == 1
    assert found.smallest == causal.diagonal().min()
    flat = np.tril(np.ones((3, 3))) / np.arange(1, 4)[:, None]
    flat[2] = [0.25, 0.25, 0.5]  # twice 1/2 on the diagonal
    assert np.array_equal(attention_spectrum(flat).values, [1, 0.5, 0.5])


@pytest.mark.parametrize(
    ("attention", "word"),
    [
        (np.eye(3)[:2], "square"),
        (np.ones((1, 1)), "two tokens"),
        (np.full((2, 2), 0.4), "row 0 sums to 0.8"),
        (np.array([[1.5, -0.5], [0.5, 0.5]]), "negative"),
        (np.full((2, 2), np.nan), "not finite"),
    ],
)
def test_what_is_no_attention_is_refused(attention: np.ndarray, word: str) -> None:
    with pytest.raises(AttoscopeError, match=word):
        attention_spectrum(attention)


def test_rows_in_low_precision_are_taken() -> None:
    rounded = np.round(softmax(rng().standard_normal((5, 5)), axis=1), 3).astype(np.float32)
    assert attention_spectrum(rounded).values[0] == pytest.approx(1, abs=3e-3)


# Value-output maps.


def test_a_low_rank_map_has_the_eigenvalues_of_the_small_product() -> None:
    value, output = rng().standard_normal((12, 4)), rng(1).standard_normal((4, 12))
    found = value_output_spectrum(value, output)
    whole = np.linalg.eigvals(value @ output)
    whole = whole[np.argsort(-np.abs(whole))]
    assert np.allclose(ordered(found.values), ordered(whole[:4]), atol=1e-12)
    assert np.abs(whole[4:]).max() < 1e-12
    assert found.largest == pytest.approx(whole[:4].real.max())
    assert found.smallest == pytest.approx(whole[:4].real.min())
    h = value @ output
    expected = np.linalg.norm(h - h.T) / np.linalg.norm(h)
    assert found.asymmetry == pytest.approx(expected, rel=1e-12)


def test_shares_of_signs_and_what_is_zero_up_to_rounding() -> None:
    q, _ = np.linalg.qr(rng().standard_normal((5, 5)))
    turned, _ = np.linalg.qr(rng(1).standard_normal((5, 5)))
    core = turned @ np.diag([2.0, 1.0, -1.0, 0.0, 0.0]) @ turned.T
    found = value_output_spectrum(q, core @ q.T)
    assert np.abs(found.values[-2:]).max() > 0  # only rounding
    assert (found.positive, found.negative) == (0.4, 0.2)
    assert found.asymmetry == pytest.approx(0, abs=1e-7)


def test_asymmetry_of_known_maps() -> None:
    turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    assert value_output_spectrum(np.eye(2), turn).asymmetry == 2
    assert value_output_spectrum(np.eye(2), np.eye(2)).asymmetry == 0
    shear = np.array([[0.0, 1.0], [0.0, 0.0]])
    assert value_output_spectrum(np.eye(2), shear).asymmetry == math.sqrt(2)
    zero = value_output_spectrum(np.zeros((3, 2)), np.zeros((2, 3)))
    assert math.isnan(zero.asymmetry) and zero.positive == zero.negative == 0


def test_the_norm_in_front_folds_into_the_map() -> None:
    draw = rng()
    value, output, gain = (draw.standard_normal(s) for s in ((6, 3), (3, 6), (6,)))
    x = draw.standard_normal((5, 6))
    normed = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) * gain
    centre = np.eye(6) - 1 / 6
    effective = centre @ np.diag(gain) @ value @ output
    assert np.allclose(normed @ value @ output, x / x.std(1, keepdims=True) @ effective)
    found = value_output_spectrum(value, output, gain, centred=True)
    whole = np.linalg.eigvals(effective)
    whole = whole[np.argsort(-np.abs(whole))][:3]
    assert np.allclose(ordered(found.values), ordered(whole), atol=1e-12)
    turned = value_output_spectrum(value, output, -gain, centred=True)
    assert (turned.positive, turned.negative) == (found.negative, found.positive)
    assert np.allclose(ordered(turned.values), ordered(-found.values))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AttoscopeError, match=r"\(4, 3\).*give \(width, size\)"):
        value_output_spectrum(np.ones((3, 4)), np.ones((3, 4)))
    with pytest.raises(AttoscopeError, match="gain: got"):
        value_output_spectrum(np.ones((3, 2)), np.ones((2, 3)), np.ones(2))
    with pytest.raises(AttoscopeError, match="not finite"):
        value_output_spectrum(np.full((3, 2), np.inf), np.ones((2, 3)))


# Dominance.


def test_products_are_the_spectrum_of_the_update() -> None:
    a, h = rng().random((5, 5)), rng(1).standard_normal((4, 4))
    a /= a.sum(1, keepdims=True)
    update = np.eye(20) + np.kron(h.T, a)
    products = 1 + np.outer(np.linalg.eigvals(a), np.linalg.eigvals(h)).ravel()
    assert np.allclose(ordered(np.linalg.eigvals(update)), ordered(products), atol=1e-7)
    found = dominance(np.linalg.eigvals(a), np.linalg.eigvals(h))
    largest = np.abs(np.linalg.eigvals(update)).max()
    assert max(found.perron, found.other) == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize(
    ("h", "kind", "perron", "other"),
    [
        ([0.5], "smooths", 1.5, 1.125),
        ([-0.5], "sharpens", 0.5, 0.875),
        ([-1.0], "sharpens", 0.0, 0.75),
        ([-3.0], "smooths", 2.0, 0.25),
        ([-0.5, 0.001], "undecided", 1.001, 1.00025),
        ([0.0, 0.5], "smooths", 1.5, 1.125),
        ([-0.5, 0.0], "inactive", 1.0, 1.0),
    ],
)
def test_kinds(h: list[float], kind: str, perron: float, other: float) -> None:
    found = dominance(np.array([1.0, 0.25, 0.25]), np.array(h))
    assert (found.kind, found.oscillates) == (kind, False)
    assert (found.perron, found.other) == pytest.approx((perron, other))
    margin = math.log(perron / other) if perron else -math.inf
    assert found.margin == pytest.approx(margin)


def test_all_of_one_sign_decides_and_without_residual_all_smooths() -> None:
    a = attention_spectrum(softmax(rng().standard_normal((6, 6)), axis=1)).values
    for seed in range(20):
        h = rng(seed).uniform(0, 1, 4)
        assert dominance(a, h).margin > 0
        assert dominance(a.real.clip(0), -h).margin < 0
        for sign in (1, -1):
            bare = dominance(a, sign * h, residual=False)
            assert bare.kind == "smooths"
            assert bare.margin == pytest.approx(-math.log(np.sort(np.abs(a))[-2]))


def test_a_head_narrower_than_the_stream_competes_with_what_it_leaves_alone() -> None:
    a = np.array([1.0, 0.2])
    assert dominance(a, np.array([-0.5])).kind == "sharpens"
    assert dominance(a, np.array([-0.5]), wider=True) == Dominance(
        "inactive", 0.0, 1.0, 1.0, False
    )
    large = dominance(a, np.array([-3.0]), wider=True)
    assert (large.kind, large.perron, large.other) == ("smooths", 2, 1)
    assert dominance(a, np.array([0.0]), residual=False).kind == "inactive"


def test_a_complex_winner_oscillates() -> None:
    turn = np.array([0.5 + 0.5j, 0.5 - 0.5j])
    found = dominance(np.array([1.0, 0.5]), turn)
    assert (found.kind, found.oscillates) == ("smooths", True)
    assert found.perron == pytest.approx(abs(1.5 + 0.5j))
    assert found.other == pytest.approx(abs(1.25 + 0.25j))
    assert found.margin == pytest.approx(math.log(found.perron / found.other))


def test_eigenvalues_that_are_missing_or_not_finite_are_refused() -> None:
    with pytest.raises(AttoscopeError, match="at least two and one"):
        dominance(np.array([1.0]), np.array([1.0]))
    with pytest.raises(AttoscopeError, match="not finite"):
        dominance(np.array([1.0, 0.5]), np.array([np.nan]))


@pytest.mark.parametrize(
    ("smallest", "threshold"),
    [(0.0, -2.0), (0.25, -1.6), (-0.2, -2.5), (1.0, -1.0), (-1.0, -math.inf)],
)
def test_threshold(smallest: float, threshold: float) -> None:
    assert smoothing_threshold(smallest) == threshold


def test_the_threshold_is_where_the_dominance_changes() -> None:
    a = np.array([1.0, 0.6, 0.0239])
    limit = smoothing_threshold(0.0239)
    assert dominance(a, np.array([limit + 0.03])).kind == "sharpens"
    assert dominance(a, np.array([limit - 0.03])).kind == "smooths"
    assert dominance(a, np.array([limit])).margin == pytest.approx(0, abs=1e-12)
    for wrong in (-1.01, 1.5, math.nan):
        with pytest.raises(AttoscopeError, match="from -1"):
            smoothing_threshold(wrong)
