"""The Gaussian kernel: known values, masks, and what it does in live models."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attoscope
from attoscope import AttoscopeError
from attoscope.remedies import treatments_of
from attoscope.remedies.gaussian import (
    GaussianSelfAttention,
    gaussian_attention,
    gaussian_weights,
    least,
)
from attoscope.remedies.places import Place
from attoscope.trace import Layer, Subject, attention_rows, watch
from tests.models import TOKENS, make_batch
from tests.remedies.treated import data_of, hooks, output, sized

HF = ("bert", "vit", "gpt2", "llama", "mistral", "qwen3", "bart", "albert")
TORCH = ("encoder", "encoder_time_first", "attention")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def by_hand(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Through the differences themselves."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    apart = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    return (-scale * apart / 2).exp()


# Plain tensors.


def test_the_weights_are_those_of_the_formula() -> None:
    q, k, v = drawn(3, 2, 4, 5, 8)
    found = gaussian_attention(q, k, v)
    expected = by_hand(q, k, 8**-0.5)
    torch.testing.assert_close(found.weights, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.output, expected @ v)
    torch.testing.assert_close(found.row_sum, expected.sum(-1))
    assert found.least_row_sum == pytest.approx(float(expected.sum(-1).min()))


def test_softmax_is_the_gaussian_row_times_the_norms_of_the_keys() -> None:
    q, k = drawn(2, 2, 4, 5, 8)
    gaussian = gaussian_weights(q, k)
    weighted = gaussian * (k.square().sum(-1) / (2 * 8**0.5)).exp()[..., None, :]
    softmax = (q @ k.mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(weighted / weighted.sum(-1, keepdim=True), softmax)
    level = k / k.norm(dim=-1, keepdim=True)
    softmax = (q @ level.mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(gaussian_weights(q, level, normalize=True), softmax)
    assert not torch.allclose(gaussian_weights(q, level), softmax)


def test_identical_keys_give_the_sum_of_the_values_and_their_mean_where_normalised() -> None:
    q = drawn(1, 1, 1, 8).expand(1, 1, 5, 8)
    v = drawn(1, 1, 5, 3, seed=1)
    total = v.sum(-2, keepdim=True).expand_as(v)
    torch.testing.assert_close(gaussian_attention(q, q, v).output, total)
    assert gaussian_attention(q, q, v).least_row_sum == 5
    found = gaussian_attention(q, q, v, normalize=True)
    torch.testing.assert_close(found.output, total / 5)


def test_far_keys_kill_output_and_gradient_together() -> None:
    q = drawn(1, 1, 3, 4).requires_grad_()
    k, v = drawn(1, 1, 5, 4, seed=1) + 100, drawn(1, 1, 5, 4, seed=2)
    found = gaussian_attention(q, k, v)
    (slope,) = torch.autograd.grad(found.output.sum(), q)
    assert found.least_row_sum < 1e-300 and float(slope.abs().max()) < 1e-300


@pytest.mark.parametrize("normalize", [False, True])
def test_masks_of_every_kind_and_causality(normalize: bool) -> None:
    q, k, v = drawn(3, 2, 4, 5, 8)
    keys = torch.tensor([[True] * 5, [True, True, True, False, False]])
    plain = by_hand(q, k, 8**-0.5)

    def expected(allowed: Tensor) -> Tensor:
        weights = plain * allowed
        total = weights.sum(-1, keepdim=True) if normalize else 1.0
        return torch.nan_to_num(weights / total)

    def found(mask: Tensor | None, **options: Any) -> Tensor:
        return gaussian_attention(q, k, v, mask, normalize=normalize, **options).weights

    wide = keys[:, None, None]
    added = torch.zeros(2, 1, 1, 5, dtype=torch.float64).masked_fill(~wide, float("-inf"))
    low = torch.where(wide, 0.0, torch.finfo(torch.float32).min)
    for mask in (keys, keys.long(), wide, added, low.expand(2, 1, 5, 5)):
        torch.testing.assert_close(found(mask), expected(wide))
    triangle = torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(found(None, causal=True), expected(triangle))
    torch.testing.assert_close(found(keys, causal=True), expected(triangle & wide))
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    assert float(found(nothing).abs().max()) == 0


def test_a_bias_is_added_to_the_exponent() -> None:
    q, k = drawn(2, 2, 4, 5, 8)
    bias = drawn(1, 4, 5, 5, seed=3)
    expected = by_hand(q, k, 8**-0.5) * bias.exp()
    torch.testing.assert_close(gaussian_weights(q, k, bias), expected)


def test_grouped_heads_and_a_scale_by_head() -> None:
    q, k, v = drawn(2, 4, 5, 8), drawn(2, 2, 5, 8, seed=1), drawn(2, 2, 5, 3, seed=2)
    scale = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)[:, None, None]
    found = gaussian_attention(q, k, v, scale=scale)
    for head in range(4):
        weights = by_hand(
            q[:, head : head + 1], k[:, head // 2][:, None], float(scale[head, 0, 0])
        )
        expected = (weights @ v[:, head // 2][:, None])[:, 0]
        torch.testing.assert_close(found.output[:, head], expected)


def test_dropout_is_unbiased_and_leaves_row_sums() -> None:
    torch.manual_seed(0)
    q, k, v = drawn(3, 1, 1, 5, 8)
    plain = gaussian_attention(q, k, v)
    many = torch.stack([gaussian_attention(q, k, v, dropout=0.25).output for _ in range(4000)])
    # Standard errors are below 0.02 here.
    torch.testing.assert_close(many.mean(0), plain.output, rtol=0, atol=0.1)
    dropped = gaussian_attention(q, k, v, dropout=0.25)
    assert torch.equal(dropped.row_sum, plain.row_sum)
    assert not torch.allclose(dropped.output, plain.output)


def test_half_precision_far_from_the_origin_keeps_small_distances() -> None:
    q = (drawn(1, 1, 5, 8) + 100).float()
    exact = by_hand(q.double(), q.double(), 8**-0.5)
    torch.testing.assert_close(gaussian_weights(q, q).double(), exact, rtol=1e-4, atol=1e-5)
    half = (drawn(1, 1, 5, 8)).bfloat16()
    found = gaussian_attention(half, half, half)
    assert found.output.dtype == torch.bfloat16 and found.weights.dtype == torch.float32
    assert float(found.weights.max()) <= 1


def test_gradients_are_those_of_the_formula() -> None:
    q, k, v = (drawn(1, 1, 3, 2, seed=s).requires_grad_() for s in range(3))
    assert torch.autograd.gradcheck(lambda *x: gaussian_attention(*x).output, (q, k, v))


def test_bad_input_is_named() -> None:
    q = drawn(1, 1, 3, 4)
    with pytest.raises(AttoscopeError, match="mask: got shape"):
        gaussian_attention(q, q, q, torch.ones(1, 7, dtype=torch.bool))
    with pytest.raises(AttoscopeError, match="dropout: got 1"):
        gaussian_attention(q, q, q, dropout=1.0)


def test_the_least_row_sum_leaves_padding_out() -> None:
    sums = torch.tensor([[[3.0, 1.0, 0.1]]])
    assert float(least(sums, torch.tensor([[1, 1, 0]]))) == 1.0
    assert float(least(sums, None)) == pytest.approx(0.1)


# Live models.


def allowed_by(subject: Subject, batch: Any) -> list[Tensor]:
    """The keys that every self-attention call's queries may see, of the plain model."""
    found = []

    def visit(layer: Layer, _: Any) -> None:
        for call in layer.calls:
            if not call.site.call.startswith("cross"):
                rows = torch.arange(call.shape[2]).expand(call.shape[0], -1)
                found.append(attention_rows(call, rows).allowed)

    watch(subject, batch, visit)
    return found


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("name", [*HF, *TORCH])
def test_every_layer_attends_by_the_formula(name: str, learnable: bool) -> None:
    subject, batch = sized(name)
    allowed = allowed_by(subject, batch)
    before = output(subject, batch)
    treatment = attoscope.treat(
        subject.model, "gaussian", data_of(subject, batch), learnable=learnable
    )
    for parameter in treatment.parameters():
        nn.init.constant_(parameter, 0.5)
    calls, into = [], []
    places = [Place.of(p) for p in treatment.record["places"]]
    handles = [
        m.register_forward_hook(
            lambda m, args, kw, out: calls.append((args, kw)), with_kwargs=True
        )
        for m in treatment.modules
    ]
    for place in {p.output: p for p in places}.values():
        module = subject.model.get_submodule(place.output)

        def note(m: nn.Module, args: Any, first: bool = place.time_first) -> None:
            into.append(args[0].transpose(0, 1) if first else args[0])

        handles.append(module.register_forward_pre_hook(note))
    assert not torch.equal(output(subject, batch), before)
    for handle in handles:
        handle.remove()
    assert len(calls) == len(into) == len(allowed) == len(places)
    for ((q, k, v, *_), options), read, visible in zip(calls, into, allowed, strict=True):
        scale = options["scale"] or q.shape[-1] ** -0.5
        scale *= torch.tensor(0.5).neg().exp().item() if learnable else 1.0
        weights = by_hand(q.double(), k.double(), scale) * visible
        v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
        expected = (weights @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(read.double(), expected, rtol=0, atol=1e-4)
    for module in treatment.modules:
        assert float(module.least_row_sum) > 0


@pytest.mark.parametrize("name", ["bert", "llama", "encoder"])
def test_undo_brings_the_model_back_bit_for_bit(name: str) -> None:
    subject, batch = sized(name)
    before, count = output(subject, batch), hooks(subject.model)
    config = [m.config for m in subject.model.modules() if hasattr(m, "config")]
    treatment = attoscope.treat(subject.model, "gaussian", data_of(subject, batch))
    treatment.undo()
    assert torch.equal(output(subject, batch), before)
    assert hooks(subject.model) == count and not treatments_of(subject.model)
    after = [m.config for m in subject.model.modules() if hasattr(m, "config")]
    assert all(a is b for a, b in zip(config, after, strict=True))
    assert not any(isinstance(m, GaussianSelfAttention) for m in subject.model.modules())
    assert not any("attoscope" in name for name, _ in subject.model.named_modules())


def test_some_layers_only_leave_the_others_with_their_softmax() -> None:
    subject, batch = sized("gpt2")
    treatment = attoscope.treat(subject.model, "gaussian", layers=(1, 2))
    assert treatment.layers == (1, 3)
    names = [
        m.config._attn_implementation for m in (b.attn for b in subject.model.transformer.h)
    ]
    assert names == ["sdpa", "attoscope_gaussian", "sdpa"]
    assert subject.model.config._attn_implementation == "sdpa"


def test_padding_does_not_reach_what_is_valid() -> None:
    subject, batch = sized("bert")
    attoscope.treat(subject.model, "gaussian")
    whole = output(subject, batch)[1, :7]
    alone = {k: v[1:2, :7] for k, v in batch.inputs.items()}
    with torch.no_grad():
        short = subject.model(**alone).last_hidden_state[0]
    torch.testing.assert_close(whole, short, rtol=0, atol=1e-5)


def test_later_tokens_do_not_reach_earlier_ones_and_a_cache_gives_the_same() -> None:
    subject, _ = sized("llama")
    attoscope.treat(subject.model, "gaussian")
    ids = make_batch("bare ids").inputs["input_ids"]
    with torch.no_grad():
        whole = subject.model(ids).logits
        first = subject.model(ids[:, :6]).logits
        made = subject.model.generate(ids[:1, :6], max_new_tokens=4, do_sample=False)
        for end in range(6, made.shape[1]):
            assert int(subject.model(made[:, :end]).logits[0, -1].argmax()) == made[0, end]
    torch.testing.assert_close(whole[:, :6], first, rtol=0, atol=1e-4)


def test_eager_and_sdpa_models_give_the_same() -> None:
    from tests.models import make

    outputs = []
    for kernel in ("eager", "sdpa"):
        subject, batch = make("llama", kernel)
        attoscope.treat(subject.model, "gaussian")
        outputs.append(output(subject, batch)[0])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


def test_it_trains_with_its_bandwidth_and_dropout() -> None:
    subject, batch = sized("encoder")
    treatment = attoscope.treat(subject.model, "gaussian", batch, learnable=True)
    optimizer = torch.optim.Adam(subject.model.parameters(), lr=1e-2)
    subject.model.train()
    losses = []
    for _ in range(30):
        loss = subject.run(batch).square().mean() + (subject.run(batch)[0] - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert all(float(p.detach().abs().min()) > 0 for p in treatment.parameters())


@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_copies_and_pickles_have_a_kernel_of_their_own(name: str) -> None:
    subject, batch = sized(name)
    treatment = attoscope.treat(subject.model, "gaussian", data_of(subject, batch))
    after = output(subject, batch)
    others = [copy.deepcopy(subject.model), pickle.loads(pickle.dumps(subject.model))]
    treatment.undo()
    for other in others:
        assert torch.equal(output(Subject.of(other), batch), after)


@pytest.mark.parametrize("options", [{}, {"learnable": True}, {"normalize": True}])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_saved_model_comes_back(tmp_path: Path, name: str, options: dict[str, bool]) -> None:
    subject, batch = sized(name)
    treatment = attoscope.treat(subject.model, "gaussian", **options)
    for parameter in treatment.parameters():
        nn.init.uniform_(parameter)
    subject.model.save_pretrained(tmp_path)
    back = Subject.of(attoscope.load_treated(tmp_path))
    assert torch.equal(output(back, batch), output(subject, batch))
    (again,) = treatments_of(back.model)
    assert again.record == treatment.record
    again.undo()
    treatment.undo()
    assert torch.equal(output(back, batch), output(subject, batch))


def test_a_diagnosis_says_that_it_cannot_see_the_kernel() -> None:
    subject, batch = sized("bert")
    subject.layout(batch)  # also where the model was surveyed before
    treatment = attoscope.treat(subject.model, "gaussian")
    for ask in (
        lambda: attoscope.diagnose(subject, batch),
        lambda: attoscope.predict(subject, batch),
        lambda: attoscope.treat(subject.model, "gaussian"),
    ):
        with pytest.raises(AttoscopeError) as error:
            ask()
        assert "attends with a Gaussian kernel, which has no softmax" in str(error.value)
        assert str(error.value).count(". ") == 0
    treatment.undo()
    watch(subject, batch, lambda layer, _: None)


def test_notes_say_what_the_kernel_has_to_give() -> None:
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, "gaussian", batch)
    text = str(treatment)
    assert "on this data the kernel's rows sum to" in text and "0% of them are dead" in text
    assert "made for softmax" in text
    treatment.undo()
    for layer in subject.model.encoder.layer:
        layer.attention.self.query.weight.data *= 100
    assert "are dead" in str(attoscope.treat(subject.model, "gaussian", batch))
    with pytest.raises(AttoscopeError, match="fold: got the remedy 'gaussian'"):
        treatments_of(subject.model)[0].fold()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma2", "a soft cap"),
        ("gpt_oss", "an attention sink"),
        ("bloom", "cannot be replaced"),
        ("nano", "cannot be replaced"),
    ],
)
def test_what_it_does_not_fit_is_refused_and_left_as_it_was(name: str, words: str) -> None:
    subject, batch = sized(name)
    before = output(subject, batch)
    with pytest.raises(AttoscopeError, match=words):
        attoscope.treat(subject.model, "gaussian", data_of(subject, batch))
    assert torch.equal(output(subject, batch), before)


def test_options_are_checked() -> None:
    subject, _ = sized("bert")
    with pytest.raises(AttoscopeError, match="normalize: got 1.5"):
        attoscope.treat(subject.model, "gaussian", normalize=1.5)
    with pytest.raises(AttoscopeError, match="strength: 'gaussian' has no such option"):
        attoscope.treat(subject.model, "gaussian", strength=0.5)


def test_torch_s_attention_gives_its_weights_where_asked() -> None:
    subject, batch = sized("attention")
    attoscope.treat(subject.model, "gaussian", batch)
    x = batch.inputs
    made, weights = subject.model.attention(x, x, x)
    assert weights.shape == (3, TOKENS, TOKENS)
    assert float(weights.detach().sum(-1).min()) != pytest.approx(1.0, abs=1e-3)
    assert subject.model.attention(x, x, x, need_weights=False)[1] is None
