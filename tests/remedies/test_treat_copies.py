"""Copies of treated models are undone by themselves; what is refused and noted beside it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
)

import attoscope
from attoscope import AttoscopeError
from attoscope.trace import Subject
from tests.remedies.treated import hooks, output, sized


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


FACTORS: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "admin", {}),
    ("bert", "deepnet", {"reinitialise": False}),
    ("gpt2", "deepscalelm", {"reinitialise": False}),
    ("bert", "gaussian", {"learnable": True}),
    ("bert", "neutreno", {"layers": (1, 3)}),
]


@pytest.mark.parametrize(("name", "kind", "options"), FACTORS)
def test_copies_of_every_remedy_are_undone_alone(
    name: str, kind: str, options: dict[str, Any]
) -> None:
    subject, batch = sized(name)
    plain = output(subject, batch)
    treatment = attoscope.treat(subject.model, kind, **options)
    treated = output(subject, batch)
    assert not torch.equal(treated, plain)
    for twin in (copy.deepcopy(subject.model), pickled(subject.model)):
        (held,) = attoscope.treatments_of(twin)
        assert held.remedy == kind and str(held) == str(treatment)
        with pytest.raises(AttoscopeError, match="fold: got the remedy .* in a copy"):
            held.fold()
        held.undo()
        assert torch.equal(output(Subject.of(twin), batch), plain)
        assert hooks(twin) == 0 and attoscope.treatments_of(twin) == ()
        assert torch.equal(output(subject, batch), treated)
        attoscope.treat(twin, kind, **options)
    treatment.undo()
    assert torch.equal(output(subject, batch), plain)


def test_a_copy_of_a_copy_and_two_treatments_in_any_order() -> None:
    subject, batch = sized("encoder")
    plain = output(subject, batch)
    attoscope.treat(subject.model, "neutreno", batch)
    alone = output(subject, batch)
    attoscope.treat(subject.model, "attnscale", batch, layers=(0, 2))
    for order in ((0, 1), (1, 0)):
        twin = copy.deepcopy(copy.deepcopy(subject.model))
        both = attoscope.treatments_of(twin)
        both[order[0]].undo()
        if order == (1, 0):
            assert torch.equal(output(Subject.of(twin), batch), alone)
        both[order[1]].undo()
        assert torch.equal(output(Subject.of(twin), batch), plain)
        assert all(
            type(m) is not type(subject.model.layers[0].self_attn) for m in twin.modules()
        )
        assert len(attoscope.treatments_of(subject.model)) == 2


def test_a_copy_keeps_the_weights_that_were_drawn_anew() -> None:
    subject, batch = sized("bert")
    plain = output(subject, batch)
    treatment = attoscope.treat(subject.model, "deepnet")
    twin = copy.deepcopy(subject.model)
    attoscope.treatments_of(twin)[0].undo()
    assert not torch.equal(output(Subject.of(twin), batch), plain)
    treatment.undo()
    assert torch.equal(output(subject, batch), plain)


def bert() -> BertModel:
    torch.manual_seed(0)
    return BertModel(
        BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=2,
                   intermediate_size=64)
    ).eval()  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["value", "query"])
def test_weights_that_are_not_finite_are_named(name: str, bad: float) -> None:
    model = bert()
    getattr(model.encoder.layer[1].attention.self, name).weight.data[0, 0] = bad
    where = rf"weights are not finite in encoder\.layer\.1\.attention\.self\.{name}\.weight"
    for kind in ("neutreno", "spectral", "attnscale"):
        with pytest.raises(AttoscopeError, match=where):
            attoscope.treat(model, kind)


@pytest.mark.parametrize("kind", ["neutreno", "spectral", "attnscale"])
def test_values_of_zero_are_refused_for_what_they_are(kind: str) -> None:
    model = bert()
    for layer in model.encoder.layer:
        layer.attention.self.value.weight.data.zero_()
    with pytest.raises(AttoscopeError, match="all its values are 0"):
        attoscope.treat(model, kind)


def test_heads_with_equal_values_are_two_heads() -> None:
    model = bert()
    value = model.encoder.layer[1].attention.self.value.weight
    value.data[16:] = value.data[:16]
    treatment = attoscope.treat(model, "spectral")
    heads = treatment.record["places"][1]["heads"]
    assert heads == {"start": 0, "stride": 16, "size": 16, "count": 2, "repeat": 1}


def test_a_model_of_two_inputs_needs_data_and_says_so() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64}  # fmt: skip
    words = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = CLIPConfig(
        text_config=small | words, vision_config=small | {"image_size": 16, "patch_size": 4}
    )
    with pytest.raises(AttoscopeError, match="give a batch that it reads, as data"):
        attoscope.treat(CLIPModel(config).eval(), "neutreno")


@pytest.mark.parametrize("seed", ["x", None, 1.5, -1, 2**70, True])
def test_a_seed_is_checked_whether_or_not_it_is_used(seed: Any) -> None:
    for start in ("nearest", "random"):
        with pytest.raises(AttoscopeError, match="seed: got .*; expected a whole number"):
            attoscope.treat(bert(), "spectral", seed=seed, start=start)


@pytest.mark.parametrize("layers", [(0.0, 2), (None, 2), ("0", 2), (False, True), (1,), "02"])
def test_layers_are_whole_numbers(layers: Any) -> None:
    with pytest.raises(AttoscopeError, match="layers: got .*; expected None for all, or whole"):
        attoscope.treat(bert(), "neutreno", layers=layers)


@pytest.mark.parametrize("strength", [10**400, -(10**400), float("inf"), None, "1", True])
def test_a_strength_is_a_finite_number(strength: Any) -> None:
    with pytest.raises(AttoscopeError, match="strength: got .*; expected a finite number"):
        attoscope.treat(bert(), "neutreno", strength=strength)


def test_an_anchor_that_is_not_asked_for_is_not_counted() -> None:
    treatment = attoscope.treat(bert(), "neutreno", layers=(1, 3))
    assert treatment.layers == (2, 4)
    assert "2 of 4 attention layers, anchored in layer 0" in str(treatment)
    assert "4 of 4 attention layers\n" in str(attoscope.treat(bert(), "neutreno"))
    assert len(repr(treatment)) < 200 and "\n" not in repr(treatment)


def test_numbers_below_zero_are_noted() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("neutreno", {"strength": -0.4}, "may make tokens more alike"),
        ("centred", {"strength": -1.0}, "may make tokens more alike"),
        ("value_residual", {"shares": (-0.5, 1.0)}, "values are subtracted"),
    ]
    for kind, options, words in cases:
        assert any(words in note for note in attoscope.treat(bert(), kind, **options).notes)
        assert not any(words in note for note in attoscope.treat(bert(), kind).notes)


@pytest.mark.parametrize("remedy", [None, 5, ["neutreno"], {}])
def test_a_remedy_is_a_name(remedy: Any) -> None:
    import inspect

    with pytest.raises(AttoscopeError, match="remedy: got"):
        inspect.unwrap(attoscope.treat)(bert(), remedy)
