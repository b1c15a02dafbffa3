"""AttnScale, centred attention and FeatScale in live models, and the mean that they share."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attoscope
from attoscope import AttoscopeError
from attoscope.remedies import Treatment
from attoscope.remedies.visible import MaskArgument, Seen, Sees, past_tokens
from attoscope.trace import Batch, Subject
from tests.models import HEADS, TOKENS, WIDTH
from tests.remedies.treated import Read, data_of, output, read, sized

MODELS = (
    "bert", "vit", "gpt2", "llama", "mistral", "t5", "deberta_v2", "bloom", "nano", "encoder",
    "encoder_time_first", "attention",
)  # fmt: skip


def moved(treatment: Treatment) -> None:
    """Give the new parameters numbers of their own."""
    with torch.no_grad():
        for parameter in treatment.parameters():
            parameter.copy_(torch.randn(parameter.shape))


def mean_of(call: Read, rows: Tensor) -> Tensor:
    """J from the keys that the kernel allowed."""
    allowed = call.allowed.float()
    return (allowed / allowed.sum(-1, keepdim=True).clamp(min=1)) @ rows


def check(call: Read, found: Tensor, expected: Tensor) -> None:
    rows = call.valid[:, None, :, None].expand_as(expected)
    torch.testing.assert_close(found[rows], expected[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_attnscale_is_the_scaled_attention_matrix(name: str) -> None:
    """`A' = J + (1 + w_h)(A - J)` applied to the values, with J as the kernel's own mask has it."""
    subject, batch = sized(name)
    treatment = attoscope.treat(subject.model, "attnscale", data_of(subject, batch))
    moved(treatment)
    for call, module in zip(read(subject, batch, treatment), treatment.modules, strict=True):
        allowed = call.allowed.float()
        flat = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
        scaled = flat + (1 + module.weight.detach())[:, None, None] * (call.weights - flat)
        check(call, call.into, scaled @ call.values)


@pytest.mark.parametrize("name", ["bert", "llama", "encoder_time_first"])
def test_centred_takes_the_mean_out(name: str) -> None:
    subject, batch = sized(name)
    treatment = attoscope.treat(subject.model, "centred", data_of(subject, batch), strength=0.7)
    assert not list(treatment.parameters())
    for call in read(subject, batch, treatment):
        check(call, call.into, call.weights @ call.values - 0.7 * mean_of(call, call.values))


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2", "llama", "encoder_time_first"])
def test_featscale_is_the_published_form(name: str) -> None:
    subject, batch = sized(name)
    treatment = attoscope.treat(subject.model, "featscale", data_of(subject, batch))
    moved(treatment)
    for call, module, place in zip(
        read(subject, batch, treatment),
        treatment.modules,
        treatment.record["places"],
        strict=True,
    ):
        projection = subject.model.get_submodule(place["output"])
        z = _plain_forward(projection, call.into)
        mean = mean_of(call, z[:, None])[:, 0]
        expected = (1 + module.low) * mean + (1 + module.high) * (z - mean)
        rows = call.valid[..., None].expand_as(expected)
        torch.testing.assert_close(call.out[rows], expected[rows], rtol=1e-4, atol=1e-4)


def _plain_forward(projection: nn.Module, into: Tensor) -> Tensor:
    """The projection without its hooks."""
    with torch.no_grad():
        found: Tensor = projection.forward(into.transpose(1, 2).flatten(2))
    return found


@pytest.mark.parametrize("kind", ["attnscale", "featscale"])
@pytest.mark.parametrize("name", ["bert", "vit", "llama", "nano"])
def test_the_start_is_the_model_bit_for_bit(kind: str, name: str) -> None:
    subject, batch = sized(name)
    before = output(subject, batch)
    treatment = attoscope.treat(subject.model, kind, data_of(subject, batch))
    assert torch.equal(output(subject, batch), before)
    moved(treatment)
    assert not torch.equal(output(subject, batch), before)


@pytest.mark.parametrize("kind", ["attnscale", "centred", "featscale"])
def test_padding_does_not_reach_the_tokens(kind: str) -> None:
    """A padded sequence gives what it gives alone."""
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, kind)
    moved(treatment)
    together = output(subject, batch)[1, :7]
    alone = {name: value[1:2, :7] for name, value in batch.inputs.items()}
    single = output(subject, Batch(alone, (1,)))[0]
    torch.testing.assert_close(together, single, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "nano"])
def test_later_tokens_do_not_reach_earlier_ones(name: str) -> None:
    subject, batch = sized(name)
    treatment = attoscope.treat(subject.model, "centred", data_of(subject, batch))
    assert treatment.remedy == "centred"
    ids = batch.inputs["input_ids"][:1]
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 60
    one, other = (output(subject, Batch({"input_ids": x}, (0,))) for x in (ids, changed))
    assert torch.equal(one[:, :-1], other[:, :-1])
    assert not torch.equal(one[:, -1], other[:, -1])


