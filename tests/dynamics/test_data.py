"""What is trained on: shapes, scores, causality, padding, and errors that say what to do."""

from __future__ import annotations

import numpy as np
import pytest

from attoscope.dynamics import AttentionData, LambdaHead, LinearHead, ReluHead, sparsemax
from attoscope.errors import AttoscopeError
from tests.dynamics.build import as_users_run_it, random_data, vis1

RNG = np.random.default_rng(0)
TOKENS = RNG.standard_normal((2, 3, 4, 5))
HEAD = LinearHead(RNG.standard_normal((2, 5)))
ONES = np.ones((2, 3))


def test_scores_and_optimal_tokens() -> None:
    tokens = [[[[1.0, 0], [0, 2], [3, 3]]]]
    head = LinearHead([[1.0, -1.0]])
    data = AttentionData.cross(tokens, [[[1.0]]], [[-1.0]], head, allowed=[[True, True, False]])
    np.testing.assert_array_equal(data.scores(), [[[-1.0, 2.0, -np.inf]]])
    np.testing.assert_array_equal(data.optimal(), [[1]])


def test_the_official_picture_selects_what_it_says() -> None:
    np.testing.assert_array_equal(vis1().optimal(), [[0, 2]])


def test_self_attention_asks_with_one_token() -> None:
    data = AttentionData.self_attention(TOKENS, ONES, HEAD, position=-1)
    np.testing.assert_array_equal(data.queries, TOKENS[:, :, 3])


def test_causal_leaves_out_the_first_position_and_the_future() -> None:
    labels = RNG.choice([-1.0, 1.0], (2, 3, 4))
    data = AttentionData.causal(TOKENS, labels, HEAD, lengths=[4, 2, 3])
    positions = [(0, 1), (0, 2), (0, 3), (1, 1), (2, 1), (2, 2)]
    np.testing.assert_array_equal(data.sequence, [s for s, _ in positions])
    for i, (s, k) in enumerate(positions):
        np.testing.assert_array_equal(data.queries[:, i], TOKENS[:, s, k])
        np.testing.assert_array_equal(data.labels[:, i], labels[:, s, k])
        np.testing.assert_array_equal(data.allowed[0, i], np.arange(4) <= k)


def test_every_position_sees_its_whole_sequence() -> None:
    data = AttentionData.every_position(TOKENS, np.ones((2, 3, 4)), HEAD, lengths=[4, 1, 3])
    assert data.shape == (2, 8, 4, 5, 5)
    np.testing.assert_array_equal(data.allowed[0].sum(1), [4, 4, 4, 4, 1, 3, 3, 3])


def test_values_are_read_in_place_of_tokens() -> None:
    values = RNG.standard_normal((2, 3, 4, 1))
    data = AttentionData.cross(
        TOKENS, TOKENS[:, :, 0], ONES, LinearHead(np.ones((2, 1))), values=values
    )
    np.testing.assert_array_equal(data.scores(), values[..., 0])
    np.testing.assert_array_equal(data.take(1).scores(), values[1:, ..., 0])


def test_take_and_selection_are_of_the_trial() -> None:
    data = random_data(trials=4)
    part = data.take([2, 0])
    np.testing.assert_array_equal(part.scores(), data.scores()[[2, 0]])
    selection = data.selection(2, data.optimal()[2])
    np.testing.assert_array_equal(selection.keys, data.tokens[2])
    np.testing.assert_array_equal(selection.reference, data.optimal()[2])


@pytest.mark.parametrize(
    ("strength", "expected"),
    [(1.0, (7 / 12, 1 / 3, 1 / 12)), (0.5, (0.75, 0.25, 0.0)), (0.25, (1.0, 0.0, 0.0))],
)
def test_sparsemax(strength: float, expected) -> None:
    found = sparsemax(np.array([1.0, 0.5, 0.0]) / (2 * strength))
    np.testing.assert_allclose(found, expected, atol=1e-15)
    padded = sparsemax(np.array([[-np.inf, 1.0, 0.5, 0.0]]) / (2 * strength))
    np.testing.assert_allclose(padded, [[0.0, *expected]], atol=1e-15)


