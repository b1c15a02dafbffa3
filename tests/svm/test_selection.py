"""Selections: constructors, and one clear sentence for each bad input."""

from __future__ import annotations

import numpy as np
import pytest

from attoscope import AttoscopeError
from attoscope.svm import AttentionSVM, Selection

KEYS, QUERIES, CHOSEN = np.ones((3, 4, 2)), np.ones((3, 5)), np.array([0, 1, 2])


def bad(array, value):
    array = array.copy()
    array.flat[3] = value
    return array


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": bad(KEYS, np.nan)}, "keys: got 1 values that are NaN or infinite"),
        ({"queries": bad(QUERIES, np.inf)}, "queries: got 1 values that are NaN or infinite"),
        ({"keys": KEYS[0]}, r"keys: got shape \(4, 2\); expected \(sequence, token, width\)"),
        ({"queries": QUERIES[:, 0]}, r"queries: got shape \(3,\)"),
        ({"queries": np.ones((2, 5))}, "got 2 queries and 3 sequences"),
        ({"keys": "no"}, "keys: got str that is no array of numbers"),
        ({"selected": np.zeros((3, 4), bool)}, "3 queries that choose no key"),
        ({"selected": np.ones((3, 4), bool)}, "every allowed key chosen"),
        ({"selected": np.zeros((3, 4))}, r"selected: got shape \(3, 4\) of float64"),
        ({"selected": np.array([0, 1, 9])}, "positions from 0 to 9; expected 0 to 3"),
        ({"sequence": np.array([0, 1, 3])}, "numbers from 0 to 3; expected 0 to 2"),
        ({"sequence": np.array([0.0, 1, 2])}, "expected 3 whole numbers"),
        ({"allowed": np.zeros((3, 4), bool)}, "which it may not see"),
        ({"allowed": np.ones((3, 3), bool)}, r"allowed: got shape \(3, 3\)"),
        ({"required": np.ones((2, 2))}, r"required: got shape \(2, 2\)"),
        ({"required": np.nan}, "required: got 1 values"),
        ({"bias": np.ones((3, 2))}, r"bias: got shape \(3, 2\); expected \(3, 4\)"),
        ({"keys": np.ones((0, 4, 2))}, "none empty"),
    ],
)
def test_one_sentence_per_bad_input(arguments, message) -> None:
    given = {"keys": KEYS, "queries": QUERIES, "selected": CHOSEN, **arguments}
    with pytest.raises(AttoscopeError, match=message) as caught:
        Selection(**given)
    assert "\n" not in str(caught.value)


def test_the_estimator_says_the_same_before_it_starts() -> None:
    with pytest.raises(AttoscopeError, match="NaN or infinite"):
        AttentionSVM().fit(bad(KEYS, np.nan), QUERIES, CHOSEN)


def test_ragged_sequences() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((size, 3)) for size in (2, 5, 3)]
    selection = Selection.cross(parts, rng.standard_normal((3, 4)), [1, 0, 2])
    assert selection.allowed.sum(1).tolist() == [2, 5, 3]
    assert selection.constraint_count == 1 + 4 + 2
    same = Selection.cross(selection.keys, selection.queries, [1, 0, 2], lengths=[2, 5, 3])
    np.testing.assert_array_equal(same.allowed, selection.allowed)
    far = selection.keys.copy()
    far[0, 2:] = 1e3
    model = AttentionSVM(tol=1e-9)
    first = model.fit_selection(selection).weight_
    second = model.fit_selection(selection.replace(keys=far)).weight_
    np.testing.assert_allclose(first, second, atol=1e-9)


def test_causal_queries_see_what_came_before() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.standard_normal((2, 5, 8))
    chosen = np.array([[0, 0, 1, 2, 0], [0, 1, 1, 0, 4]])
    selection = Selection.causal(tokens, chosen)
    assert selection.shape == (8, 5, 8, 8)
    assert selection.sequence.tolist() == [0] * 4 + [1] * 4
    assert selection.allowed.sum(1).tolist() == [2, 3, 4, 5] * 2
    np.testing.assert_array_equal(selection.queries[0], tokens[0, 1])
    model = AttentionSVM().fit_selection(selection)
    best = selection.scores(model.weight_).argmax(1)
    np.testing.assert_array_equal(best, chosen[:, 1:].ravel())
    every = Selection.every_position(tokens, chosen, lengths=[5, 4][:2] if False else None)
    assert every.shape == (10, 5, 8, 8) and every.allowed.all()


def test_self_attention_takes_its_query_from_the_tokens() -> None:
    tokens = np.random.default_rng(2).standard_normal((3, 4, 6))
    selection = Selection.self_attention(tokens, [1, 2, 0], position=-1)
    np.testing.assert_array_equal(selection.queries, tokens[:, -1])
    with pytest.raises(AttoscopeError, match="position: got 4"):
        Selection.self_attention(tokens, [1, 2, 0], position=4)


def test_duplicates_are_reported_and_can_be_left_out() -> None:
    tokens = np.random.default_rng(3).standard_normal((2, 5, 3))
    tokens[1, 4] = tokens[1, 2]
    selection = Selection.cross(tokens, np.eye(3)[:2], [0, 2])
    assert selection.duplicates().tolist() == [[1, 4]]
    rest = selection.without(selection.duplicates())
    assert rest.duplicates().tolist() == []
    assert rest.constraint_count == selection.constraint_count - 1


def test_margins_and_scores() -> None:
    rng = np.random.default_rng(4)
    keys, queries = rng.standard_normal((2, 3, 4)), rng.standard_normal((5, 6))
    bias = rng.standard_normal((5, 3))
    order = np.array([1, 0, 1, 1, 0])
    selection = Selection(keys, queries, [0, 1, 2, 0, 1], order, bias=bias)
    weight = rng.standard_normal((4, 6))
    expected = np.einsum("ntk,kd,nd->nt", keys[order], weight, queries) + bias
    np.testing.assert_allclose(selection.scores(weight), expected, atol=1e-12)
    margins = selection.margins(weight)
    own = expected[np.arange(5), [0, 1, 2, 0, 1]]
    np.testing.assert_allclose(margins, own[:, None] - expected, atol=1e-12)
    with pytest.raises(AttoscopeError, match="expected"):
        selection.margins(weight.T)
