"""Watching a plain loop: what is counted, what is read, and that training does not change."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import AttentionInterface

from attoscope.errors import AttoscopeError
from attoscope.monitor import watch
from attoscope.monitor.readings import LayerReader
from attoscope.trace import Batch, Subject
from attoscope.trace import watch as trace_watch
from tests.models import VOCABULARY, Nano
from tests.monitor.build import BATCH, Encoder, batch, loss_of, nothing_is_left, same, train


def gpt2(implementation: str = "sdpa") -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_head=4, n_layer=2, n_positions=32,
        bos_token_id=1, eos_token_id=2, attn_implementation=implementation,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


MODELS = {
    "own softmax": Nano,
    "fused": lambda: Nano(fused=True),
    "torch encoder with dropout": Encoder,
    "GPT-2 with dropout": gpt2,
    "GPT-2 with dropout, eager": lambda: gpt2("eager"),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_to_the_last_bit(name: str) -> None:
    model = MODELS[name]()
    plain, _ = train(copy.deepcopy(model))
    look_up = AttentionInterface.__dict__.get("get_interface")
    watched, log = train(model, lambda m: watch(m, every=2))
    assert same(plain, watched)
    assert nothing_is_left(model)
    assert AttentionInterface.__dict__.get("get_interface") is look_up
    assert [row["step"] for row in log.rows] == [0, 2, 4]
    entropies = log.reading("normalised_entropy")
    assert len(entropies) == (3 if "GPT" not in name and "torch" not in name else 2)
    assert all(0 < value <= 1 for site in entropies.values() for value in site)
    assert all(math.isfinite(v) for row in log.rows for v in row.values())


def test_equality_is_a_real_test() -> None:
    model = Nano()
    plain, _ = train(copy.deepcopy(model))
    with torch.no_grad():
        model.head.bias[0] += 1e-6
    assert not same(plain, train(model)[0])


def test_readings_are_those_of_the_trace() -> None:
    model = Nano().train()
    x = batch()
    expected: dict[str, float] = {}
    reader = LayerReader()
    subject = Subject.of(model, feed=lambda m, inputs: m(inputs))
    trace_watch(
        subject,
        Batch(x, tuple(range(BATCH))),
        lambda layer, _: expected.update({} if layer.final else reader(layer)),
    )
    with watch(model, every=1) as log:
        loss_of(model, x).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        log.step()
    assert len(expected) == 3 * 15
    assert {key: log.rows[0][key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert log.rows[0]["gradient_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_accumulated_passes_are_one_step() -> None:
    model = Nano().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [[batch() for _ in range(3)] for _ in range(5)]
    with watch(copy.deepcopy(model)) as alone:
        loss_of(alone.model, parts[0][0]).backward()
        alone.step()
    with watch(model, every=2) as log:
        for step in parts:
            for part in step:
                (loss_of(model, part) / 3).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    assert log.count == 5
    assert [(row["step"], row["passes"]) for row in log.rows] == [(0, 3), (2, 3), (4, 3)]
    assert log.rows[-1]["gradient_norm"] == pytest.approx(float(norm), rel=1e-5)
    # It is the first part that was read.
    assert log.rows[0]["margin/decoder.1"] == alone.rows[0]["margin/decoder.1"]


def test_passes_that_do_not_train_are_ignored() -> None:
    model = Nano()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, every=1) as log:
        model.eval()
        loss_of(model, batch())
        model.train()
        with torch.no_grad():
            loss_of(model, batch())
        optimizer.step()
        assert (log.count, log.rows) == (0, [])
        loss_of(model, batch()).backward()
        model.eval()
        loss_of(model, batch())
        optimizer.step()
    assert [row["passes"] for row in log.rows] == [1]


def test_two_optimisers_and_an_explicit_step_count_once() -> None:
    model = Nano().train()
    first = torch.optim.SGD(model.h.parameters(), lr=0.1)
    second = torch.optim.Adam(model.head.parameters(), lr=0.1)
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with watch(model, every=1) as log:
        for _ in range(3):
            loss_of(model, batch()).backward()
            stranger.step()
            first.step()
            second.step()
            log.step()
    assert log.count == 3 and len(log.rows) == 3


def test_gradients_before_clipping_and_numbers_of_ones_own() -> None:
    model = Nano().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms, told = [], []
    with watch(model, every=1, loggers=[told.append]) as log:
        for ask in (True, False):
            loss = loss_of(model, batch())
            loss.backward()
            if ask:
                log.gradients()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            log.add(loss=loss.item())
            optimizer.step()
            optimizer.zero_grad()
    found = [row["gradient_norm"] for row in log.rows]
    assert found == pytest.approx([norms[0], 0.01], rel=1e-3)
    assert told == log.rows and log.rows[1]["loss"] == loss.item()


@pytest.mark.parametrize("step", [0, 1])
def test_nothing_is_left_after_an_exception(step: int) -> None:
    model = Nano().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(IndexError), watch(model, every=1) as log:
        for at in range(2):
            # The middle of the model, after a block was read.
            if at == step:
                model.h[1].register_forward_pre_hook(lambda *_: [].pop())
            loss_of(model, batch()).backward()
            optimizer.step()
    model.h[1]._forward_pre_hooks.clear()
    assert nothing_is_left(model)
    assert len(log.rows) == step


def test_a_step_whose_pass_failed_can_be_tried_again() -> None:
    model = Nano().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, every=1) as log:
        for _ in range(2):
            with pytest.raises(IndexError):
                model(torch.full((BATCH, 5), VOCABULARY + 1))
            loss_of(model, batch()).backward()
            optimizer.step()
    assert log.count == 2


def test_layers_that_are_skipped_or_change_do_not_stop_the_training() -> None:
    model = Nano().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = model.h
    with watch(model, every=1) as log:
        for count in (3, 2):
            model.h = blocks[:count]
            loss_of(model, batch()).backward()
            optimizer.step()
    assert [len([k for k in r if k.startswith("norm/")]) for r in log.rows] == [3, 2]


def test_a_reader_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Nano()
    with monkeypatch.context() as patch:
        patch.setattr(LayerReader, "_stream", lambda *_: [].pop())
        with pytest.warns(UserWarning, match="a look at step 0 failed: pop from empty list"):
            found, log = train(model, lambda m: watch(m, every=2))
    assert len(log.rows) == 3 and nothing_is_left(model)


def test_refusals() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).train()
    with pytest.raises(AttoscopeError, match="attention"), watch(plain):
        plain(torch.ones(2, 3))
    assert nothing_is_left(plain)
    with pytest.raises(AttoscopeError, match="every: got 0"):
        watch(plain, 0)
    with pytest.raises(AttoscopeError, match="model: got a list"):
        watch([plain])
    with pytest.raises(AttoscopeError, match="loggers: got a int"):
        watch(plain, loggers=[3])
    wrong = {"every": ("a", None, 1.5), "sequences": (0, -1, 2.5), "rows": (0, -1, 2.5)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(
                AttoscopeError, match=f"{name}: got {value!r}; expected a whole"
            ):
                watch(plain, **{name: value})
    with watch(plain) as log, pytest.raises(AttoscopeError, match="already"):
        log.__enter__()


def test_a_model_that_is_not_the_one_called_is_said() -> None:
    model = Nano().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="was not called"), watch(nn.Sequential(model).train()):
        for _ in range(4):
            loss_of(model, batch()).backward()
            optimizer.step()


def test_numbers_after_the_step_join_its_row_and_no_other() -> None:
    model = Nano().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, every=2) as log:
        for at in range(4):
            loss = loss_of(model, batch())
            loss.backward()
            optimizer.step()
            log.add(mine=at, held=loss)
            with pytest.raises(AttoscopeError, match="mine: got str; expected one number"):
                log.add(mine="3")
    assert [row["mine"] for row in log.rows] == [0.0, 2.0]
    assert all(type(row["held"]) is float for row in log.rows)


def test_passes_without_a_step_are_said() -> None:
    model = Nano().train()
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="2 training passes of the Nano were seen and no step"):
        with watch(model, every=1) as log:
            for _ in range(2):
                loss_of(model, batch()).backward()
                stranger.step()
    assert log.rows == [] and nothing_is_left(model)


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)])
@pytest.mark.parametrize("at", [0, 1])
def test_empty_batches_are_said(shape: tuple[int, int], at: int) -> None:
    model = Nano().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=f"look at step {at} failed: the batch is empty"):
        with watch(model, every=1) as log:
            for step in range(3):
                x = torch.zeros(shape, dtype=torch.long) if step == at else batch()
                model(x).sum().backward()
                optimizer.step()
    assert ["margin/decoder.1" in row for row in log.rows] == [i != at for i in range(3)]