@pytest.mark.parametrize(
    "head",
    [
        LinearHead(RNG.standard_normal((2, 5))),
        ReluHead(RNG.standard_normal((2, 5, 7))),
        LambdaHead(RNG.standard_normal((2, 5)), 0.3),
    ],
    ids=lambda head: type(head).__name__,
)
def test_heads_have_the_gradient_of_their_value(head) -> None:
    a = RNG.standard_normal((2, 3, 5))
    step = 1e-6
    for k in range(5):
        e = step * np.eye(5)[k]
        slope = (head.value(a + e) - head.value(a - e)) / (2 * step)
        np.testing.assert_allclose(head.gradient(a)[..., k], slope, atol=1e-8)
    np.testing.assert_array_equal(head.take(np.array([1])).value(a[1:]), head.value(a)[1:])


def changed(array, at, value):
    out = np.array(array, float)
    out[at] = value
    return out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": changed(TOKENS, (0, 0, 0, 0), np.nan)}, "tokens: got 1 values that are NaN"),
        ({"tokens": TOKENS[0]}, r"tokens: got shape \(3, 4, 5\)"),
        ({"queries": TOKENS[:1, :, 0]}, "queries: got 1 trials; expected 2"),
        ({"labels": ONES[:, :2]}, r"labels: got shape \(2, 2\); expected \(2, 3\)"),
        ({"labels": changed(ONES, (0, 1), 0.0)}, "labels: got 0; expected "),
        ({"head": LinearHead(np.ones((1, 5)))}, "head: got 1 trials"),
        ({"head": LinearHead(np.ones((2, 4)))}, "head: got 4 components; expected 5"),
        ({"sequence": [0, 1, 3]}, "sequence: got numbers from 0 to 3"),
        ({"allowed": np.ones((3, 3), bool)}, r"allowed: got shape \(3, 3\)"),
        ({"allowed": np.arange(3)[:, None] != np.ones((1, 4))}, "sample 1 of trial 0 with no"),
        ({"values": TOKENS[:, :, :3]}, "values: got shape"),
        ({"tokens": 1e80 * TOKENS}, "tokens: got numbers of size .* scale them"),
        ({"queries": 1e-80 * TOKENS[:, :, 0]}, "queries: got numbers of size"),
    ],
)  # fmt: skip
def test_errors(change, says: str) -> None:
    given = {"tokens": TOKENS, "queries": TOKENS[:, :, 0], "labels": ONES, "head": HEAD}
    AttentionData(**given)
    with pytest.raises(AttoscopeError, match=says):
        AttentionData(**(given | change))


def test_errors_of_forms_and_heads() -> None:
    with pytest.raises(AttoscopeError, match="position: got 4"):
        AttentionData.self_attention(TOKENS, ONES, HEAD, position=4)
    with pytest.raises(AttoscopeError, match=r"labels: got shape .*\(trial, sequence, token\)"):
        AttentionData.causal(TOKENS, np.ones((2, 3, 3)), HEAD)
    with pytest.raises(AttoscopeError, match="sequences of one token"):
        AttentionData.causal(TOKENS[:, :, :1], np.ones((2, 3, 1)), HEAD)
    with pytest.raises(AttoscopeError, match="strength: got -1"):
        LambdaHead(np.ones((1, 2)), -1.0)
    relu = AttentionData.cross(TOKENS, TOKENS[:, :, 0], ONES, ReluHead(np.ones((2, 5, 1))))
    with pytest.raises(AttoscopeError, match="scores: got a ReluHead; expected a LinearHead"):
        relu.optimal()


@pytest.mark.parametrize("trials", [9, [0, 9], [], "a"])
def test_trials_that_are_not_there(trials) -> None:
    data = AttentionData.cross(TOKENS, TOKENS[:, :, 0], ONES, HEAD)
    with pytest.raises(
        AttoscopeError, match="trials: got .* expected positions among 2 trials"
    ):
        data.take(trials)


def test_sparsemax_of_other_scores() -> None:
    with as_users_run_it():
        whole = sparsemax(np.array([1, 1, 0], np.uint8))
        np.testing.assert_array_equal(whole, [0.5, 0.5, 0.0])
        np.testing.assert_array_equal(sparsemax([2, -np.inf]), [1.0, 0.0])
    for scores in ([], np.zeros((2, 0)), [np.nan, 1.0], 3.0, [-np.inf, -np.inf]):
        with as_users_run_it(), pytest.raises(AttoscopeError, match="scores: got shape"):
            sparsemax(scores)
