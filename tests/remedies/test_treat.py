"""What holds for every remedy: one call to apply, one to undo, nothing left, nothing leaking."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import attoscope
from attoscope import AttoscopeError
from attoscope.remedies import treatments_of
from attoscope.remedies.splitting import SplitAttention
from attoscope.trace import Batch, Subject
from attoscope.unchanged import first_output
from tests.models import HEADS, WIDTH, SelfAttention
from tests.remedies.treated import KINDS, data_of, hooks, output, sized

MODELS = ("bert", "vit", "gpt2", "nano", "encoder", "encoder_time_first")


def moved(treatment: Any) -> None:
    with torch.no_grad():
        for parameter in treatment.parameters():
            parameter.add_(torch.rand(parameter.shape) * 0.2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_undo_gives_the_very_same_model_back(name: str, kind: str) -> None:
    subject, batch = sized(name)
    model = subject.model
    next(model.parameters()).requires_grad_(False)
    model.train()
    next(
        m for m in model.modules() if isinstance(m, nn.Dropout)
    ).eval() if name != "nano" else None
    modes = {n: m.training for n, m in model.named_modules()}
    flags = [(n, p, p.requires_grad) for n, p in model.named_parameters()]
    model.eval()
    before = output(subject, batch)
    for n, m in model.named_modules():
        m.training = modes[n]
    state = torch.random.get_rng_state()
    treatment = attoscope.treat(model, kind, data_of(subject, batch))
    moved_on = {n: m.training for n, m in model.named_modules() if n in modes}
    assert moved_on == modes
    assert torch.equal(torch.random.get_rng_state(), state)
    moved(treatment)
    model.eval()
    assert not torch.equal(output(subject, batch), before)
    for n, m in model.named_modules():
        m.training = modes.get(n, m.training)
    treatment.undo()
    assert {n: m.training for n, m in model.named_modules()} == modes
    model.eval()
    assert torch.equal(output(subject, batch), before)
    after = list(model.named_parameters())
    assert [(n, id(p), p.requires_grad) for n, p in after] == [
        (n, id(p), f) for n, p, f in flags
    ]
    assert hooks(model) == 0
    assert treatments_of(model) == ()
    assert not hasattr(getattr(model, "config", None), "attoscope_treatments")
    with pytest.raises(AttoscopeError, match="no longer in the model"):
        treatment.undo()


@pytest.mark.parametrize("kind", KINDS)
def test_training_reaches_the_new_parameters_and_the_old(kind: str) -> None:
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, kind)
    subject.model.train()
    first_output(subject.run(batch))[..., :5].sum().backward()
    new = list(treatment.parameters())
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in new)
    assert (len(new) > 0) == (kind in ("attnscale", "featscale", "spectral"))
    for name, parameter in subject.model.named_parameters():
        if "pooler" not in name and parameter.requires_grad:
            assert parameter.grad is not None, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "encoder"])
def test_copies_are_treated_and_independent(name: str, kind: str) -> None:
    subject, batch = sized(name)
    treatment = attoscope.treat(subject.model, kind, data_of(subject, batch))
    moved(treatment)
    subject.run(batch)
    expected = output(subject, batch)
    twins = [copy.deepcopy(subject.model)]
    if kind != "spectral":  # torch's own parametrizations refuse it, in a sentence
        twins.append(pickle.loads(pickle.dumps(subject.model)))
        file = io.BytesIO()
        torch.save(subject.model, file)
        file.seek(0)
        twins.append(torch.load(file, weights_only=False))
    for twin in twins:
        assert torch.equal(output(Subject.of(twin), batch), expected)
        (held,) = treatments_of(twin)
        assert held.model is twin and held is not treatment
        with torch.no_grad():
            for module in twin.modules():
                if getattr(module, "kind", None) == kind:
                    for number in (*module.parameters(), *module.buffers()):
                        number.mul_(0.5)
        assert not torch.equal(output(Subject.of(twin), batch), expected)
        assert torch.equal(output(subject, batch), expected)
    plain, _ = sized(name)
    for twin in twins:
        (held,) = treatments_of(twin)
        held.undo()
        assert torch.equal(output(Subject.of(twin), batch), output(plain, batch))
        assert list(twin.state_dict()) == list(plain.model.state_dict())
        flags = [(n, p.requires_grad) for n, p in plain.model.named_parameters()]
        assert [(n, p.requires_grad) for n, p in twin.named_parameters()] == flags
        assert hooks(twin) == 0 and treatments_of(twin) == ()
        assert not hasattr(getattr(twin, "config", None), "attoscope_treatments")
        assert treatments_of(subject.model) == (treatment,)
        assert torch.equal(output(subject, batch), expected)
    treatment.undo()
    assert torch.equal(output(subject, batch), output(plain, batch))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_from_one_pass_to_the_next(kind: str) -> None:
    """Other shapes, an exception half-way, another model in between."""
    subject, batch = sized("bert")
    moved(attoscope.treat(subject.model, kind))
    short = Batch({k: v[:2, :5] for k, v in batch.inputs.items()}, (0, 1))
    expected, expected_short = output(subject, batch), output(subject, short)

    def fail(*_: Any) -> None:
        raise KeyError("stop")

    for at in range(3):
        layer = subject.model.encoder.layer[at].attention
        for module in (layer.self.query, layer.output.dense, layer):
            handle = module.register_forward_hook(fail)
            with pytest.raises(AttoscopeError, match="KeyError"):
                subject.run(batch)
            handle.remove()
            assert torch.equal(output(subject, short), expected_short)
            assert torch.equal(output(subject, batch), expected)


def test_a_skipped_first_layer_is_an_error_and_not_an_old_anchor() -> None:
    subject, batch = sized("nano")
    model = subject.model
    attoscope.treat(model, "neutreno", batch)
    subject.run(batch)
    kept = list(model.h)
    model.h = nn.ModuleList(kept[1:])
    with pytest.raises(AttoscopeError, match="first layer's values are missing"):
        subject.run(batch)


PAIRS = [("neutreno", "spectral"), ("spectral", "attnscale"), ("value_residual", "neutreno"),
         ("attnscale", "featscale"), ("centred", "centred")]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_treatments_are_undone_in_any_order(one: str, other: str) -> None:
    subject, batch = sized("encoder")
    before, ids = output(subject, batch), [id(p) for p in subject.model.parameters()]
    first = attoscope.treat(subject.model, one, batch)
    moved(first)
    alone = output(subject, batch)
    if one == other:
        with pytest.raises(AttoscopeError, match=f"{one!r} is in layers.0.self_attn already"):
            attoscope.treat(subject.model, other, batch)
        assert torch.equal(output(subject, batch), alone)
        first.undo()
        assert torch.equal(output(subject, batch), before)
        return
    for order in ((0, 1), (1, 0)):
        second = attoscope.treat(subject.model, other, batch)
        assert treatments_of(subject.model) == (first, second)
        moved(second)
        assert not torch.equal(output(subject, batch), alone)
        (first, second)[order[0]].undo()
        if order[0]:
            assert torch.equal(output(subject, batch), alone)
            second = attoscope.treat(subject.model, other, batch)
        (first, second)[order[1]].undo()
        if order == (0, 1):
            assert torch.equal(output(subject, batch), before)
            first = attoscope.treat(subject.model, one, batch)
            alone = output(subject, batch)
    if second.active:
        second.undo()
    assert torch.equal(output(subject, batch), before)
    assert [id(p) for p in subject.model.parameters()] == ids
    assert hooks(subject.model) == 0


def test_torch_s_attention_trained_while_treated_is_put_back_trained() -> None:
    subject, batch = sized("encoder")
    fused = subject.model.layers[0].self_attn
    was = fused.in_proj_weight.detach().clone()
    treatment = attoscope.treat(subject.model, "neutreno", batch, strength=0.0)
    split = subject.model.layers[0].self_attn
    assert isinstance(split, SplitAttention)
    assert not subject.model.use_nested_tensor
    with torch.no_grad():
        split.value.weight.mul_(2)
    treated = output(subject, batch)
    treatment.undo()
    assert subject.model.layers[0].self_attn is fused
    assert subject.model.use_nested_tensor
    assert torch.equal(fused.in_proj_weight[: 2 * WIDTH], was[: 2 * WIDTH])
    assert torch.equal(fused.in_proj_weight[2 * WIDTH :], 2 * was[2 * WIDTH :])
    rows = batch.valid
    torch.testing.assert_close(output(subject, batch)[rows], treated[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_split_module_computes_what_torch_s_does(
    batch_first: bool, need_weights: bool, bias: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=batch_first).eval()
    if bias:
        nn.init.normal_(plain.in_proj_bias)
    split = SplitAttention(plain)
    shape = (3, 5, WIDTH) if batch_first else (5, 3, WIDTH)
    x = torch.randn(shape)
    padded = torch.zeros(3, 5, dtype=torch.bool)
    padded[1, 3:] = True
    masks = [None, torch.triu(torch.ones(5, 5, dtype=torch.bool), 1), torch.randn(5, 5),
             torch.randn(3 * HEADS, 5, 5)]  # fmt: skip
    for mask in masks:
        for padding in (None, padded, torch.zeros(3, 5).masked_fill(padded, float("-inf"))):
            if mask is not None and padding is not None and mask.dtype != padding.dtype:
                continue
            for average in (True, False):
                options: Any = {"key_padding_mask": padding, "attn_mask": mask,
                                "need_weights": need_weights,
                                "average_attn_weights": average}  # fmt: skip
                wanted, weights = plain(x, x, x, **options)
                found, ours = split(x, x, x, **options)
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
                assert (weights is None) == (ours is None)
                if weights is not None:
                    torch.testing.assert_close(ours, weights, rtol=0, atol=1e-6)
    alone = torch.randn(5, WIDTH)
    torch.testing.assert_close(split(alone, alone, alone), plain(alone, alone, alone))


def test_torch_s_attention_alone_is_refused() -> None:
    x = torch.randn(2, 5, WIDTH)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    with pytest.raises(AttoscopeError, match="expected a module that holds it"):
        attoscope.treat(model, "centred", (x, x, x))
    # With keys of its own it does not attend to the tokens alone.
    holder = SelfAttention()
    holder.attention = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, batch_first=True)
    with pytest.raises(AttoscopeError, match="0 self-attention layers matched"):
        attoscope.treat(holder.eval(), "centred", x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(kind: str, dtype: torch.dtype) -> None:
    subject, batch = sized("bert")
    subject.model.to(dtype)
    before = output(subject, batch)
    treatment = attoscope.treat(subject.model, kind)
    moved(treatment)
    found = output(subject, batch)
    assert found.dtype == dtype
    assert found.isfinite().all()
    assert not torch.equal(found, before)
    treatment.undo()
    assert torch.equal(output(subject, batch), before)


def test_a_fixed_number_keeps_its_precision_when_the_model_is_converted() -> None:
    subject, _ = sized("bert")
    treatment = attoscope.treat(subject.model, "neutreno", strength=0.6)
    subject.model.half().float()
    assert all(m.strength.dtype == torch.float32 for m in treatment.modules)
    assert all(float(m.strength) == float(torch.tensor(0.6)) for m in treatment.modules)


def test_bad_input_is_refused_in_a_sentence_and_leaves_the_model_alone() -> None:
    subject, batch = sized("bert")
    before = output(subject, batch)
    meta = copy.deepcopy(subject.model).to("meta")
    cases: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
        ("expected one of admin, attnscale, centred", subject.model, ("magic",), {}),
        ("expected a live torch module", "some/path", ("neutreno",), {}),
        ("meta device", meta, ("neutreno",), {}),
        ("has no such option; expected one of: strength", subject.model, ("neutreno",),
         {"mode": 1}),
        ("expected one of: none", subject.model, ("attnscale",), {"strength": 1}),
        ("strength: got 'a'", subject.model, ("neutreno",), {"strength": "a"}),
        ("strength: got nan", subject.model, ("neutreno",), {"strength": float("nan")}),
        ("anchor: got 'last'", subject.model, ("neutreno",), {"anchor": "last"}),
        ("shares: got 0.5", subject.model, ("value_residual",), {"shares": 0.5}),
        ("mode: got 'up'", subject.model, ("spectral",), {"mode": "up"}),
        ("layers: got \\(2, 9\\)", subject.model, ("neutreno",), {"layers": (2, 9)}),
        ("layers: got 2", subject.model, ("neutreno",), {"layers": 2}),
        ("give a batch", nn.Sequential(nn.Linear(2, 2)), ("neutreno",), {}),
        ("no attention was seen", nn.Sequential(nn.Linear(2, 2)),
         ("neutreno", torch.randn(2, 3, 2)), {}),
    ]  # fmt: skip
    for message, model, args, options in cases:
        with pytest.raises(AttoscopeError, match=message) as caught:
            attoscope.treat(model, *args, **options)
        assert "\n" not in str(caught.value)
    assert torch.equal(output(subject, batch), before)
    assert hooks(subject.model) == 0
    assert not any("attoscope" in name for name, _ in subject.model.named_modules())


def test_shared_layers_cannot_be_treated_apart() -> None:
    subject, _ = sized("albert")
    with pytest.raises(AttoscopeError, match="layers share their weights"):
        attoscope.treat(subject.model, "centred", layers=(0, 1))


def test_a_treatment_says_what_was_done_where() -> None:
    subject, _ = sized("bert")
    treatment = attoscope.treat(subject.model, "attnscale", layers=(1, 3))
    text = str(treatment)
    assert text.startswith("attnscale(): 2 of 3 attention layers\n")
    assert "encoder.layer.1.attention.self: scales A V - J V by 1 + w_h (new: " in text
    assert [change.module for change in treatment.changed] == [
        "encoder.layer.1.attention.self", "encoder.layer.2.attention.self"
    ]  # fmt: skip
    assert treatment.changed[0].parameters == (
        "encoder.layer.1.attention.self.attoscope_attnscale.weight",
    )
    assert sum(p.numel() for p in treatment.parameters()) == 2 * HEADS
    treatment.undo()
    assert "no longer in the model" in str(treatment)


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_from_one_treated_torch_module_to_another(kind: str) -> None:
    subject, batch = sized("encoder")
    moved(attoscope.treat(subject.model, kind, batch))
    other, _ = sized("encoder")
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(0.5)
    attoscope.treat(other.model, kind, batch)
    assert not torch.equal(output(subject, batch), output(other, batch))
    other.model.load_state_dict(subject.model.state_dict())
    assert torch.equal(output(subject, batch), output(other, batch))
