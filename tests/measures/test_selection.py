"""What heads select: closed forms first, then invariances, then bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attoscope.measures import RowSampler, Selection
from attoscope.measures.rowstats import expected_gap
from tests.measures.build import batch, call, layer, read

ATTENTION = (
    "normalised_entropy",
    "effective_keys",
    "effective_keys_max",
    "first_share",
    "special_share",
    "content_entropy",
    "margin",
    "undecided",
    "saturated",
    "score_scale",
)


def measured(*calls, rows=None, documents=(0,), **options):
    measure = Selection(rows=rows)
    measure.update(layer(calls=calls, **options), batch(*documents))
    return measure


def values(measure):
    return {name: reading.values for name, reading in read(measure).items()}


def test_uniform_rows():
    got = values(measured(call(torch.zeros(1, 2, 8, 8))))
    expected = {
        "normalised_entropy": 1.0,
        "effective_keys": 8.0,
        "effective_keys_max": 8.0,
        "first_share": 1 / 8,
        "special_share": 0.0,
        "content_entropy": 1.0,
        "margin": 0.0,
        "undecided": 1.0,
        "saturated": 0.0,
        "score_scale": 0.0,
        "sink_mass": 0.0,
        "non_finite_rows": 0.0,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, atol=1e-6, err_msg=name)


def test_one_hot_rows():
    """Every query looks at itself, 200 nats above the rest."""
    got = values(measured(call(200 * torch.eye(8)[None, None])))
    expected = {
        "normalised_entropy": 0.0,
        "effective_keys": 1.0,
        "effective_keys_max": 1.0,
        "first_share": 1 / 8,
        # The first token's own row leaves nothing on content and does not count.
        "content_entropy": 0.0,
        "margin": 200.0,
        "undecided": 0.0,
        "saturated": 1.0,
        "score_scale": 200 * math.sqrt(7) / 8,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, rtol=1e-6, err_msg=name)


def test_two_level_rows_follow_the_formula():
    """One key at a, n - 1 keys at 0: everything in closed form."""
    n, a = 6, 1.5
    scores = torch.zeros(1, 1, n, n)
    scores[..., 2] = a
    got = values(measured(call(scores)))
    z = math.exp(a) + n - 1
    top, rest = math.exp(a) / z, 1 / z
    entropy = -top * math.log(top) - (n - 1) * rest * math.log(rest)
    content = z - 1
    high, low = math.exp(a) / content, 1 / content
    on_content = -high * math.log(high) - (n - 2) * low * math.log(low)
    expected = {
        "normalised_entropy": entropy / math.log(n),
        "effective_keys": math.exp(entropy),
        "effective_keys_max": 1 / top,
        "first_share": rest,
        "content_entropy": on_content / math.log(n - 1),
        "margin": a,
        "undecided": float(top < 2 / n),
        "score_scale": a * math.sqrt(n - 1) / n,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)


def test_against_a_plain_computation():
    """Random scores with a causal mask and special tokens, row by row in float64."""
    torch.manual_seed(0)
    scores = 2 * torch.randn(2, 3, 9, 9)
    special = torch.zeros(2, 9, dtype=torch.bool)
    special[:, [0, 8]] = True
    got = values(measured(call(scores, causal=True), special=special, documents=(0, 1)))
    plain = {name: np.zeros((2, 3)) for name in ATTENTION}
    for b in range(2):
        for h in range(3):
            table = [_row(scores[b, h, q, : q + 1].double().numpy(), q) for q in range(9)]
            for name in ATTENTION:
                plain[name][b, h] = np.nanmean([row[name] for row in table])
    for name in ATTENTION:
        np.testing.assert_allclose(got[name][0], plain[name].mean(0), rtol=2e-6, err_msg=name)


def _row(s, q):
    n = len(s)
    w = np.exp(s - s.max())
    w /= w.sum()
    content = w[1 : min(n, 8)]
    p = content / content.sum() if len(content) else content
    two = 1.0 if n >= 2 else math.nan
    entropy = -(w * np.log(w)).sum()
    ordered = np.sort(s)[::-1]
    return {
        "normalised_entropy": entropy / math.log(n) if n > 1 else math.nan,
        "effective_keys": math.exp(entropy) if n > 1 else math.nan,
        "effective_keys_max": 1 / w.max(),
        "first_share": w[0],
        "special_share": w[0] + (w[8] if n == 9 else 0),
        "content_entropy": -(p * np.log(p)).sum() / math.log(len(p))
        if len(p) > 1
        else math.nan,
        "margin": ordered[0] - ordered[1] if n > 1 else math.nan,
        "undecided": float(w.max() < 2 / n) if n > 2 else math.nan,
        "saturated": two * float(ordered[0] - ordered[-1 if n < 2 else 1] > 24 * math.log(2)),
        "score_scale": s.std() * two,
    }


def test_a_sink_term_takes_its_share_and_nothing_else_changes():
    scores = torch.zeros(1, 1, 4, 4)
    got = values(measured(call(scores, sinks=torch.tensor([math.log(4.0)]))))
    np.testing.assert_allclose(got["sink_mass"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(got["normalised_entropy"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(got["first_share"], 0.25, rtol=1e-6)


def test_nulls_in_closed_form():
    special = torch.zeros(1, 8, dtype=torch.bool)
    special[:, [0, 6, 7]] = True
    readings = read(measured(call(torch.randn(1, 1, 8, 8)), special=special))
    assert readings["first_share"].null[0, 0] == pytest.approx(1 / 8)
    assert readings["special_share"].null[0, 0] == pytest.approx(3 / 8)
    assert readings["score_scale"].null[0, 0] == pytest.approx(math.sqrt(2 * math.log(8)))


@pytest.mark.parametrize(
    ("keys", "gap"),
    # k = 2: 2 / sqrt(pi); k = 3: 3 / (2 sqrt(pi)), both exact.
    [(2, 2 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi))],
)
def test_expected_gap_of_gaussians(keys, gap):
    assert float(expected_gap(torch.tensor([float(keys)]))) == pytest.approx(gap, rel=1e-6)


def test_expected_gap_agrees_with_a_simulation():
    draws = np.sort(np.random.default_rng(0).standard_normal((20_000, 100)), 1)
    simulated = (draws[:, -1] - draws[:, -2]).mean()
    assert float(expected_gap(torch.tensor([100.0]))) == pytest.approx(simulated, rel=0.03)


def test_margin_of_random_scores_meets_its_null():
    torch.manual_seed(1)
    reading = read(measured(call(3 * torch.randn(1, 4, 200, 64))))["margin"]
    np.testing.assert_allclose(reading.values, reading.null, rtol=0.25)
    assert reading.values.mean() == pytest.approx(reading.null.mean(), rel=0.1)


def test_write_of_a_head_is_the_norm_of_what_it_adds():
    torch.manual_seed(0)
    output, weight = torch.randn(2, 5, 3, 4), torch.randn(3, 4, 12)
    stream = torch.randn(2, 5, 12)
    one = call(torch.zeros(2, 3, 5, 5), output=output, output_weight=weight)
    got = values(measured(one, stream=stream, before=stream, documents=(0, 1)))["head_write"]
    added = torch.einsum("bqhv,hvw->bqhw", output, weight).norm(dim=-1)
    expected = (added / stream.norm(dim=-1)[..., None]).mean((0, 1))
    np.testing.assert_allclose(got[0], expected.numpy(), rtol=1e-5)


def test_write_without_the_projection_says_so():
    one = call(torch.zeros(1, 3, 5, 5), output=torch.randn(1, 5, 3, 4))
    reading = read(measured(one))["head_write"]
    assert reading.values.mean() == pytest.approx(1.0)
    assert "relative to the mean head" in reading.reason


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 4), (2, 2)])
def test_padding_changes_nothing(left, right):
    torch.manual_seed(0)
    n = 10
    scores = 2 * torch.randn(1, 2, n, n)
    alone = values(measured(call(scores)))
    size = n + left + right
    # Padding attends and is attended to by garbage, NaN included, unless it is left out.
    wide = torch.full((1, 2, size, size), math.nan)
    wide[..., left : left + n, left : left + n] = scores
    valid = torch.zeros(1, size, dtype=torch.bool)
    valid[:, left : left + n] = True
    wide[..., ~valid[0]] = 50.0
    one = call(wide, mask=valid[:, None, None])
    inside = values(measured(one, valid=valid, special=~valid))
    for name in (*ATTENTION, "non_finite_rows"):
        np.testing.assert_allclose(inside[name], alone[name], atol=1e-5, err_msg=name)


def _two_halves():
    torch.manual_seed(0)
    scores = torch.randn(4, 2, 12, 12)
    both, first, second = Selection(rows=5), Selection(rows=5), Selection(rows=5)
    tokens = tuple(tuple(f"{d}.{i}" for i in range(12)) for d in range(4))
    for d in range(4):
        one = layer(calls=[call(scores[d : d + 1])])
        say = batch(d, tokens=tokens[d : d + 1])
        both.update(one, say)
        (first if d % 2 else second).update(one, say)
    return both, first, second


def _same(a, b):
    for x, y in zip(a.read(), b.read(), strict=True):
        for field in ("values", "low", "high", "null", "row_error"):
            np.testing.assert_array_equal(getattr(x, field), getattr(y, field), err_msg=x.name)
    assert a.witnesses == b.witnesses


def test_merging_equals_a_single_pass_to_the_last_digit():
    both, first, second = _two_halves()
    first.merge(second)
    _same(first, both)


def test_the_order_of_documents_changes_nothing():
    both, first, second = _two_halves()
    second.merge(first)
    _same(second, both)


def test_batched_equals_one_by_one():
    both, _, _ = _two_halves()
    torch.manual_seed(0)
    tokens = tuple(tuple(f"{d}.{i}" for i in range(12)) for d in range(4))
    together = Selection(rows=5)
    scores = torch.randn(4, 2, 12, 12)
    together.update(layer(calls=[call(scores)]), batch(0, 1, 2, 3, tokens=tokens))
    for x, y in zip(together.read(), both.read(), strict=True):
        np.testing.assert_allclose(x.values, y.values, rtol=1e-5, err_msg=x.name)


def test_merging_another_kind_is_refused():
    from attoscope.measures import Stream

    with pytest.raises(ValueError, match="cannot merge Stream into Selection"):
        Selection().merge(Stream())


def test_blocks_of_rows_change_nothing():
    torch.manual_seed(0)
    one = layer(calls=[call(torch.randn(2, 3, 20, 20), causal=True)])
    small, large = Selection(budget_bytes=1000), Selection(budget_bytes=2**30)
    for measure in (small, large):
        measure.update(one, batch(0, 1))
    for x, y in zip(small.read(), large.read(), strict=True):
        np.testing.assert_allclose(x.values, y.values, rtol=1e-5, err_msg=x.name)
    assert {k: (w.document, w.position, w.chosen) for k, w in small.witnesses.items()} == {
        k: (w.document, w.position, w.chosen) for k, w in large.witnesses.items()
    }


def test_a_sample_of_rows_is_as_far_off_as_its_error_says():
    torch.manual_seed(0)
    one = layer(calls=[call(2 * torch.randn(1, 64, 300, 50))])
    whole = values(measured(*one.calls))["score_scale"]
    reading = read(measured(*one.calls, rows=40))["score_scale"]
    # 64 heads, so 64 draws of (sample - truth) / error: mean square near 1.
    pulls = (reading.values - whole) / reading.row_error
    assert 0.6 < float(np.sqrt((pulls**2).mean())) < 1.4


def test_all_rows_leave_no_sampling_error():
    reading = read(measured(call(torch.randn(1, 2, 9, 9))))["margin"]
    np.testing.assert_array_equal(reading.row_error, 0.0)


def test_the_sampler_picks_the_same_words_whatever_the_padding():
    valid = torch.zeros(1, 40, dtype=torch.bool)
    valid[:, 5:35] = True
    moved = valid.roll(-5, 1)
    sampler = RowSampler(rows=8, seed=3)
    here, _ = sampler(valid, (7,))
    there, _ = sampler(moved, (7,))
    assert (here - 5).tolist() == there.tolist()
    assert sampler(valid, (8,))[0].tolist() != here.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16)
    one = call(torch.zeros(1, 2, 12, 12))
    one.query, one.key, one.scale = query, key, 0.25
    two = call(torch.zeros(1, 2, 12, 12))
    two.query, two.key, two.scale = query.to(dtype), key.to(dtype), 0.25
    exact, half = values(measured(one)), values(measured(two))
    for name in ("normalised_entropy", "score_scale", "margin", "first_share"):
        np.testing.assert_allclose(half[name], exact[name], atol=0.02, err_msg=name)


def test_scores_that_are_not_finite_are_said_and_shut_in():
    scores = torch.randn(1, 3, 6, 6)
    scores[:, 1, 2, 3] = math.nan
    readings = read(measured(call(scores)))
    assert readings["non_finite_rows"].values[0].tolist() == pytest.approx([0, 1 / 6, 0])
    for name in ATTENTION:
        finite = np.isfinite(readings[name].values[0])
        assert finite.tolist() == [True, False, True], name
        assert "not finite" in readings[name].reason


def test_huge_scores_stay_right():
    """A forbidden key is never let in, however low the true scores are."""
    scores = torch.full((1, 1, 4, 4), -2e5)
    got = values(measured(call(scores, causal=True)))
    np.testing.assert_allclose(got["normalised_entropy"], 1.0, atol=1e-6)
    got = values(measured(call(-scores, causal=True)))
    np.testing.assert_allclose(got["normalised_entropy"], 1.0, atol=1e-6)


def test_one_token():
    readings = read(measured(call(torch.zeros(1, 2, 1, 1))))
    assert np.isnan(readings["normalised_entropy"].values).all()
    assert "fewer than two keys" in readings["normalised_entropy"].reason
    np.testing.assert_array_equal(readings["first_share"].values, 1.0)
    assert readings["first_share"].low is None
    assert "at least two documents" in readings["first_share"].reason


def test_a_row_that_may_see_nothing_is_left_out():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 0, :] = False
    readings = read(measured(call(torch.zeros(1, 1, 4, 4), mask=mask)))
    np.testing.assert_allclose(readings["effective_keys"].values, 4.0, rtol=1e-6)
    np.testing.assert_array_equal(readings["non_finite_rows"].values, 0.0)


def test_witnesses_are_the_sharpest_and_the_evenest_row():
    scores = torch.zeros(1, 1, 8, 8)
    scores[0, 0, 5, 3] = 6.0
    # The sink has more than all others, and is not what the row chose.
    scores[0, 0, 5, 0] = 9.0
    scores[0, 0, 2] = torch.randn(8, generator=torch.manual_seed(0)) * 0.5
    tokens = (tuple("abcdefgh"),)
    measure = Selection()
    measure.update(layer(calls=[call(scores)]), batch(0, tokens=tokens))
    sharp = measure.witnesses["decided", "encoder.0", 0]
    assert (sharp.position, sharp.token, sharp.chosen, sharp.chosen_token) == (5, "f", 3, "d")
    assert sharp.value == pytest.approx(math.exp(6) / (math.exp(9) + math.exp(6) + 6), rel=1e-5)
    even = measure.witnesses["undecided", "encoder.0", 0]
    # The first of the rows that are exactly even; row 0 asks as the first token: left out.
    assert even.position == 1
