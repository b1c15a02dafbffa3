"""NeuTRENO in live models: what each layer computes, and what the anchor is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attoscope
from attoscope import AttoscopeError
from attoscope.remedies.functional import neutreno_attention
from attoscope.trace import Batch, Subject
from tests.models import HEADS, WIDTH
from tests.remedies.treated import data_of, output, read, sized

MODELS = (
    "bert", "vit", "gpt2", "llama", "bloom", "deberta", "mistral", "nano", "nano_fused",
    "encoder", "encoder_time_first",
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_later_layer_gives_the_paper_s_sum(name: str) -> None:
    subject, batch = sized(name)
    treatment = attoscope.treat(
        subject.model, "neutreno", data_of(subject, batch), strength=0.4
    )
    calls = read(subject, batch, treatment)
    assert len(calls) == 3
    for layer, call in enumerate(calls):
        first = calls[0].values if layer else None
        expected = neutreno_attention(call.weights, call.values, first, 0.4)
        rows = call.valid[:, None, :, None].expand_as(expected)
        torch.testing.assert_close(call.into[rows], expected[rows], rtol=0, atol=2e-5)


def test_a_known_value_by_hand() -> None:
    """Identity projections and uniform attention, tokens e_1 and e_2. Layer 0 gives (1/2, 1/2) to
    each. Layer 1 reads x = e_i + (1/2, 1/2), of mean (1, 1); strength 0.6 adds 0.6 (e_i - x)."""

    class Uniform(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.o = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            for linear in (self.v, self.o):
                nn.init.eye_(linear.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            v = self.v(x)[:, None]
            q = torch.zeros_like(v)
            heads = nn.functional.scaled_dot_product_attention(q, q, v)
            return x + self.o(heads[:, 0])

    model = nn.Sequential(Uniform(), Uniform())
    x = torch.eye(2)[None]
    attoscope.treat(model, "neutreno", x, strength=0.6)
    expected = torch.tensor([[[2.2, 1.2], [1.2, 2.2]]])
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2", "llama", "t5", "nano"])
def test_strength_zero_is_the_model_bit_for_bit(name: str) -> None:
    subject, batch = sized(name)
    before = output(subject, batch)
    attoscope.treat(subject.model, "neutreno", data_of(subject, batch), strength=0.0)
    assert torch.equal(output(subject, batch), before)


def test_strength_can_be_set_between_steps() -> None:
    subject, batch = sized("bert")
    before = output(subject, batch)
    treatment = attoscope.treat(subject.model, "neutreno", strength=0.0)
    for module in treatment.modules:
        module.strength.fill_(0.6)
    assert not torch.equal(output(subject, batch), before)


def test_the_zero_anchor_only_subtracts() -> None:
    subject, batch = sized("bert")
    calls = read(subject, batch, attoscope.treat(subject.model, "neutreno", anchor="zero"))
    for call in calls[1:]:
        expected = call.weights @ call.values - 0.6 * call.values
        torch.testing.assert_close(call.into[0], expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_mean_anchor_is_over_the_keys_that_a_token_may_see(name: str) -> None:
    subject, batch = sized(name)
    calls = read(subject, batch, attoscope.treat(subject.model, "neutreno", anchor="mean"))
    seen = calls[0].allowed.float()
    mean = (seen / seen.sum(-1, keepdim=True).clamp(min=1)) @ calls[0].values
    for call in calls[1:]:
        expected = call.weights @ call.values + 0.6 * (mean - call.values)
        rows = call.valid[:, None, :, None].expand_as(expected)
        torch.testing.assert_close(call.into[rows], expected[rows], rtol=0, atol=2e-5)


def test_the_anchor_s_gradient_reaches_the_first_layer() -> None:
    """Only through V^0 of layer 0: layer 0's own output projection is 0."""
    subject, batch = sized("nano")
    attoscope.treat(subject.model, "neutreno", batch)
    first = subject.model.h[0]
    nn.init.zeros_(first.c_proj.weight)
    subject.run(batch).square().mean().backward()
    values = first.c_attn.weight.grad[2 * WIDTH :]
    assert float(values.abs().sum()) > 0


