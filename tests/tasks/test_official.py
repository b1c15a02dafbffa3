"""The published generators: draws in their order, and the values known of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attoscope.errors import AttoscopeError
from attoscope.svm import AttentionSVM, InfeasibleSelection, Selection
from attoscope.tasks import (
    equal_scores,
    lambda_head,
    relu_head,
    stack,
    unit_sphere,
    vis1,
    vis2,
)

MAKERS = (unit_sphere, relu_head, lambda_head)


def selection(data, selected=None) -> Selection:
    return Selection.cross(
        data.tokens, data.queries, data.optimal if selected is None else selected
    )


@pytest.mark.parametrize(
    ("make", "optimal", "fro", "value", "nuclear", "correlation"),
    [
        (
            vis1, [0, 2], [[2.853691, -2.702942], [5.371239, 5.580532]],
            8.685735, 9.754810, 0.890405,
        ),
        (
            vis2, [0, 0], [[0.792552, -1.086473], [-0.633028, -0.347115]],
            1.526360, 1.872604, 0.936236,
        ),
    ],
)  # fmt: skip
def test_k13(make, optimal, fro, value, nuclear, correlation) -> None:
    data = make()
    assert data.optimal.tolist() == optimal
    full = AttentionSVM(tol=1e-10).fit_selection(selection(data))
    low = AttentionSVM("nuclear", tol=1e-10).fit_selection(selection(data))
    assert full.objective_ == pytest.approx(value, abs=2e-6)
    assert low.objective_ == pytest.approx(nuclear, abs=2e-6)
    np.testing.assert_allclose(full.weight_, fro, atol=2e-6)
    sizes = np.linalg.norm(full.weight_) * np.linalg.norm(low.weight_)
    assert np.vdot(full.weight_, low.weight_) / sizes == pytest.approx(correlation, abs=2e-6)
    if make is vis1:
        np.testing.assert_allclose(
            low.weight_, [[0.486706, 0.469257], [7.005539, 6.754380]], atol=1e-5
        )
        assert low.rank_ == 1
    else:
        singular = np.linalg.svd(low.weight_, compute_uv=False)
        np.testing.assert_allclose(singular, [1.60905, 0.26355], atol=2e-5)


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).double().numpy() for shape in shapes]


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_unit_sphere_draws_head_labels_tokens_queries() -> None:
    v, y, x, z = drawn(7, (5,), (3,), (3, 4, 5), (3, 5))
    data = unit_sphere(7, 3, 4, 5)
    np.testing.assert_allclose(data.head, unit(v), atol=1e-7)
    np.testing.assert_array_equal(data.labels, np.where(y > 0, 1.0, -1.0))
    np.testing.assert_allclose(data.tokens, unit(x), atol=1e-7)
    np.testing.assert_allclose(data.queries, unit(z), atol=1e-7)
    # Another order of the same draws is other data.
    _, wrong, _ = drawn(7, (5,), (3, 4, 5), (3,))
    assert np.abs(data.tokens - unit(wrong)).max() > 0.1


def test_relu_head_draws_head_tokens_labels_queries() -> None:
    v, x, y, z = drawn(3, (5, 5), (3, 4, 5), (3,), (3, 5))
    data = relu_head(3, 3, 4, 5)
    assert not data.linear
    np.testing.assert_allclose(data.head, v / np.linalg.norm(v), atol=1e-7)
    np.testing.assert_allclose(data.tokens, unit(x), atol=1e-7)
    np.testing.assert_array_equal(data.labels, np.where(y > 0, 1.0, -1.0))
    np.testing.assert_allclose(data.queries, unit(z), atol=1e-7)
    values = np.maximum(data.tokens @ data.head, 0).sum(-1)
    np.testing.assert_allclose(data.scores, data.labels[:, None] * values, atol=1e-12)


@pytest.mark.parametrize(("T", "d"), [(4, 4), (6, 4), (4, 6)])
def test_lambda_head_tokens_are_singular_vectors(T: int, d: int) -> None:
    v, x, z = drawn(5, (d,), (2, T, d), (2, d))
    data = lambda_head(5, 2, T, d)
    np.testing.assert_allclose(data.head, unit(v), atol=1e-7)
    np.testing.assert_allclose(data.queries, unit(z), atol=1e-7)
    assert data.labels.tolist() == [1, 1] and data.tokens.shape == (2, T, d)
    swapped = data.tokens.swapaxes(1, 2)
    gram = data.tokens @ swapped if T <= d else swapped @ data.tokens
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(min(T, d)), gram.shape), atol=1e-14)
    if T >= d:
        # As published, signs included.
        left, _, _ = torch.linalg.svd(torch.from_numpy(x).float(), full_matrices=False)
        np.testing.assert_allclose(data.tokens, left.double().numpy(), atol=2e-6)


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_gives_the_same_data_whatever_was_drawn_before(make) -> None:
    first = make(11, 2, 3, 4)
    torch.randn(9)
    again, other = make(11, 2, 3, 4), make(12, 2, 3, 4)
    for name in ("tokens", "queries", "labels", "head"):
        array = getattr(first, name)
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, getattr(again, name))
    assert np.abs(first.tokens - other.tokens).max() > 0.1


@pytest.mark.parametrize("make", MAKERS)
def test_stacked_trials_are_those_alone(make) -> None:
    alone = [make(seed, 3, 4, 5) for seed in range(6)]
    data = stack(alone)
    assert data.tokens.shape == (6, 3, 4, 5) and data.queries.shape == (6, 3, 5)
    assert data.labels.shape == (6, 3) and len(data.head) == 6 and data.flipped is None
    for trial, one in enumerate(alone):
        np.testing.assert_allclose(data.scores[trial], one.scores, atol=1e-14)
        np.testing.assert_array_equal(data.optimal[trial], one.optimal)
        np.testing.assert_array_equal(data.queries[trial], one.queries)


def test_equal_scores_takes_two_values() -> None:
    before = stack(unit_sphere(seed, 4, 5, 6) for seed in range(3))
    after = equal_scores(before, gap=0.5)
    assert len(np.unique(np.round(after.scores, 12))) == 2
    best = np.arange(5) == before.optimal[..., None]
    np.testing.assert_allclose(after.scores, np.where(best, 0.25, -0.25), atol=1e-12)
    # Nothing but the part along v has moved.
    moved = after.tokens - before.tokens
    along = np.einsum("sntd,sd->snt", moved, unit(before.head))
    np.testing.assert_allclose(
        moved, along[..., None] * unit(before.head)[:, None, None], atol=1e-12
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: unit_sphere(0, 0, 3, 4), "n: got 0; expected a whole number, at least 1"),
        (lambda: relu_head(0, 2, -3, 4), "T: got -3; expected a whole number"),
        (lambda: lambda_head(0, 2, 3, -1), "d: got -1"),
        (lambda: equal_scores(relu_head(0, 2, 3, 4)), "expected a linear head"),
        (lambda: equal_scores(vis1(), gap=0.0), "gap: got 0.0; expected a positive number"),
        (lambda: stack([]), "instances: got none"),
        (
            lambda: stack([unit_sphere(0, 2, 3, 4), unit_sphere(0, 2, 4, 4)]),
            r"tokens of shape \(2, 3, 4\) in trial 0 and \(2, 4, 4\) in trial 1",
        ),
    ],
)
def test_errors_are_one_sentence(call, message) -> None:
    with pytest.raises(AttoscopeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def feasible(problem: Selection) -> bool:
    try:
        AttentionSVM(tol=1e-3).fit_selection(problem)
    except InfeasibleSelection as found:
        assert found.verify()
        return False
    return True


def test_feasibility_grows_with_the_width() -> None:
    """Optimal selections of five sequences: from one third at d = 2 to all at d >= n."""
    share = [
        np.mean([feasible(selection(unit_sphere(seed, 5, 15, d))) for seed in range(40)])
        for d in (2, 3, 5)
    ]
    assert 0.15 <= share[0] <= 0.5 and 0.5 <= share[1] <= 0.85 and share[2] == 1.0


def test_every_selection_is_feasible_at_width_max_of_tokens_and_queries() -> None:
    rng = np.random.default_rng(0)
    for seed in range(10):
        data = unit_sphere(seed, 5, 15, 14)
        assert feasible(selection(data, rng.integers(0, 15, 5)))
        # A token inside the hull of the others is never selected.
        data.tokens[0, 0] = data.tokens[0, 1:].mean(0)
        assert not feasible(selection(data, [0, 1, 2, 3, 4]))
