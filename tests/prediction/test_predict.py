"""`attoscope.predict` as a user calls it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import attoscope
from attoscope.diagnosing import diagnose
from attoscope.errors import AttoscopeError
from attoscope.prediction import Prediction, predict
from attoscope.prediction.smoothing import SHOWN
from attoscope.prediction.specs import DC_SHARE, HEADS, LAYERS, POINTS
from attoscope.trace import Subject
from tests.models import LAYERS as DEPTH
from tests.models import make

NAMES = [spec.name for spec in (*HEADS, *LAYERS, *DC_SHARE, *POINTS)]


@pytest.fixture(scope="module")
def made() -> Prediction:
    subject, batch = make("llama")
    return predict(subject, batch)


def test_all_readings_are_there_with_intervals_and_nulls(made: Prediction) -> None:
    assert [reading.name for reading in made.readings] == NAMES
    for reading in made.readings:
        assert np.isfinite(reading.values).all(), reading.name
        assert reading.low is not None and reading.title and reading.meaning and reading.source
        assert tuple(reading.coords) == reading.dims
        low, high = reading.range
        assert low is None or (reading.values >= low - 1e-6).all()
        assert high is None or (reading.values <= high + 1e-6).all()
    lacking = [r.name for r in made.readings if r.null is None]
    assert lacking == [
        "smoothing_margin_without_gain", "rest_step", "model_frequency_ratio", "model_cosine",
    ]  # fmt: skip


def test_a_verdict_for_each_layer_and_two_sentences_for_the_stack(made: Prediction) -> None:
    assert [layer.layer for layer in made.layers] == [f"decoder.{i}" for i in range(DEPTH)]
    assert all(sum(layer.heads.values()) == 4 for layer in made.layers)
    assert made.verdict.count(". ") == 1 and made.verdict.endswith(".")
    text = str(made)
    assert all(f"\ndecoder.{i} " in text for i in range(DEPTH))
    assert "nan" not in text
    assert "Outside the theory" in text and "MLP" in text


def test_plain_data(made: Prediction, tmp_path: Path) -> None:
    data = json.loads(made.to_json(tmp_path / "p.json").read_text())
    assert list(data["smoothing"]["readings"]) == NAMES
    assert data["smoothing"]["layers"][0]["layer"] == "decoder.0"
    assert data["smoothing"]["agreement"][0]["places"] == "heads"
    assert (data["documents"], data["tokens"]) == (3, 11)


def test_the_same_seed_gives_the_same_numbers_and_leaves_the_model_alone() -> None:
    subject, batch = make("bert")
    model = subject.model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = predict(subject, batch), predict(subject, batch)
    assert json.dumps(first.to_dict()) == json.dumps(second.to_dict())
    assert json.dumps(predict(subject, batch, seed=1).to_dict()) != json.dumps(first.to_dict())
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_smoothing_stack_is_called_smoothing_and_its_mirror_is_not() -> None:
    """A pre-norm stack of one head as wide as the stream, H = +0.2 I or -0.2 I, no MLP."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=6, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=8,
    )  # fmt: skip
    model = LlamaModel(config).eval()
    ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(2))
    for sign in (1, -1):
        with torch.no_grad():
            model.embed_tokens.weight.normal_(generator=torch.Generator().manual_seed(0))
            for layer in model.layers:
                layer.self_attn.v_proj.weight.copy_(torch.eye(16))
                layer.self_attn.o_proj.weight.copy_(0.2 * sign * torch.eye(16))
                layer.mlp.down_proj.weight.zero_()
        found = predict(model, {"input_ids": ids})
        assert {layer.kind for layer in found.layers} == {"smooths" if sign > 0 else "sharpens"}
        by_name = {reading.name: reading for reading in found.readings}
        alone = by_name["attention_only_frequency_ratio"].values
        assert (np.diff(alone) * sign < 0).all()
        np.testing.assert_allclose(alone, by_name["model_frequency_ratio"].values, rtol=1e-4)
        assert (by_name["attention_step"].values * sign < 0).all()
        against = "less alike" if sign > 0 else "more alike"
        assert against not in {layer.did for layer in found.layers}


def test_layers_that_cannot_be_predicted_say_why() -> None:
    subject, batch = make("t5")
    crossing = [v for v in predict(subject, batch).layers if v.layer.endswith("cross")]
    assert len(crossing) == DEPTH
    for one in crossing:
        assert one.kind == "not predicted" and "cross attention" in one.sentence
        assert math.isnan(one.margin)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, v = self.q(x)[:, None], self.v(x)[:, None]
        v = v * v.sigmoid()
        return x + self.o(nn.functional.scaled_dot_product_attention(q, q, v)[:, 0])


def test_bad_input_is_one_sentence() -> None:
    subject, batch = make("bert")
    for options, message in (
        ({"max_tokens": 1}, "max_tokens: got 1"),
        ({"documents": 0}, "documents: got 0"),
        ({"seed": -1}, "seed: got -1"),
    ):
        with pytest.raises(AttoscopeError, match=message):
            predict(subject, batch, **options)  # type: ignore[arg-type]
    with pytest.raises(AttoscopeError, match="no data was given"):
        predict(subject)
    with pytest.raises(AttoscopeError, match="no attention of it can be predicted .*linear"):
        predict(Subject.of(nn.Sequential(Gated())), torch.randn(2, 5, 8))


def test_one_token_is_a_prediction_without_numbers() -> None:
    subject, _ = make("gpt2")
    found = predict(subject, {"input_ids": torch.tensor([[5]])})
    assert {layer.kind for layer in found.layers} == {"not predicted"}
    assert "nan" not in str(found)


def test_every_diagnosis_has_the_cheap_part() -> None:
    subject, batch = make("vit")
    found = diagnose(subject, batch, null=False).readings
    assert len(SHOWN) == 8 and set(SHOWN) < set(NAMES)
    for name in NAMES:
        assert (name in found) == (name in SHOWN)
        assert name not in found or np.isfinite(found[name].values).all(), name
    assert found["smoothing_margin"].dims == ("site", "head")
    assert found["attention_step"].dims == ("layer",)


def test_the_sample_is_read_where_no_data_are_given(minilm: Path) -> None:
    found = attoscope.predict(str(minilm), max_tokens=16, documents=2)
    assert (found.documents, found.tokens) == (2, 16)
    assert len(found.layers) == 6
