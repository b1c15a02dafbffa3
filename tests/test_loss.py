"""The loss of a diagnosis: exact values, what is scored, and what is not and why."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
)

from attoscope.diagnosing import diagnose
from attoscope.diagnosis import Diagnosis
from attoscope.loss import Loss, entropies, score
from attoscope.trace import Batch, Subject
from tests.models import Nano

VOCABULARY = 11
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 0, 0], [8, 9, 7, 9, 3, 2]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0}
GPT2 = {**_SIZES, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
BERT = {
    **_SIZES, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16,
}  # fmt: skip


def loss_of(found: Diagnosis, name: str = "loss") -> float:
    return float(found.readings[name].sel(output="output"))


def by_hand(logits: Tensor, ids: Tensor) -> float:
    """Mean of -ln p(next token) over the tokens of one document."""
    probabilities = logits.double().softmax(-1)
    each = [-math.log(probabilities[t, ids[t + 1]]) for t in range(len(ids) - 1)]
    return sum(each) / len(each)


def test_even_logits_cost_the_logarithm_of_the_choices() -> None:
    targets = torch.tensor([[1, 0, -100]])
    found = entropies(torch.zeros(1, 3, 8), targets)
    assert torch.allclose(found[0, :2], torch.tensor(math.log(8.0)))
    assert found[0, 2].isnan()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = torch.randn(2, 7, 5), torch.randint(5, (2, 7))
    whole = entropies(logits, targets)
    monkeypatch.setattr("attoscope.loss._CHUNK", 5 * 2)
    assert torch.equal(entropies(logits, targets), whole)


def test_a_causal_model_is_scored_on_the_next_token_of_each_document() -> None:
    model = GPT2LMHeadModel(GPT2Config(**GPT2)).eval()
    found = diagnose(model, {"input_ids": IDS, "attention_mask": MASK})
    with torch.no_grad():
        logits = model(input_ids=IDS, attention_mask=MASK).logits
    lengths = MASK.sum(1).tolist()
    each = [by_hand(x[:n], ids[:n]) for x, ids, n in zip(logits, IDS, lengths, strict=True)]
    assert loss_of(found) == pytest.approx(np.mean(each), abs=1e-6)
    low, high = (float(found.readings[f"loss_{end}"][0]) for end in ("low", "high"))
    assert min(each) - 1e-6 <= low <= loss_of(found) <= high <= max(each) + 1e-6
    assert np.isfinite(found.readings["loss_null"]).all()
    meaning = found.readings["loss"].attrs["null_meaning"]
    assert meaning == (
        "the same tokens in random order; an even guess among 11 tokens gives 2.4 nats"
    )
    assert found.data["loss"] == "cross-entropy of the next token"


def test_a_handwritten_decoder_is_recognised_by_what_it_does() -> None:
    model = Nano().eval()
    ids = torch.randint(64, (3, 9))
    found = diagnose(model, ids)
    with torch.no_grad():
        logits = model(ids)
    expected = np.mean([by_hand(x, row) for x, row in zip(logits, ids, strict=True)])
    assert loss_of(found) == pytest.approx(expected, abs=1e-6)


def test_batches_do_not_matter() -> None:
    model = GPT2LMHeadModel(GPT2Config(**GPT2)).eval()
    data = {"input_ids": IDS, "attention_mask": MASK}
    one, three = (diagnose(model, data, batch_size=size) for size in (1, 3))
    for part in ("loss", "loss_low", "loss_high", "loss_null"):
        assert float(one.readings[part][0]) == pytest.approx(float(three.readings[part][0]))


def test_labels_per_document_are_scored_exactly_and_give_accuracy() -> None:
    torch.manual_seed(1)
    model = BertForSequenceClassification(BertConfig(**BERT, num_labels=3)).eval()
    labels = torch.tensor([0, 2, 1])
    data = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    found = diagnose(model, data)
    with torch.no_grad():
        out = model(**data)
    assert loss_of(found) == pytest.approx(float(out.loss), abs=1e-6)
    right = (out.logits.argmax(1) == labels).float().mean()
    assert loss_of(found, "accuracy") == pytest.approx(float(right))
    assert (
        found.readings["accuracy"]
        .attrs["null_meaning"]
        .endswith("an even guess among 3 classes gives 0.333")
    )
    assert "loss_low" in found.readings and "accuracy_low" in found.readings


def test_labels_per_token_are_scored_where_the_model_scores_them() -> None:
    labels = IDS.masked_fill(MASK == 0, -100)
    labels[:, :2] = -100
    for model in (
        GPT2LMHeadModel(GPT2Config(**GPT2)).eval(),
        BertForMaskedLM(BertConfig(**BERT)).eval(),
    ):
        data = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
        found = diagnose(model, data)
        with torch.no_grad():
            logits = model(input_ids=IDS, attention_mask=MASK).logits
        if isinstance(model, GPT2LMHeadModel):
            logits, wanted = logits[:, :-1], labels[:, 1:]
        else:
            wanted = labels
        each = [
            float(cross_entropy(x, y, ignore_index=-100))
            for x, y in zip(logits, wanted, strict=True)
        ]
        assert loss_of(found) == pytest.approx(np.mean(each), abs=1e-6)
        # Labels of shuffled tokens would be those of other tokens.
        assert float(found.readings["loss_null"][0]) == pytest.approx(math.log(11))


class Own(BertForSequenceClassification):
    """A loss that no known formula gives."""

    def forward(self, **inputs: Any) -> Any:
        out = super().forward(**inputs)
        if out.loss is not None:
            out.loss = out.loss * 7 + 3
        return out


def test_a_loss_of_the_models_own_has_no_interval_and_says_so() -> None:
    model = Own(BertConfig(**BERT, num_labels=3)).eval()
    data = {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([0, 2, 1])}
    found = diagnose(model, data)
    with torch.no_grad():
        assert loss_of(found) == pytest.approx(float(model(**data).loss), rel=1e-6)
    assert "loss_low" not in found.readings
    assert "one loss for a whole batch" in found.readings["loss"].attrs["reason"]
    assert "accuracy_low" in found.readings


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: BertForMaskedLM(BertConfig(**BERT)), "not causal"),
        (lambda: GPT2ForTokenClassification(GPT2Config(**GPT2)), "not over the vocabulary"),
        (lambda: BertForSequenceClassification(BertConfig(**BERT)), "no logits of tokens"),
        (
            lambda: GPT2LMHeadModel(GPT2Config(**GPT2)).transformer,
            "no logits of tokens|not over",
        ),
    ],
)
def test_where_there_is_none_the_report_says_why(make: Any, why: str) -> None:
    found = diagnose(make().eval(), {"input_ids": IDS, "attention_mask": MASK})
    assert not {"loss", "accuracy"} & set(found.readings)
    assert re.search(why, found.data["loss"])
    assert found.data["loss"].startswith("none: ")


def test_one_token_predicts_nothing() -> None:
    model = GPT2LMHeadModel(GPT2Config(**GPT2)).eval()
    ids = torch.tensor([[3, 1, 4], [5, 0, 0]])
    found = diagnose(model, {"input_ids": ids, "attention_mask": (ids > 0).long()})
    alone = diagnose(model, {"input_ids": ids[:1]})
    assert loss_of(found) == pytest.approx(loss_of(alone))
    assert "1 of 2 documents not counted" in found.readings["loss"].attrs["reason"]


def test_logits_that_are_no_numbers_are_not_computed() -> None:
    model = GPT2LMHeadModel(GPT2Config(**GPT2)).eval()
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = math.nan
    found = diagnose(model, {"input_ids": IDS, "attention_mask": MASK})
    assert math.isnan(loss_of(found))
    assert "not finite" in found.readings["loss"].attrs["reason"]


def test_batches_that_cannot_be_scored_alike_are_left_out_and_named() -> None:
    subject = Subject.of(nn.Linear(1, 1))
    loss = Loss()
    out = SimpleNamespace(loss=torch.tensor(math.log(2)), logits=torch.zeros(2, 2))
    loss.update(subject, Batch({"labels": torch.tensor([0, 1])}, (0, 1)), out)
    own = SimpleNamespace(loss=torch.tensor(5.0), logits=torch.zeros(2, 2))
    loss.update(subject, Batch({"labels": torch.tensor([0, 1])}, (2, 3)), own)
    (reading, _) = loss.read()
    assert float(reading.values[0]) == pytest.approx(math.log(2))
    assert "batches differ" in loss.said


def test_regression_is_the_models_own_loss() -> None:
    out = SimpleNamespace(loss=torch.tensor(0.25), logits=torch.zeros(2, 1))
    found = score(
        Subject.of(nn.Linear(1, 1)), Batch({"labels": torch.tensor([0.5, 0.5])}, (0, 1)), out
    )
    assert not isinstance(found, str)
    assert (found.kind, found.accuracy) == ("own", None)
    assert found.loss.tolist() == [0.25, 0.25]