def test_each_stack_of_a_pair_has_its_own_anchor_and_cross_attention_is_left_alone() -> None:
    subject, batch = sized("t5")
    treatment = attoscope.treat(subject.model, "neutreno", strength=0.4)
    assert "3 cross-attention calls were left alone" in treatment.notes
    calls = read(subject, batch, treatment)
    assert len(calls) == 6
    for at, call in enumerate(calls):
        first = calls[at // 3 * 3]
        start = None if at % 3 == 0 else first.values
        expected = neutreno_attention(call.weights, call.values, start, 0.4)
        torch.testing.assert_close(call.into[0], expected[0], rtol=0, atol=1e-4)


def test_layers_that_share_their_weights_take_the_first_run_s_values() -> None:
    subject, batch = sized("albert")
    treatment = attoscope.treat(subject.model, "neutreno", strength=0.4)
    assert treatment.layers == (3, 3)
    assert len(treatment.changed) == 1
    calls = read(subject, batch, treatment)
    assert len(calls) == 3
    for layer, call in enumerate(calls):
        first = calls[0].values if layer else None
        expected = neutreno_attention(call.weights, call.values, first, 0.4)
        torch.testing.assert_close(call.into[0], expected[0], rtol=0, atol=1e-5)


def test_only_some_layers() -> None:
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, "neutreno", layers=(2, 3))
    calls = read(subject, batch, treatment)
    assert [change.module for change in treatment.changed] == [
        "encoder.layer.0.attention.self",
        "encoder.layer.2.attention.self",
    ]
    pulled = calls[1].weights @ calls[1].values + 0.6 * (calls[0].values - calls[1].values)
    torch.testing.assert_close(calls[1].into[0], pulled[0], rtol=0, atol=1e-5)
    plain = calls[0].weights @ calls[0].values
    torch.testing.assert_close(calls[0].into[0], plain[0], rtol=0, atol=1e-5)


def test_one_layer_or_layers_of_different_width_are_refused() -> None:
    class Block(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.qkv, self.out = (
                nn.Linear(WIDTH, 3 * HEADS * size),
                nn.Linear(HEADS * size, WIDTH),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            heads = nn.functional.scaled_dot_product_attention(
                *(p.transpose(1, 2) for p in parts)
            )
            return x + self.out(heads.transpose(1, 2).flatten(2))

    x = torch.randn(2, 5, WIDTH)
    with pytest.raises(AttoscopeError, match="one attention layer each"):
        attoscope.treat(nn.Sequential(Block(8)), "neutreno", x)
    model = nn.Sequential(Block(8), Block(4))
    before = model(x)
    with pytest.raises(AttoscopeError, match="width 16 in encoder.1 and 32"):
        attoscope.treat(model, "neutreno", x)
    assert torch.equal(model(x), before)
    assert not any("attoscope" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["neutreno", "value_residual"])
def test_generation_is_the_same_with_and_without_a_cache(name: str, kind: str) -> None:
    subject, batch = sized(name)
    attoscope.treat(subject.model, kind)
    ids = batch.inputs["input_ids"][:1]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0,
               "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    with_cache, without = (
        subject.model.generate(
            ids, attention_mask=torch.ones_like(ids), use_cache=on, **options
        )
        for on in (True, False)
    )
    assert torch.equal(with_cache.sequences, without.sequences)
    for one, other in zip(with_cache.logits, without.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_windows_are_refused() -> None:
    import transformers

    config = transformers.SwinConfig(image_size=16, patch_size=2, num_channels=1, embed_dim=8,
                                     depths=[2, 2], num_heads=[2, 2], window_size=4)  # fmt: skip
    model = transformers.SwinModel(config)
    with pytest.raises(AttoscopeError, match="windows"):
        attoscope.treat(model, "neutreno")


def test_a_batch_of_the_caller_and_a_subject_are_as_good_as_none() -> None:
    subject, batch = sized("bert")
    one = attoscope.treat(subject.model, "neutreno")
    record = one.record
    one.undo()
    other = attoscope.treat(Subject.of(subject.model), "neutreno", batch)
    assert isinstance(batch, Batch)
    assert other.record == record
