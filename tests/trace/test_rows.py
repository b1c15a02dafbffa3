"""Rows of attention against closed forms and against torch's own kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attoscope.trace import AttentionCall, attention_rows, row_blocks


def call(
    queries: int = 5, keys: int = 7, heads: int = 4, groups: int = 2, batch: int = 2, **options
) -> AttentionCall:
    torch.manual_seed(0)
    return AttentionCall(
        torch.randn(batch, heads, queries, 8),
        torch.randn(batch, groups, keys, 8),
        torch.randn(batch, groups, keys, 3),
        options.pop("scale", 8**-0.5),
        "sdpa",
        **options,
    )


def every(one: AttentionCall) -> torch.Tensor:
    return torch.arange(one.shape[2]).expand(one.shape[0], -1)


def test_scores_of_known_vectors() -> None:
    """q = (1, 0), keys (ln 1, ·), (ln 2, ·), (ln 5, ·): weights 1/8, 2/8, 5/8."""
    key = torch.tensor([[0.0, 9.0], [math.log(2), -3.0], [math.log(5), 1.0]])[None, None]
    one = AttentionCall(torch.tensor([[[[1.0, 0.0]]]]), key, None, 1.0, "sdpa")
    rows = attention_rows(one, torch.tensor([[0]]))
    torch.testing.assert_close(rows.weights[0, 0, 0], torch.tensor([1, 2, 5]) / 8)
    assert rows.sink_mass.item() == 0


@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "additive"])
def test_against_the_kernel(kind: str) -> None:
    """weights @ values = scaled_dot_product_attention, with grouped heads and each mask."""
    one = call(queries=7, keys=7)
    boolean = torch.rand(2, 1, 7, 7) < 0.6
    boolean[..., 0] = True
    if kind == "causal":
        one.causal = True
    elif kind == "boolean":
        one.mask = boolean
    elif kind == "additive":
        one.mask = torch.randn(2, 4, 7, 7)
    expected = scaled_dot_product_attention(
        one.query, one.key, one.value, one.mask, 0.0, one.causal, enable_gqa=True
    )
    weights = attention_rows(one, every(one)).weights
    got = weights @ one.value.repeat_interleave(2, 1)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_forbidden_keys_stay_forbidden_at_extreme_scores() -> None:
    """True scores near -2e5 and a mask of finfo.min: adding would let the forbidden key in."""
    key = torch.tensor([[-2e5], [-2.1e5], [2e5]])[None, None]
    mask = torch.tensor([0.0, 0.0, torch.finfo(torch.float32).min])[None, None, None]
    one = AttentionCall(torch.ones(1, 1, 1, 1), key, None, 1.0, "sdpa", mask=mask)
    rows = attention_rows(one, torch.tensor([[0]]))
    assert rows.weights[0, 0, 0].tolist() == [1.0, 0.0, 0.0]
    assert rows.scores[0, 0, 0, 2] == -math.inf
    one.mask = torch.tensor([False, True, True])[None, None, None]
    assert attention_rows(one, torch.tensor([[0]])).weights[0, 0, 0].tolist() == [0, 0, 1]


def test_a_bias_is_no_mask() -> None:
    one = call(mask=torch.full((1, 1, 5, 7), -50.0))
    assert attention_rows(one, every(one)).allowed.all()


def test_a_row_with_nothing_allowed_is_zero() -> None:
    one = call(mask=torch.zeros(1, 1, 5, 7, dtype=torch.bool))
    rows = attention_rows(one, every(one))
    assert rows.weights.abs().sum() == 0 and not rows.weights.isnan().any()


def test_soft_cap() -> None:
    plain, capped = call(), call(softcap=0.1)
    bare = attention_rows(plain, every(plain)).scores
    torch.testing.assert_close(
        attention_rows(capped, every(capped)).scores, 0.1 * torch.tanh(bare / 0.1)
    )


def test_sinks_take_their_share() -> None:
    """One key with score s and a sink with logit b: the key gets sigmoid(s - b)."""
    one = AttentionCall(
        torch.ones(1, 2, 1, 1), torch.full((1, 2, 1, 1), 1.5), None, 1.0, "registry",
        sinks=torch.tensor([0.5, -2.0]),
    )  # fmt: skip
    rows = attention_rows(one, torch.tensor([[0]]))
    expected = torch.sigmoid(torch.tensor([1.0, 3.5]))
    torch.testing.assert_close(rows.weights.flatten(), expected)
    torch.testing.assert_close(rows.sink_mass.flatten(), 1 - expected)


def test_grouped_heads_read_their_key_head() -> None:
    one = call(heads=6, groups=2)
    assert one.key_head().tolist() == [0, 0, 0, 1, 1, 1]
    scores = attention_rows(one, every(one)).scores
    direct = one.query[:, 4] @ one.key[:, 1].transpose(-1, -2) * one.scale
    torch.testing.assert_close(scores[:, 4], direct)


def test_blocks_are_the_whole() -> None:
    one = call(queries=33, keys=33, causal=True)
    positions = every(one)
    whole = attention_rows(one, positions)
    parts = list(row_blocks(one, positions, budget_bytes=2 * 4 * 33 * 4 * 5))
    assert [block.stop - block.start for block, _ in parts] == [5] * 6 + [3]
    torch.testing.assert_close(
        torch.cat([rows.weights for _, rows in parts], 2), whole.weights, rtol=0, atol=1e-6
    )
    # A budget that is too small for one row still gives rows, one at a time.
    assert sum(1 for _ in row_blocks(one, positions, budget_bytes=1)) == 33


def test_chosen_positions_differ_by_sequence() -> None:
    one = call(causal=True, queries=7)
    whole = attention_rows(one, every(one))
    some = attention_rows(one, torch.tensor([[6, 0], [2, 2]]))
    torch.testing.assert_close(some.weights[0], whole.weights[0][:, [6, 0]])
    torch.testing.assert_close(some.weights[1], whole.weights[1][:, [2, 2]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_in_float32(dtype: torch.dtype) -> None:
    one = call()
    half = AttentionCall(
        one.query.to(dtype), one.key.to(dtype), one.value, one.scale, "sdpa", causal=True
    )
    rows = attention_rows(half, every(half))
    assert rows.weights.dtype == torch.float32
    assert (rows.weights.sum(-1) - 1).abs().max() < 1e-6