def test_left_padding_and_a_sliding_window_are_seen() -> None:
    """11 tokens under a window of 4; the mask is found on the probe and used on another."""
    subject, batch = sized("mistral")
    treatment = attoscope.treat(subject.model, "attnscale")
    moved(treatment)
    ids = batch.inputs["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    left = Batch({"input_ids": ids, "attention_mask": mask}, (0, 1, 2), mask.bool())
    for call, module in zip(read(subject, left, treatment), treatment.modules, strict=True):
        assert int(call.allowed.sum(-1).max()) == 4
        flat = call.allowed / call.allowed.sum(-1, keepdim=True).clamp(min=1)
        scaled = flat + (1 + module.weight.detach())[:, None, None] * (call.weights - flat)
        check(call, call.into, scaled @ call.values)


def test_means_by_hand() -> None:
    rows = torch.tensor([[[1.0], [3.0], [8.0]]])
    keys = torch.tensor([[[True, True, False]]])
    each = torch.tensor([[[True, False, False], [False, True, True], [False, False, False]]])
    cases: list[tuple[Any, list[float]]] = [
        (Seen(None, False), [4.0]),
        (Seen(None, True), [1.0, 2.0, 4.0]),
        (Seen(keys, False), [2.0]),
        (Seen(keys, True), [1.0, 2.0, 2.0]),
        (Seen(each, False), [1.0, 5.5, 0.0]),
    ]
    for seen, expected in cases:
        assert seen.mean(rows)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("kind", ["attnscale", "centred", "featscale"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_is_refused_and_whole_sequences_are_not(kind: str, name: str) -> None:
    subject, batch = sized(name)
    attoscope.treat(subject.model, kind)
    ids = batch.inputs["input_ids"][:1]
    model: Any = subject.model
    with torch.no_grad():
        filled = model(ids, use_cache=True)
        name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        held = {name: filled[name] if name in filled else filled.past_key_values}
        with pytest.raises(AttoscopeError, match=f"{kind}: got {TOKENS} tokens in a cache"):
            model(ids[:, :1], **held)
        longer = torch.cat([ids, ids[:, :1]], 1)
        assert model(longer).logits.isfinite().all()


def test_a_mask_that_is_made_inside_is_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)
            heads = nn.functional.scaled_dot_product_attention(
                *(p.transpose(1, 2) for p in parts), attn_mask=mask
            )
            return x + self.out(heads.transpose(1, 2).flatten(2))

    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 5, WIDTH)
    before = model(x)
    with pytest.raises(AttoscopeError, match="are not those that its mask arguments"):
        attoscope.treat(model, "attnscale", x)
    assert torch.equal(model(x), before)
    attoscope.treat(model, "neutreno", x)


def test_masks_of_torch_s_attention() -> None:
    """Both masks at once, though the batch that was surveyed had one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, TOKENS, WIDTH)
    treatment = attoscope.treat(model, "attnscale", x)
    moved(treatment)
    padded = torch.zeros(2, TOKENS, dtype=torch.bool)
    padded[1, 7:] = True
    inputs = {"src": x, "src_key_padding_mask": padded,
              "mask": nn.Transformer.generate_square_subsequent_mask(TOKENS).isinf()}  # fmt: skip
    batch = Batch(inputs, (0, 1), ~padded)
    calls = read(Subject.of(model), batch, treatment)
    for call, module in zip(calls, treatment.modules, strict=True):
        call = replace(call, valid=~padded)
        assert call.allowed[1, 0, 9].tolist() == [True] * 7 + [False] * 4
        flat = call.allowed / call.allowed.sum(-1, keepdim=True)
        scaled = flat + (1 + module.weight.detach())[:, None, None] * (call.weights - flat)
        check(call, call.into, scaled @ call.values)


def test_masks_by_hand() -> None:
    """What each sort of mask allows: (batch, query, key)."""
    three = torch.tensor([[True, True, False]])
    for mask, by_query, forbids in (
        (three, False, False),
        (~three, False, True),
        (three.long(), False, False),
        (torch.zeros(1, 3).masked_fill(~three, -1e4), False, False),
    ):
        argument = MaskArgument("mask", 1, by_query, forbids)
        assert torch.equal(argument.allowed(mask), three[:, None])
    square = torch.ones(3, 3, dtype=torch.bool).triu()
    argument = MaskArgument("mask", 1, True, True)
    for mask in (~square, (~square)[None].expand(8, 3, 3), (~square)[None, None]):
        assert torch.equal(argument.allowed(mask)[:1], square[None])


def test_a_mask_by_query_replaces_the_triangle_and_one_by_key_does_not() -> None:
    """As in a causal model that is given a mask of its own, such as a prefix's."""
    prefix = torch.tensor([[True, True, False], [True, True, False], [True, True, True]])
    keys = torch.tensor([[True, True, True]])
    by_query = Sees((MaskArgument("mask", 1, True, False),), True, False)
    assert torch.equal(by_query.given((None, prefix), {}).rows(3)[0], prefix)
    by_key = Sees((MaskArgument("mask", 1, False, False),), True, False)
    assert torch.equal(
        by_key.given((), {"mask": keys}).rows(3)[0], torch.ones(3, 3).tril().bool()
    )
    assert torch.equal(by_key.given((), {}).rows(3)[0], torch.ones(3, 3).tril().bool())
    with pytest.raises(AttoscopeError, match="mask: got 4 keys for 3 tokens"):
        by_key.given((), {"mask": torch.ones(1, 4).bool()}).mean(torch.ones(1, 3, 2))
    with pytest.raises(AttoscopeError, match="mask: got str; expected a tensor"):
        by_key.given((), {"mask": "block"})


def test_a_tuple_of_past_keys_and_values_counts_as_a_cache() -> None:
    past = (torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    assert past_tokens((), {"layer_past": past}, 0) == 5
    assert past_tokens((torch.zeros(1, 3),), {"past": None}, 0) == 0
