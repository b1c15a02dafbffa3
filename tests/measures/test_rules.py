"""Rules: each fault is found at its place, merged over neighbours, and nothing else is said."""

from __future__ import annotations

import ast
import math

import numpy as np
import pytest
import torch

from attoscope.measures import Selection, Smoothness, Stream, findings_of
from attoscope.measures.places import parse, phrase
from attoscope.measures.words import Number, Plural, heads_phrase
from tests.measures.build import batch, call, layer
from tests.measures.healthy import LAYERS, TOKENS, Model, only, sites


@pytest.fixture
def model():
    return Model()


def test_a_working_model_gets_no_finding(model):
    assert model.findings() == []


def test_uniform_attention_in_neighbouring_layers_is_one_finding(model):
    model.scores[3:6] = 0.0
    found = only(model.findings())
    assert (found.id, found.severity, found.sites) == (
        "uniform_attention",
        "warning",
        sites(3, 4, 5),
    )
    assert len(found.heads) == 12
    assert found.sentence.startswith("In layers 3–5, all 12 heads make no choice: ")
    assert found.measured == 0.0 and found.reading == "score_scale"
    assert found.evidence[0].head is not None and found.evidence[0].chosen_position is not None


def test_layers_apart_are_two_findings(model):
    model.scores[[1, 4]] = 0.0
    assert [f.sites for f in model.findings()] == [sites(1), sites(4)]


def test_a_single_even_head_is_a_note(model):
    model.scores[2, :, 1] = 0.0
    found = only(model.findings())
    assert (found.id, found.severity, found.heads) == (
        "uniform_head",
        "note",
        (("encoder.2", 1),),
    )
    assert found.sentence.startswith("Layer 2 head 1 makes no choice")


def test_saturated_attention(model):
    model.scores[1] *= 50
    found = only(model.findings())
    assert (found.id, found.severity, found.sites) == (
        "saturated_attention",
        "warning",
        sites(1),
    )
    assert found.null == pytest.approx(math.sqrt(2 * math.log(TOKENS)), rel=1e-6)
    assert found.interval is not None and found.interval[0] <= found.measured


def test_sharp_heads_that_can_still_be_moved_are_no_fault(model):
    """Every head looks at the token before, with 99 % of its attention."""
    model.scores[2] = 8.0 * torch.roll(torch.eye(TOKENS), 1, 0)
    assert model.findings() == []


def test_a_steep_position_bias_is_no_fault(model):
    """Scores spread far above the freezing point, but neighbours share the attention."""
    apart = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs().float()
    model.scores[2:] = -2.0 * apart
    assert model.findings() == []


def test_a_sink_in_every_head_is_a_note(model):
    model.scores[2:4, ..., 0] += 6.0
    found = only(model.findings())
    assert (found.id, found.severity, found.sites) == ("attention_sink", "note", sites(2, 3))
    assert "all 8 heads put more than 30 % of their attention on the first" in found.sentence


def test_a_short_text_has_no_sink(model):
    """Even attention over a causal prefix of four puts half of it on the first token."""
    measure = Selection()
    measure.update(layer(calls=[call(torch.zeros(1, 2, 4, 4), causal=True)]), batch(0))
    ids = [f.id for f in findings_of([measure], measure.read())]
    assert ids == ["uniform_attention"]


def test_a_dead_head(model):
    model.weight[4, 2] = 0.0
    found = only(model.findings())
    assert (found.id, found.heads) == ("dead_head", (("encoder.4", 2),))
    assert found.sentence.startswith("Layer 4 head 2 writes next to nothing")


def test_a_massive_channel_is_no_rank_collapse(model):
    for i in range(4, LAYERS + 1):
        model.stream[i] = model.stream[i].clone()
        model.stream[i][..., 7] += 1000.0
    found = [f for f in model.findings() if f.severity != "note"]
    found = [f for f in found if f.id != "exploding_stream"]
    assert only(found).id == "massive_channel"
    assert found[0].sites == sites(3, 4, 5)
    assert "channel 7 alone holds 100 %" in found[0].sentence or "99." in found[0].sentence
    assert "channel = 7" in found[0].remedy.code


