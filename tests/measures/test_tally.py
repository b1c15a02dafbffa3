"""Sums over documents: their interval is a bootstrap, and they add up."""

from __future__ import annotations

import numpy as np
import pytest

from attoscope.measures.base import Reading, Spec, with_null
from attoscope.measures.tally import Tally

SPEC = Spec("x", "X", "", "", (None, None), "", missing="it has none")


def tally(values, documents=None, **options):
    one = Tally(("x",), **options)
    values = np.asarray(values, float)
    for d, x in zip(documents or range(len(values)), values, strict=True):
        one.add("encoder.0", (d,), np.array([[x]]))
    return one


def reading(one):
    return one.readings([SPEC], ("point",))[0]


def test_the_reading_is_the_mean_over_documents():
    assert reading(tally([1.0, 2.0, 6.0])).values[0] == 3.0


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        one = Tally(("x",), seed=trial)
        one.add("p", range(40), rng.exponential(size=(40, 1)))
        got = reading(one)
        hits += got.low[0] <= 1.0 <= got.high[0]
    assert 175 <= hits <= 198


def test_one_document_has_no_interval_and_says_why():
    got = reading(tally([1.0]))
    assert got.low is None and got.high is None
    assert got.reason == "no interval: it takes at least two documents"


def test_documents_without_a_value_are_left_out_and_counted():
    got = reading(tally([1.0, np.nan, 3.0]))
    assert got.values[0] == 2.0
    assert got.reason == "1 of 3 documents not counted: it has none"


def test_pieces_of_one_document_are_one_document():
    """A layer that cuts documents into windows sees several sequences of each."""
    pieces = Tally(("x",))
    pieces.add("encoder.0", (4, 4, 9, 9), np.array([[1.0], [3.0], [5.0], [np.nan]]))
    whole = tally([2.0, 5.0], [4, 9])
    for a, b in ((pieces, whole),):
        assert reading(a).values[0] == reading(b).values[0]
        assert reading(a).low[0] == reading(b).low[0]


def test_any_order_and_any_shards_give_the_same_digits():
    rng = np.random.default_rng(1)
    values = rng.normal(size=300) * 10.0 ** rng.integers(-2, 2, 300)
    one = reading(tally(values))
    order = rng.permutation(300)
    parts = [tally(values[part], [int(i) for i in part]) for part in np.array_split(order, 7)]
    first = parts[0]
    for part in parts[1:]:
        first.merge(part)
    other = reading(first)
    for field in ("values", "low", "high"):
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


def test_merging_leaves_the_other_alone():
    a, b = tally([1.0, 2.0]), Tally(("x",))
    b.merge(a)
    b.merge(tally([9.0], [7]))
    assert reading(a).values[0] == 1.5


def test_tallies_of_different_seeds_do_not_mix():
    with pytest.raises(ValueError, match="seed 1.*seed 0.*build both the same way"):
        tally([1.0]).merge(tally([1.0], seed=1))


def test_layers_with_different_numbers_of_heads():
    one = Tally(("x",))
    one.add("encoder.0", (0,), np.ones((1, 1, 2)))
    one.add("encoder.1", (0,), np.ones((1, 1, 3)))
    got = one.readings([SPEC], ("site", "head"))[0]
    assert got.coords["head"] == (0, 1, 2)
    np.testing.assert_array_equal(np.isnan(got.values), [[False, False, True], [False] * 3])


def _reading(points, values, null=None):
    return Reading(
        "x", "", "", "", (None, None), ("point",), {"point": points}, values, null=null
    )


def test_nulls_are_joined_by_label():
    real = _reading(("a", "b", "c"), np.array([1.0, 2.0, 3.0]))
    null = _reading(("c", "a"), np.array([30.0, 10.0]))
    got = with_null([real], [null], "shuffled")[0]
    np.testing.assert_array_equal(got.null, [10.0, np.nan, 30.0])
    assert got.null_meaning == "shuffled"


def test_a_null_in_closed_form_stays():
    real = _reading(("a",), np.array([1.0]), null=np.array([5.0]))
    got = with_null([real], [_reading(("a",), np.array([9.0]))], "shuffled")[0]
    assert got.null[0] == 5.0
