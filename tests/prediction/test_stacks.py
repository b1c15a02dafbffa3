"""Stacks: fixed operators iterated and predicted, and untrained stacks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from attoscope import AttoscopeError
from attoscope.prediction.spectra import attention_spectrum, dominance
from attoscope.prediction.stacks import (
    StackProfile,
    frequency_ratio,
    iterate_fixed,
    map_from_spectrum,
    operator_dc_share,
    predict_limit,
    random_row_stochastic,
    stack_profile,
    symmetric_row_stochastic,
    untrained_stack,
)

TWO = np.array([[0.75, 0.25], [0.25, 0.75]])
THREE = np.full((3, 3), 0.25) + 0.25 * np.eye(3)
CORNERS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def direction(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


# Fixed layers, iterated.


@pytest.mark.parametrize(
    ("h", "expected"),
    [(1.0, (540.83251953125, 483.16748046875)), (-1.0, (0.00048828125, -0.00048828125))],
)
def test_ten_layers_in_closed_form(h: float, expected: tuple[float, float]) -> None:
    x = iterate_fixed(TWO, np.array([[h]]), np.array([[1.0], [0.0]]), 10, renormalise=False)
    assert x[:, 0].tolist() == list(expected)
    unit = iterate_fixed(TWO, np.array([[h]]), np.array([[1.0], [0.0]]), 10)
    assert np.allclose(unit, direction(x), atol=1e-15)


def test_frequency_ratio_along_layers() -> None:
    assert frequency_ratio(CORNERS) == pytest.approx(1 / math.sqrt(2), rel=1e-15)
    smooth = iterate_fixed(THREE, np.eye(2), CORNERS, 20)
    assert frequency_ratio(smooth) == pytest.approx(5.8490502e-05, rel=1e-7)
    assert frequency_ratio(smooth) == pytest.approx(math.sqrt(0.5) * (1.25 / 2) ** 20)
    for layers in (1, 2, 7):
        sharp = iterate_fixed(THREE, -np.eye(2), CORNERS, layers, renormalise=False)
        assert np.abs(sharp.mean(0)).max() < 1e-16
        assert frequency_ratio(sharp) > 1e15
    signs = np.array([[1.0, 0.0], [-1.0, 0.0]])
    assert frequency_ratio(signs) == math.inf
    assert frequency_ratio(np.stack([np.ones((2, 2)), signs])).tolist() == [0, math.inf]
    assert math.isnan(frequency_ratio(np.zeros((2, 2))))


def test_layers_follow_one_another_and_batches_are_independent() -> None:
    a = np.stack([random_row_stochastic(rng(i), 5) for i in range(3)])
    h, x = rng(7).standard_normal((3, 4, 4)), rng(8).standard_normal((3, 5, 4))
    together = iterate_fixed(a, h, x, 9)
    assert np.allclose(iterate_fixed(a, h, iterate_fixed(a, h, x, 4), 5), together)
    for i in range(3):
        assert np.allclose(iterate_fixed(a[i], h[i], x[i], 9), together[i], atol=1e-14)
    bare = iterate_fixed(a, h, x, 1, residual=False, renormalise=False)
    assert np.allclose(bare, a @ x @ h)
    assert not iterate_fixed(TWO, -np.eye(2), np.ones((2, 2)), 3).any()  # 1 - 1 = 0


# The limit.


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("signs", [1.0, -1.0, -3.0])
def test_the_predicted_limit_is_where_layers_go(signs: float, residual: bool) -> None:
    draw = rng(3)
    kernel = draw.random((8, 8))
    a = softmax(kernel @ kernel.T, axis=1)
    h = map_from_spectrum(draw, signs * np.linspace(0.5, 1, 6), orthogonal=False)
    x = draw.standard_normal((8, 6))
    limit = predict_limit(a, h, x, residual=residual)
    end = iterate_fixed(a, h, x, 20000, residual=residual)
    assert limit.unique and not limit.direction.imag.any()
    assert min(np.linalg.norm(end - s * limit.direction) for s in (1, -1)) < 1e-9
    singular = np.linalg.svd(limit.direction.real, compute_uv=False)
    assert singular[1] < 1e-12  # v w^T
    verdict = dominance(attention_spectrum(a).values, np.linalg.eigvals(h), residual=residual)
    assert abs(limit.eigenvalue) == pytest.approx(max(verdict.perron, verdict.other))
    assert (frequency_ratio(limit.direction.real) < 1e-9) == (verdict.kind == "smooths")


def test_a_complex_limit_turns_in_two_dimensions() -> None:
    turn = np.array([[0.5, 0.5], [-0.5, 0.5]])
    x = rng().standard_normal((3, 2))
    limit = predict_limit(THREE, turn, x)
    assert limit.unique and limit.eigenvalue.imag != 0
    plane = np.stack([limit.direction.real.ravel(), limit.direction.imag.ravel()])
    for layers in (200, 201):
        end = iterate_fixed(THREE, turn, x, layers).ravel()
        _, left, _, _ = np.linalg.lstsq(plane.T, end, rcond=None)
        assert left[0] < 1e-20


def test_ties_leave_no_single_limit_and_equal_eigenvalues_do() -> None:
    x = rng().standard_normal((3, 2))
    still = predict_limit(THREE, np.zeros((2, 2)), x)
    assert still.unique and np.allclose(still.direction, direction(x))  # all is left alone
    pairs = predict_limit(THREE, -np.eye(2), x)  # the eigenvalue 1/4 twice
    assert pairs.unique and pairs.eigenvalue == pytest.approx(0.75)
    assert np.allclose(pairs.direction, direction(x - x.mean(0)))
    skew = map_from_spectrum(rng(1), np.array([-0.9, -0.5]), orthogonal=False)
    plane = predict_limit(THREE, skew, x)  # twice 1/4, with the left vector of -0.5
    end = iterate_fixed(THREE, skew, x, 2000)
    assert plane.unique and np.allclose(plane.direction, end, atol=1e-12)
    tie = predict_limit(TWO, np.diag([-4.0, 2.0]), np.ones((2, 2)), residual=True)
    assert not tie.unique and abs(tie.eigenvalue) == pytest.approx(3)  # 1 - 4 and 1 + 2


def test_what_x_has_no_part_in_does_not_win() -> None:
    contrast = np.array([[1.0], [-1.0]])
    limit = predict_limit(TWO, np.eye(1), contrast)
    assert limit.eigenvalue == pytest.approx(1.5)
    assert np.allclose(np.abs(limit.direction), 1 / math.sqrt(2))
    with pytest.raises(AttoscopeError, match="all tokens are 0"):
        predict_limit(TWO, np.eye(1), np.zeros((2, 1)))


def test_maps_without_a_full_set_of_eigenvectors_are_refused() -> None:
    with pytest.raises(AttoscopeError, match="value_map: its eigenvectors"):
        predict_limit(TWO, np.array([[1.0, 1.0], [0.0, 1.0]]), np.ones((2, 2)))


@pytest.mark.parametrize(("plus", "minus"), [(4, 4), (3, 5), (7, 1), (8, 0), (2, 1)])
def test_cosine_of_a_rank_one_limit(plus: int, minus: int) -> None:
    n = plus + minus
    v = np.concatenate([np.ones(plus), -np.ones(minus)]) * rng().uniform(0.5, 2, n)
    found = stack_profile(np.outer(v, [1.0, 2.0, -1.0])[None])
    assert found.cosine[0] == pytest.approx(((plus - minus) ** 2 / n - 1) / (n - 1), abs=1e-12)
    assert found.absolute_cosine[0] == pytest.approx(1, abs=1e-12)
    assert found.effective_rank[0] == pytest.approx(1, abs=1e-6)


def test_profile_of_the_three_known_matrices() -> None:
    given = np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 10]])
    found = stack_profile(given[None])
    assert found.cosine[0] == pytest.approx(0.9815575647, abs=1e-10)
    assert found.frequency_ratio[0] == pytest.approx(0.4993145987, abs=1e-10)
    assert frequency_ratio(given) == pytest.approx(0.4993145987, abs=1e-10)
    assert found.effective_rank[0] == pytest.approx(1.2828365381, abs=1e-9)
    eye = stack_profile(np.eye(4)[None])
    assert eye.cosine[0] == pytest.approx(0, abs=1e-15)
    assert eye.frequency_ratio[0] == pytest.approx(math.sqrt(3))
    assert eye.effective_rank[0] == pytest.approx(4)


# Layers of several heads.


def dense(attentions: np.ndarray, maps: np.ndarray, residual: bool = True) -> np.ndarray:
    """The n d x n d matrix of the layer on row-major tokens."""
    size = attentions.shape[1] * maps.shape[1]
    whole = sum(np.kron(a, h.T) for a, h in zip(attentions, maps, strict=True))
    return np.asarray(whole) + (np.eye(size) if residual else 0.0)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("n", [4, 16])  # written out, and by iteration
def test_the_leading_vector_of_several_heads(n: int, residual: bool) -> None:
    draw, heads, d = rng(5), 3, 12
    a = softmax(draw.standard_normal((heads, n, n)), axis=2)
    values, outputs = draw.standard_normal((2, heads, d, 4)) / 4
    outputs = outputs.swapaxes(1, 2)
    found = operator_dc_share(a, values @ outputs, residual=residual)
    numbers, vectors = np.linalg.eig(dense(a, values @ outputs, residual))
    order = np.argsort(-np.abs(numbers))
    assert abs(found.eigenvalue) == pytest.approx(abs(numbers[order[0]]), rel=1e-9)
    lead = vectors[:, order[0]].reshape(n, d)
    share = n * (np.abs(lead.mean(0)) ** 2).sum() / (np.abs(lead) ** 2).sum()
    assert found.share == pytest.approx(share, rel=1e-7)
    step = 2 if abs(numbers[order[0]].imag) > 1e-9 else 1
    moduli = np.abs(numbers[order])
    assert found.margin == pytest.approx(math.log(moduli[0] / moduli[step]), abs=1e-7)
    factored = operator_dc_share(a, (values, outputs), residual=residual)
    assert factored.share == pytest.approx(found.share, rel=1e-7)
    assert 0 < found.share <= 1 + 1e-12


@pytest.mark.parametrize("n", [8, 40])
def test_one_head_agrees_with_its_dominance(n: int) -> None:
    a = random_row_stochastic(rng(1), n)
    for scale, share in ((1.0, 1.0), (-0.9, None)):
        h = map_from_spectrum(rng(2), scale * np.linspace(0.1, 1, 6))
        found = operator_dc_share(a[None], h[None])
        verdict = dominance(attention_spectrum(a).values, np.linalg.eigvalsh(h))
        assert abs(found.eigenvalue) == pytest.approx(max(verdict.perron, verdict.other))
        if share is not None:
            assert verdict.kind == "smooths" and found.share == pytest.approx(share)
        else:
            assert verdict.kind == "sharpens" and found.share < 0.5


def test_symmetric_attention_and_negative_maps_leave_no_constant() -> None:
    a = symmetric_row_stochastic(10, 0.3)
    found = operator_dc_share(a[None], -0.5 * np.eye(3)[None])
    assert found.share == pytest.approx(0, abs=1e-12)
    assert found.eigenvalue == pytest.approx(1 - 0.5 * 0.3)


def test_a_layer_in_which_nothing_grows_has_no_winner() -> None:
    narrow = -0.5 * np.diag([1.0, 1.0, 0.0, 0.0])
    for n in (6, 40):
        b = rng().random((n, n))
        kernel = softmax(b @ b.T * 8 / n, axis=1)  # no eigenvalue below 0
        found = operator_dc_share(kernel[None], narrow[None])
        assert found.margin == 0 and found.eigenvalue == pytest.approx(1)


def test_an_iteration_that_does_not_settle_is_refused() -> None:
    draw = rng()
    a = softmax(draw.standard_normal((2, 40, 40)), axis=2)
    maps = np.stack([map_from_spectrum(draw, np.linspace(-1, 0, 30)) for _ in range(2)])
    with pytest.raises(AttoscopeError, match="did not settle in 1 restarts"):
        operator_dc_share(a, maps, max_iterations=1)


# Generators.


def test_generators_have_the_spectra_that_they_name() -> None:
    a = random_row_stochastic(rng(), 6, temperature=0.5)
    assert np.allclose(a.sum(1), 1) and (a > 0).all() and not np.allclose(a, a.T)
    assert random_row_stochastic(rng(), 6, temperature=9.0).std() < a.std()
    values = np.array([-0.5, 0.25, 1.0])
    straight = map_from_spectrum(rng(), values)
    assert np.allclose(straight, straight.T)
    assert np.allclose(np.linalg.eigvalsh(straight), values)
    skew = map_from_spectrum(rng(), values, orthogonal=False)
    assert np.allclose(np.sort(np.linalg.eigvals(skew).real), values)
    assert not np.allclose(skew, skew.T)
    kept = symmetric_row_stochastic(4, 0.25)
    assert np.allclose(np.linalg.eigvalsh(kept), [0.25, 0.25, 0.25, 1])
    with pytest.raises(AttoscopeError, match="from 0 to 1"):
        symmetric_row_stochastic(4, 1.5)


# Untrained stacks.

SMALL: dict[str, Any] = {"tokens": 8, "width": 12, "heads": 3, "layers": 6}
FIELDS = ("cosine", "absolute_cosine", "frequency_ratio", "effective_rank")


def curves(seed: int = 0, **options: Any) -> np.ndarray:
    found = untrained_stack(rng(seed), **SMALL | options)
    return np.stack([getattr(found, name) for name in FIELDS])


def test_a_profile_has_a_point_more_than_layers_and_starts_at_the_input() -> None:
    x = rng().standard_normal((8, 12))
    found = untrained_stack(rng(), **SMALL)
    start = stack_profile(x[None])
    for name in FIELDS:
        assert getattr(found, name).shape == (7,)
        assert getattr(found, name)[0] == getattr(start, name)[0]


def test_one_layer_by_hand() -> None:
    draw = rng()
    x = draw.standard_normal((4, 6))
    query, key, value, output = draw.standard_normal((4, 6, 6)) / 6**0.5
    y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    for h in range(2):
        part = slice(3 * h, 3 * h + 3)
        scores = (y @ query[:, part]) @ (y @ key[:, part]).T / 3**0.5
        x = x + softmax(scores, axis=1) @ (y @ value[:, part]) @ output[part]
    found = untrained_stack(rng(), tokens=4, width=6, heads=2, layers=1)
    expected = stack_profile(x[None])
    for name in FIELDS:
        assert getattr(found, name)[1] == pytest.approx(getattr(expected, name)[0], rel=1e-12)


def test_a_negative_gain_turns_sharpening_into_smoothing_bit_for_bit() -> None:
    for one, other in (("sharpen", "smooth"), ("smooth", "sharpen")):
        assert np.array_equal(curves(maps=one, gamma=-1.0), curves(maps=other))
    assert not np.allclose(curves(maps="sharpen"), curves(maps="smooth"))


def test_spectral_maps_order_the_stacks() -> None:
    ends = {
        maps: curves(maps=maps, layers=40)[:, -1]
        for maps in ("smooth", "free", "mixed", "sharpen")
    }
    assert ends["smooth"][0] > 0.98 and ends["sharpen"][0] < 0.05
    assert ends["smooth"][2] < ends["free"][2] < ends["sharpen"][2]
    assert ends["sharpen"][0] < ends["mixed"][0] < ends["smooth"][0]


def test_the_term_of_neutreno() -> None:
    plain = curves()
    assert np.array_equal(curves(anchor=None, strength=0.6), plain)
    assert np.array_equal(curves(strength=0.0), plain)
    for anchor in ("first", "zero", "mean"):
        treated = curves(anchor=anchor, strength=0.6)
        assert np.array_equal(treated[:, :2], plain[:, :2])  # the first layer has no term
        assert not np.allclose(treated[:, 2], plain[:, 2])
    bare = {"residual": False, "strength": 0.6, "layers": 40}
    rank = {a: curves(anchor=a, **bare)[3, -1] for a in ("first", "zero", "mean")}
    assert rank["first"] > max(rank["zero"], rank["mean"]) + 1
    assert curves(anchor=None, **bare)[3, -1] == pytest.approx(1, abs=1e-6)


def test_the_term_by_hand() -> None:
    draw = rng()
    x = draw.standard_normal((5, 4))
    first = None
    for _ in range(2):
        query, key, value, output = draw.standard_normal((4, 4, 4)) / 2
        draw.uniform(size=4)
        y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        v = y @ value
        first = v if first is None else first
        u = softmax(y @ query @ (y @ key).T / 2, axis=1) @ v + 0.4 * (first - v)
        x = u @ output
    found = untrained_stack(
        rng(), tokens=5, width=4, heads=1, layers=2, strength=0.4, residual=False
    )
    expected = stack_profile(x[None])
    assert isinstance(found, StackProfile)
    assert found.cosine[2] == pytest.approx(expected.cosine[0], rel=1e-11)
    assert found.effective_rank[2] == pytest.approx(expected.effective_rank[0], rel=1e-9)


def test_stacks_that_cannot_be_are_refused() -> None:
    with pytest.raises(AttoscopeError, match="heads: got 5 for a width of 12"):
        untrained_stack(rng(), **SMALL | {"heads": 5})
    with pytest.raises(AttoscopeError, match="at least two tokens"):
        untrained_stack(rng(), **SMALL | {"tokens": 1})
    for width in (0, -2):
        with pytest.raises(AttoscopeError, match=f"width={width}"):
            untrained_stack(rng(), **SMALL | {"width": width})
