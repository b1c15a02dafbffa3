"""Heads as max-margin selectors: planted heads whose numbers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attoscope.diagnosing import diagnose
from attoscope.errors import AttoscopeError
from attoscope.maxmargin import Choices, collect, geometry, held_out, max_margin
from attoscope.maxmargin.choices import rotated
from attoscope.maxmargin.predictors import (
    difference,
    feasible_weight,
    hits,
    mean_difference,
    position_table,
    solve,
    svm,
    token_table,
)
from attoscope.svm import Selection
from attoscope.trace import Subject, batches
from tests.models import make


def choices(
    keys: Any, queries: Any, selected: Any, sequence: Any, weight: Any, **changes: Any
) -> Choices:
    """A head, from plain arrays: no sinks, tokens numbered by position."""
    selection = Selection(keys, queries, selected, sequence)
    documents, tokens, _ = selection.keys.shape
    made = Choices(
        selection, np.asarray(weight, float), "encoder.0", 0,
        np.zeros(len(selection.queries), int), np.tile(np.arange(tokens), (documents, 1)),
        np.zeros((documents, tokens), bool),
    )  # fmt: skip
    return replace(made, **changes)


def planted(seed: int, documents: int = 8, tokens: int = 6, width: int = 4) -> Choices:
    """Queries name a coordinate, keys are coordinates in random order: W = I makes the choice."""
    rng = np.random.default_rng(seed)
    keys = np.stack([np.eye(tokens, width)[rng.permutation(tokens)] for _ in range(documents)])
    sequence = np.repeat(np.arange(documents), width)
    wanted = np.tile(np.arange(width), documents)
    queries = np.eye(width)[wanted]
    selected = np.array([keys[s, :, w].argmax() for s, w in zip(sequence, wanted, strict=True)])
    return choices(keys, queries, selected, sequence, np.eye(width))


def at_random(seed: int, documents: int = 40, tokens: int = 8) -> Choices:
    rng = np.random.default_rng(seed)
    keys, queries = (
        rng.standard_normal((documents, tokens, 6)),
        rng.standard_normal((documents * 4, 6)),
    )
    sequence = np.repeat(np.arange(documents), 4)
    chosen = rng.integers(0, tokens, len(queries))
    return choices(keys, queries, chosen, sequence, np.eye(6))


def test_a_planted_head_has_its_known_svm() -> None:
    # One query e1, keys e1 and 0: margin of W is W_11, so the SVM is e1 e1^T of norm 1.
    keys = np.array([[[1.0, 0.0], [0.0, 0.0]]])
    head = choices(keys, [[1.0, 0.0]], [0], [0], [[3.0, 4.0], [0.0, 0.0]])
    found = geometry(head)
    assert found is not None
    # Margin 3 at norm 5, against 1 at norm 1; the cosine is the same by <W, e1 e1^T> = 3.
    assert found.margin_share == pytest.approx(0.6, abs=1e-9)
    assert found.alignment == pytest.approx(0.6, abs=1e-9)
    assert (found.rank, found.support_share) == (1, 1.0)
    assert found.stable_rank == pytest.approx(1.0)
    assert found.support.tolist() == [[0, 1]]


def test_alignment_is_the_mean_margin_on_the_support() -> None:
    head = planted(0).rechosen(rotated(np.eye(4), np.random.default_rng(3)))
    assert head is not None
    model, found = solve(head, tol=1e-9), geometry(head)
    assert model is not None and found is not None
    dual = model.dual_.toarray()
    margins = head.selection.margins(head.weight)
    mean = (dual * np.where(dual > 0, margins, 0.0)).sum() / dual.sum()
    best = 1.0 / np.linalg.norm(model.weight_)
    assert found.alignment == pytest.approx(mean / np.linalg.norm(head.weight) / best, rel=1e-3)
    assert found.alignment >= found.margin_share


def test_a_planted_head_is_predicted_and_its_position_is_not() -> None:
    head = planted(1, documents=24)
    learners = {"svm": svm(), "difference": difference, "position": position_table}
    found = held_out(head, learners)
    assert found is not None
    assert found.share("svm") == found.share("difference") == 1.0
    # Zero rows of keys do not compete with a positive score, but there are six places.
    assert found.share("chance") == pytest.approx(1 / 6)
    assert found.share("position") < 0.35


def test_a_head_that_chooses_at_random_is_at_chance() -> None:
    found = held_out(at_random(0), {"svm": svm(C=1.0), "position": position_table})
    assert found is not None
    error = 3 * np.sqrt(1 / 8 * 7 / 8 / len(found.document))
    for name in ("svm", "position"):
        assert abs(found.share(name) - 1 / 8) < error, name


def test_choices_that_no_weight_makes_have_no_prediction() -> None:
    keys = np.array([[[1.0], [0.0], [2.0]]] * 2)
    head = choices(keys, [[1.0], [1.0]], [0, 0], [0, 1], [[1.0]])  # 1 lies between 0 and 2
    found = held_out(head, {"svm": svm()})
    assert found is not None and np.isnan(found.share("svm"))
    assert geometry(head) is None


def test_a_head_of_one_place_is_predicted_by_position() -> None:
    head = at_random(1)
    fixed = head.selection.replace(selected=np.full(len(head.chosen), 5))
    found = held_out(replace(head, selection=fixed), {"position": position_table})
    assert found is not None and found.share("position") == 1.0


def test_a_head_of_one_token_is_predicted_by_the_token() -> None:
    rng = np.random.default_rng(0)
    head = at_random(2)
    tokens = np.argsort(rng.random(head.tokens.shape), axis=1)
    chosen = (tokens == 3).argmax(1)[head.selection.sequence]
    fixed = replace(head, selection=head.selection.replace(selected=chosen), tokens=tokens)
    found = held_out(fixed, {"token": token_table, "position": position_table})
    assert found is not None and found.share("token") == 1.0
    assert found.share("position") < 0.5


def test_ties_are_shared() -> None:
    head = at_random(3)
    assert hits(np.zeros(head.allowed.shape), head) == pytest.approx(1 / 8)
    assert np.isnan(hits(np.full(head.allowed.shape, np.nan), head)).all()


def test_the_mean_difference_is_one_gradient_step() -> None:
    head = choices([[[1.0], [0.0], [-1.0]]], [[2.0, 1.0]], [0], [0], [[1.0, 0.0]])
    # 1 - (0 - 1) / 2 = 1.5, times the query.
    np.testing.assert_allclose(mean_difference(head), [[3.0, 1.5]])


def test_a_random_feasible_weight_makes_the_same_choices_and_is_another() -> None:
    head, rng = planted(2), np.random.default_rng(0)
    model = solve(head)
    assert model is not None
    weight = feasible_weight(head, rng, 10 * model.objective_)
    assert weight is not None
    assert head.selection.margins(weight)[~head.selection.selected].min() > 1 - 1e-6
    assert np.linalg.norm(weight) > 2 * np.linalg.norm(model.weight_)
    again = feasible_weight(head, np.random.default_rng(0), 10 * model.objective_)
    np.testing.assert_array_equal(weight, again)


def test_a_rotated_weight_keeps_its_singular_values() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((5, 2)) @ rng.standard_normal((2, 7))
    turned = rotated(weight, rng)
    for one, other in zip(np.linalg.svd(weight)[1], np.linalg.svd(turned)[1], strict=True):
        assert one == pytest.approx(other, abs=1e-12)
    assert abs(np.vdot(weight, turned)) < 0.9 * np.vdot(weight, weight)


def test_sinks_are_left_out_on_both_sides() -> None:
    head = at_random(4)
    sinks = np.zeros(head.tokens.shape, bool)
    sinks[:, [0, 7]] = True
    positions = np.tile([0, 3, 4, 7], 40)
    kept = replace(head, sinks=sinks, positions=positions).without_sinks()
    assert kept is not None
    assert set(kept.positions) == {3, 4}
    assert not kept.on_sinks().any() and not kept.allowed[:, [0, 7]].any()
    scores = np.where(kept.allowed, kept.selection.scores(head.weight), -np.inf)
    assert (scores.argmax(1) == kept.chosen).all()


def subject_and_batch(name: str = "llama", documents: int = 4) -> tuple[Subject, Any]:
    torch.manual_seed(0)
    subject, _ = make(name)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 60, (documents, 11)))
    return subject, list(batches(subject, {"input_ids": ids}))


def test_grouped_heads_have_all_readings_and_the_same_seed_the_same_numbers() -> None:
    subject, data = subject_and_batch()
    first, again = (
        max_margin(subject, data, sites=("decoder.1",), queries=12, seed=3) for _ in range(2)
    )
    assert [r.name for r in first.readings][:3] == [
        "svm_held_out", "svm_held_out_position", "svm_margin_share",
    ]  # fmt: skip
    for one, other in zip(first.readings, again.readings, strict=True):
        assert one.dims == ("site", "head") and one.values.shape == (1, 4)
        np.testing.assert_array_equal(one.values, other.values, err_msg=one.name)
        assert one.null is not None and np.isfinite(one.values).all(), one.name
        low, high = one.range
        assert (one.values >= (low or 0.0) - 1e-9).all()
        assert high is None or (one.values <= high + 1e-9).all()
    assert first.heads == again.heads
    assert first.readings[0].low is not None
    assert len(first.heads) == 4 and all(h["competitors"] for h in first.heads)


def test_one_token_has_no_choice_and_says_so() -> None:
    subject, data = subject_and_batch(documents=2)
    short = [next(batches(subject, {"input_ids": data[0].inputs["input_ids"][:, :1]}))]
    with pytest.raises(AttoscopeError, match="no query with keys to choose between"):
        max_margin(subject, short)


def test_one_document_has_no_held_out_choices_and_says_so() -> None:
    subject, data = subject_and_batch(documents=1)
    found = max_margin(subject, data, sites=("decoder.0",), queries=8)
    held, share = found.readings[0], found.readings[2]
    assert np.isnan(held.values).all() and "documents not counted" in held.reason
    assert np.isfinite(share.values).all()


def test_one_head() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 1, 8, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    subject = Subject.of(model)
    data = list(batches(subject, torch.randn(4, 7, 8)))
    found = max_margin(subject, data, queries=16)
    assert found.readings[0].values.shape == (1, 1)
    assert found.heads[0]["competitors"][0]["token"] is None


def test_several_batches_are_one_problem() -> None:
    subject, data = subject_and_batch(documents=4)
    ids = data[0].inputs["input_ids"]
    parts = [
        *batches(subject, {"input_ids": ids[:2]}),
        *batches(subject, {"input_ids": ids[2:, :7]}),
    ]
    whole = collect(subject, parts, queries=None)[0]
    assert whole.selection.keys.shape == (4, 11, 8)
    assert (whole.tokens[2:, 7:] == -1).all() and not whole.allowed[-1, 7:].any()
    alone = collect(subject, parts[1:], queries=None)[0]
    mine = whole.selection.sequence >= 2
    np.testing.assert_array_equal(whole.chosen[mine], alone.chosen)


def test_a_diagnosis_has_the_readings_only_when_asked(tmp_path: Path) -> None:
    subject, data = subject_and_batch()
    ids = {"input_ids": data[0].inputs["input_ids"]}
    plain = diagnose(subject, ids, layers=(0, 1))
    asked = diagnose(subject, ids, layers=(0, 1), svm=True)
    assert "svm_held_out" not in plain.readings and "svm" not in plain.data
    assert asked.readings["svm_held_out"].dims == ("site", "head")
    assert "svm_held_out_null" in asked.readings
    back = type(asked).from_json(asked.to_json(tmp_path / "report.json"))
    np.testing.assert_array_equal(back.readings["svm_rank"], asked.readings["svm_rank"])
    assert back.data["svm"]["heads"][0]["competitors"]
