"""Readings of layers whose attention is known, and moments of gradients that are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attoscope.monitor import gradients
from attoscope.monitor.readings import LayerReader, at_sequences
from attoscope.trace.types import AttentionCall, Layer, Site

TOKENS, HEADS, SIZE = 4, 2, 4


def known_layer(scores: torch.Tensor, stream_out: torch.Tensor | None = None) -> Layer:
    """A layer whose attention logits, not causal, are `scores` (head, query, key)."""
    key = torch.eye(SIZE).expand(3, HEADS, TOKENS, SIZE)
    query = scores.expand(3, HEADS, TOKENS, SIZE)
    call = AttentionCall(query, key, key, 1.0, "sdpa", site=Site("encoder", 0))
    valid = torch.ones(3, TOKENS, dtype=torch.bool)
    before = torch.ones(3, TOKENS, SIZE)
    after = 2 * before if stream_out is None else stream_out
    return Layer(
        "encoder", 0, "layers.0", (call,), before, after, valid, torch.zeros_like(valid)
    )


def test_attention_of_known_scores() -> None:
    # Head 0 is even; head 1 puts ln 3 on one key: weights 1/2, 1/6, 1/6, 1/6.
    scores = torch.zeros(HEADS, TOKENS, TOKENS)
    scores[1, :, 2] = math.log(3)
    found = LayerReader()(known_layer(scores))
    entropy = (math.log(2) / 2 + math.log(6) / 2) / math.log(4)
    spread = math.log(3) * math.sqrt(3) / 4
    expected = {
        "normalised_entropy": (1 + entropy) / 2,
        "least_entropy": entropy,
        "score_scale": spread / 2,
        "largest_scale": spread,
        "largest_score": math.log(3),
        "margin": math.log(3) / 2,
        # 1/2 is twice the even share: decided.
        "undecided": 0.5,
        "saturated": 0.0,
        "saturated_heads": 0.0,
        "non_finite": 0.0,
    }
    for name, value in expected.items():
        assert found[f"{name}/encoder.0"] == pytest.approx(value, abs=1e-6), name


def test_a_saturated_head_is_seen_and_an_even_one_is_not() -> None:
    scores = torch.zeros(HEADS, TOKENS, TOKENS)
    scores[1, :, 0] = 40.0
    found = LayerReader()(known_layer(scores))
    assert found["saturated/encoder.0"] == 0.5
    assert found["saturated_heads/encoder.0"] == 0.5
    assert found["largest_score/encoder.0"] == 40.0


def test_stream_of_known_vectors() -> None:
    out = torch.zeros(3, TOKENS, SIZE)
    # Content tokens (the first is left out) are orthogonal, of norm 6.
    for token in range(1, TOKENS):
        out[:, token, token] = 6.0
    found = LayerReader()(known_layer(torch.zeros(HEADS, TOKENS, TOKENS), out))
    change = math.sqrt(3 + 25)
    assert found["norm/encoder.0"] == pytest.approx(6.0)
    assert found["growth/encoder.0"] == pytest.approx(3.0)
    assert found["update_ratio/encoder.0"] == pytest.approx(change / 2)
    assert found["cosine/encoder.0"] == pytest.approx(0.0, abs=1e-6)
    assert found["rank_one_residual/encoder.0"] == pytest.approx(math.sqrt(2 / 3), abs=1e-5)


def test_a_collapsed_stream() -> None:
    found = LayerReader()(known_layer(torch.zeros(HEADS, TOKENS, TOKENS)))
    assert found["cosine/encoder.0"] == pytest.approx(1.0)
    assert found["rank_one_residual/encoder.0"] == pytest.approx(0.0, abs=1e-3)


def test_readings_are_in_full_precision_whatever_the_model_runs_in() -> None:
    layer = known_layer(torch.randn(HEADS, TOKENS, TOKENS), torch.randn(3, TOKENS, SIZE))
    plain = LayerReader()(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert LayerReader()(layer) == plain


@pytest.mark.parametrize("where", ["scores", "stream"])
def test_not_finite_is_said_wherever_it_is(where: str) -> None:
    scores = torch.zeros(HEADS, TOKENS, TOKENS)
    out = torch.ones(3, TOKENS, SIZE)
    (scores if where == "scores" else out)[0, 2, 1] = math.nan
    found = LayerReader()(known_layer(scores, out))
    assert found["non_finite/encoder.0"] == 1.0


def test_only_some_sequences_are_read_and_masks_go_with_them() -> None:
    call = known_layer(torch.randn(HEADS, TOKENS, TOKENS)).calls[0]
    call.mask = torch.arange(3.0)[:, None, None, None].expand(3, 1, TOKENS, TOKENS)
    some = at_sequences(call, torch.tensor([0, 2]))
    assert some.shape[0] == 2 and some.mask is not None
    assert some.mask[:, 0, 0, 0].tolist() == [0.0, 2.0]
    shared = at_sequences(
        AttentionCall(call.query, call.key, None, 1.0, "sdpa", mask=call.mask[:1]),
        torch.tensor([1]),
    )
    assert shared.mask is not None and shared.mask.shape[0] == 1


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))
        self.head = nn.Linear(1, 1, bias=False)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)


def test_moments_of_known_gradients() -> None:
    model = Two()
    groups = gradients.by_layer(model, {"encoder.0": "layers.0", "encoder.1": "layers.1"})
    assert {site: len(group) for site, group in groups.items()} == {
        "encoder.0": 1,
        "encoder.1": 1,
        "rest": 1,
    }
    model.layers[0].weight.grad = torch.tensor([[3.0, -4.0]]) * 8
    model.head.weight.grad = torch.tensor([[12.0]]) * 8
    found = gradients.moments(groups, scale=8.0)
    assert found["gradient_norm/encoder.0"] == pytest.approx(5.0)
    assert found["gradient_rms/encoder.0"] == pytest.approx(5 / math.sqrt(2))
    assert found["gradient_mean/encoder.0"] == pytest.approx(-0.5)
    assert found["gradient_peak/encoder.0"] == pytest.approx(4 / (5 / math.sqrt(2)))
    assert found["gradient_norm"] == pytest.approx(13.0)
    assert "gradient_norm/encoder.1" not in found
    assert gradients.moments({"rest": [nn.Parameter(torch.ones(1))]}) == {}


def test_surprise_is_one_when_gradients_stay_and_more_when_they_jump() -> None:
    weight = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.Adam([weight], lr=0.0, betas=(0.9, 0.5))
    found = []
    for size in (1.0, 1.0, 3.0):
        weight.grad = torch.full((5,), size)
        optimizer.step()
        found.append(
            gradients.adam_surprise({"rest": [weight]}, optimizer)["adam_surprise/rest"]
        )
    # Second moment after the jump: (0.25 * 1 + 0.125 * 1 + ...) by hand: 0.5^2 * 0.5 + ...
    square = 0.5 * (0.25 * 1 + 0.5 * 1 + 9)
    assert found[:2] == pytest.approx([1.0, 1.0])
    assert found[2] == pytest.approx(3 / math.sqrt(square / (1 - 0.5**3)))
    assert gradients.adam_surprise({"rest": [weight]}, torch.optim.SGD([weight])) == {}