def test_a_massive_first_token_is_a_note(model):
    for i in (3, 4):
        model.stream[i][:, 0, 5] = 2000.0
    found = [f for f in model.findings() if f.id == "massive_activation"]
    assert only(found).severity == "note"
    assert "the first token carries an activation" in found[0].sentence


def test_a_block_that_does_nothing(model):
    model.stream[4] = model.stream[3] * (1 + 1e-5)
    found = only(model.findings())
    assert (found.id, found.sites) == ("idle_block", sites(3))
    assert found.sentence.startswith("Layer 3 changes the stream by")
    assert "encoder.layer.3" in found.remedy.code


def test_a_stream_that_doubles_block_after_block(model):
    for i in range(LAYERS + 1):
        model.stream[i] = model.stream[i] * 2.5**i
    found = only(model.findings())
    assert (found.id, found.sites) == ("exploding_stream", sites(1, 2, 3, 4, 5))


def test_embeddings_of_any_scale_are_no_explosion(model):
    model.stream[0] = model.stream[0] * 1e-3
    assert model.findings() == []


def test_nan_is_found_where_it_starts(model):
    for i in range(3, LAYERS + 1):
        model.stream[i] = model.stream[i].clone()
        model.stream[i][0, 5] = math.nan
    model.scores[3:, 0] = math.nan
    found = only(model.findings())
    assert (found.id, found.severity, found.sites) == ("non_finite", "severe", sites(2))
    assert "appear after layer 2" in found.sentence
    assert "and all 3 points after it" in found.sentence
    assert (found.evidence[0].document, found.evidence[0].position) == (0, 5)


def test_nan_in_scores_is_found_at_its_site(model):
    model.scores[4, :, 3] = math.nan
    found = only(model.findings())
    assert (found.id, found.severity, found.heads) == (
        "non_finite_scores",
        "severe",
        (("encoder.4", 3),),
    )


def test_the_most_severe_comes_first(model):
    model.scores[1] = 0.0
    model.stream[6] = torch.full_like(model.stream[6], math.nan)
    assert [f.severity for f in model.findings()] == ["severe", "warning"]


def test_every_rule_has_a_source_a_remedy_and_code_that_is_python():
    rules = [*Selection.rules, *Smoothness.rules, *Stream.rules]
    assert len({rule.id for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.paper and rule.remedy.endswith("."), rule.id
        code = rule.code.replace("$modules", "[]").replace("$heads", "{}")
        ast.parse(code.replace("$channel", "7"))
        assert rule.sentence.endswith((".", ";")), rule.id


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["encoder.3"], "layer 3"),
        (["encoder.3", "encoder.4"], "layers 3 and 4"),
        (["encoder.3", "encoder.4", "encoder.5"], "layers 3–5"),
        (["encoder.1", "encoder.5", "encoder.final"], "layers 1 and 5 and the final norm"),
        (["encoder.in"], "the input of the first layer"),
        (["decoder.2.cross"], "the cross attention of layer 2"),
    ],
)
def test_places_in_words(labels, expected):
    assert phrase([parse(label) for label in labels], one_track=True) == expected


def test_the_stack_is_named_where_there_are_several():
    assert phrase([parse("decoder.2")], one_track=False) == "layer 2 of the decoder"


def test_numbers_in_words():
    assert [f"{Number(x):percent}" for x in (0.5, 0.0123, 0.0, 1.0, 0.996)] == [
        "50 %", "1.2 %", "0 %", "100 %", "99.6 %",
    ]  # fmt: skip
    assert [f"{Number(x)}" for x in (14523.4, 0.25, 1e-9, np.nan)] == [
        "14,523", "0.25", "1.0e-09", "not computed",
    ]  # fmt: skip
    assert f"{Plural(1):is|are}, {Plural(2):is|are}" == "is, are"
    assert heads_phrase(1, 1) == "the only head" and heads_phrase(3, 8) == "3 of 8 heads"
