"""Selections of live heads: the head's own weight makes them, in both spaces alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attoscope import AttoscopeError
from attoscope.svm import AttentionSVM
from attoscope.trace import attention_rows, watch
from attoscope.trace.selections import HeadSelection, head_selections
from tests.models import make

HEAD_SPACE = ["bert", "gpt2", "llama", "mistral", "qwen3", "t5", "bart", "vit", "modernbert"]


def competing(found: HeadSelection) -> np.ndarray:
    selection = found.selection
    return np.broadcast_to(~selection.selected & selection.allowed, selection.selected.shape)


def least_margin(found: HeadSelection) -> float:
    return float(found.selection.margins(found.weight)[competing(found)].min())


@pytest.mark.parametrize("name", HEAD_SPACE)
def test_scores_are_the_models_own(name: str) -> None:
    subject, batch = make(name)
    weights: dict[tuple[str, int], np.ndarray] = {}

    def visit(layer, batch) -> None:
        for call in layer.calls:
            every = torch.arange(call.shape[2]).expand(call.shape[0], -1)
            rows = attention_rows(call, every)
            for head in range(call.shape[1]):
                weights[str(call.site), head] = rows.weights[:, head].double().numpy()

    watch(subject, batch, visit)
    found = head_selections(subject, batch)
    assert {(f.site, f.head) for f in found} == set(weights)
    for one in found:
        scores = one.selection.scores(one.weight)
        own = np.exp(scores - scores.max(1, keepdims=True))
        own /= own.sum(1, keepdims=True)
        theirs = weights[one.site, one.head][one.documents, one.positions]
        open_ = one.selection.allowed
        theirs = np.where(open_, theirs, 0.0)
        theirs = theirs / theirs.sum(1, keepdims=True)
        np.testing.assert_allclose(own, theirs, atol=2e-5, err_msg=f"{one.site} {one.head}")
        assert least_margin(one) >= -1e-5


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "gpt2", "distilbert", "bart", "vit", "nano_fused"]
)
def test_the_stream_says_the_same_as_the_head(name: str) -> None:

    subject, batch = make(name)
    inside = head_selections(subject, batch)
    outside = head_selections(subject, batch, space="stream")
    assert len(inside) == len(outside)
    for a, b in zip(inside, outside, strict=True):
        assert (a.site, a.head) == (b.site, b.head)
        np.testing.assert_array_equal(a.selection.selected, b.selection.selected)
        mine = a.selection.margins(a.weight)[competing(a)]
        theirs = b.selection.margins(b.weight)[competing(b)]
        np.testing.assert_allclose(theirs, mine, atol=2e-4)
    assert outside[0].selection.shape[3] == outside[0].selection.shape[2] + 1


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rotary_queries_have_no_single_weight(name: str) -> None:
    subject, batch = make(name)
    with pytest.raises(AttoscopeError, match='rotary embedding.*use space="head"'):
        head_selections(subject, batch, space="stream")


def test_padding_is_neither_query_nor_key() -> None:
    subject, batch = make("bert")
    found = head_selections(subject, batch, sites=("encoder.1",), heads=(2,))
    assert [(f.site, f.head) for f in found] == [("encoder.1", 2)]
    one = found[0]
    assert batch.valid is not None
    valid = batch.valid.numpy()
    assert one.selection.queries.shape[0] + one.undecided == valid.sum()
    assert (one.selection.allowed == valid[one.documents]).all()


def test_later_keys_do_not_compete() -> None:
    subject, batch = make("gpt2")
    one = head_selections(subject, batch, sites=("decoder.0",), heads=(0,))[0]
    steps = np.arange(one.selection.shape[1])
    assert not one.selection.allowed[steps[None, :] > one.positions[:, None]].any()
    assert one.undecided == 3 and 0 not in one.positions


def test_keys_that_keep_a_share_are_chosen_together() -> None:
    subject, batch = make("bert")
    one = head_selections(subject, batch, sites=("encoder.0",), heads=(0,), keep=0.99)[0]
    assert (one.selection.selected.sum(1) > 1).any()
    single = head_selections(subject, batch, sites=("encoder.0",), heads=(0,))[0]
    assert (single.selection.selected.sum(1) == 1).all()


def test_a_sample_of_queries_is_the_same_each_time() -> None:
    subject, batch = make("bert")
    first, again = (head_selections(subject, batch, queries=6, seed=3)[0] for _ in range(2))
    assert first.selection.shape[0] == 6
    np.testing.assert_array_equal(first.positions, again.positions)


def test_equal_tokens_are_left_out_and_counted() -> None:
    subject, batch = make("nano_fused")
    inputs = batch.inputs["input_ids"].clone()
    inputs[:, 3] = inputs[:, 2]
    batch.inputs["input_ids"] = inputs
    # Without positions, the first layer cannot tell equal tokens apart.
    found = head_selections(subject, batch)[0]
    assert found.ties > 0
    assert least_margin(found) > 0


def test_a_real_problem_is_solved(minilm) -> None:
    from attoscope.trace import Subject, batches

    subject = Subject.load(minilm)
    batch = next(batches(subject, ["The captain told the crew that the storm would pass."]))
    for space in ("head", "stream"):
        one = head_selections(subject, batch, sites=("encoder.2",), heads=(3,), space=space)[0]
        model = AttentionSVM(tol=1e-6).fit_selection(one.selection)
        own = float(np.linalg.norm(one.weight)) / least_margin(one)
        assert model.objective_ <= own * (1 + 1e-9)
        assert model.gap_ <= 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sites": ("encoder.9",)}, "sites: got encoder.9; expected some of encoder.0"),
        ({"heads": (7,)}, "heads: got 7; expected 0 to 3"),
        ({"keep": 0.0}, "keep: got 0.0"),
    ],
)
def test_bad_requests(options, message: str) -> None:
    subject, batch = make("bert")
    with pytest.raises(AttoscopeError, match=message):
        head_selections(subject, batch, **options)


def test_the_model_is_left_as_it_was() -> None:
    subject, batch = make("bert")
    hooks = sum(len(m._forward_hooks) for m in subject.model.modules())
    head_selections(subject, batch, space="stream")
    assert sum(len(m._forward_hooks) for m in subject.model.modules()) == hooks
