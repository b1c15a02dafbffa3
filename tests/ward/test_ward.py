"""Nine faults on an encoder, a decoder and a vision transformer: found, at the right layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from attoscope.diagnosing import diagnose
from attoscope.errors import AttoscopeError
from attoscope.findings import Finding
from attoscope.sample import SAMPLE_TEXTS
from attoscope.trace import Batch, Subject, batches
from attoscope.ward import FAULTS, broken
from examples import assets
from tests.conftest import packaged
from tests.models import make

TOKENS = 64
HEAD = 1
Patient = tuple[Subject, Any, Batch]


def _images(folder: Path) -> list[Any]:
    return [Image.open(file).copy() for file in sorted(folder.glob("*.png"))[:16]]


@pytest.fixture(scope="module", params=["encoder", "decoder", "vision"])
def patient(request: pytest.FixtureRequest) -> Iterator[Patient]:
    kind = request.param
    if kind == "encoder":
        subject, data = Subject.load(packaged(assets.minilm)), list(SAMPLE_TEXTS[:6])
    elif kind == "decoder":
        subject, data = Subject.load(packaged(assets.smollm2)), list(SAMPLE_TEXTS[:4])
    else:
        subject = Subject.load(request.getfixturevalue("vit_digits"))
        data = _images(request.getfixturevalue("digit_images"))
    yield subject, data, next(batches(subject, data, max_tokens=TOKENS))


def alarms(patient: Patient) -> list[Finding]:
    subject, data, _ = patient
    found = diagnose(subject, data, max_tokens=TOKENS, null=False)
    return [f for f in found.findings if f.severity != "note"]


def depth(patient: Patient) -> int:
    return len(patient[0].layout(patient[2]).stacks[0].layers)


COLLAPSES = ("rank collapse", "collapse with both signs")


def chosen_layers(fault: str, layers: int) -> tuple[int, ...]:
    half = layers // 2
    if fault in COLLAPSES:
        return tuple(range(half, layers))
    if fault == "over-smoothing":
        return tuple(range(layers - 5, layers))
    if fault == "sharpening":
        return (half, half + 1, half + 2)
    return (half, half + 1) if fault == "uniform attention" else (half,)


def test_the_unbroken_model_raises_no_alarm(patient: Patient) -> None:
    assert not alarms(patient)


@pytest.mark.parametrize("name", ["bert_pretrained", "bert_ft", "bert_ft_10k_25s"])
def test_twelve_layers_fine_tuned_or_not_raise_no_alarm(name: str) -> None:
    subject = Subject.load(packaged(partial(assets.reaction_bert, name)))
    data = list(assets.REACTIONS)
    assert not alarms((subject, data, next(batches(subject, data))))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found_where_it_is(patient: Patient, fault: str) -> None:
    subject, _, batch = patient
    layers = chosen_layers(fault, depth(patient))
    with broken(subject, batch, fault, layers, head=HEAD):
        found = [f for f in alarms(patient) if f.id == FAULTS[fault].finding]
    assert found, f"{fault} was not found"
    numbers = [
        int(site.split(".")[1]) for f in found for site in f.sites if "final" not in site
    ]
    if fault == "over-smoothing":
        # Drawn together little by little: alike some layers later, and until the end.
        assert set(layers[2:]) <= set(numbers) <= set(layers)
    else:
        assert min(numbers) == layers[0]
    if fault in ("uniform attention", "sharpening", *COLLAPSES):
        assert set(layers) <= set(numbers)
    if fault == "dead head":
        stack = subject.layout(batch).stacks[0].name
        assert found[0].heads == ((f"{stack}.{layers[0]}", HEAD),)
    assert found[0].remedy.text and found[0].paper


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "nano", "t5"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_the_output_and_is_undone(name: str, fault: str) -> None:
    subject, batch = make(name)
    before = [p.clone() for p in subject.model.parameters()]

    def output() -> torch.Tensor:
        with torch.no_grad():
            first = subject.run(batch)
        return first if isinstance(first, torch.Tensor) else next(iter(first.values()))

    whole = output()
    with broken(subject, batch, fault, (1,)):
        assert not torch.equal(output(), whole)
    assert torch.equal(output(), whole)
    assert all(map(torch.equal, before, subject.model.parameters()))
    assert not any(m._forward_hooks for m in subject.model.modules())


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda s, b: broken(s, b, "no such fault", (1,)), "expected one of uniform attention"),
        (lambda s, b: broken(s, b, "dead head", (7,)), r"layers: got \[7\]"),
    ],
)
def test_what_cannot_be_broken(apply: Callable[..., Any], message: str) -> None:
    subject, batch = make("bert")
    with pytest.raises(AttoscopeError, match=message), apply(subject, batch):
        pass
