"""Treated models in training: gradient checkpointing, compilation; and under the trace."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attoscope
from attoscope import AttoscopeError
from attoscope.checking import check
from attoscope.diagnosing import diagnose
from attoscope.trace import Batch, Layer, Subject, watch
from attoscope.unchanged import first_output
from tests.models import Nano
from tests.remedies.treated import KINDS, data_of, output, read, sized


def moved(treatment: Any) -> None:
    with torch.no_grad():
        for parameter in treatment.parameters():
            parameter.add_(torch.rand(parameter.shape) * 0.2)


def gradients(subject: Subject, *batches: Batch) -> dict[str, Tensor]:
    """Of a loss over some columns; all forward passes before the backward pass."""
    subject.model.zero_grad()
    losses = [first_output(subject.run(b))[..., :5].sum(-1).square().mean() for b in batches]
    torch.stack(losses).sum().backward()
    return {
        n: p.grad.clone() for n, p in subject.model.named_parameters() if p.grad is not None
    }


def checkpointed(model: Any, reentrant: bool = False) -> None:
    name = "activation_checkpointing_enable"
    if not hasattr(model, name):
        name = "gradient_checkpointing_enable"
    getattr(model, name)({"use_reentrant": reentrant})


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, kind: str) -> None:
    if (name, kind) == ("llama", "spectral"):
        pytest.skip("grouped heads have no spectral form")
    subject, batch = sized(name)
    moved(attoscope.treat(subject.model, kind))
    without_dropout(subject.model)
    plain = gradients(subject, batch)
    checkpointed(subject.model)
    for _ in range(2):
        found = gradients(subject, batch)
        assert found.keys() == plain.keys()
        for key, gradient in plain.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5)


def test_checkpointing_that_would_be_wrong_is_refused() -> None:
    subject, batch = sized("bert")
    attoscope.treat(subject.model, "neutreno")
    without_dropout(subject.model)
    other = Batch({k: v.flip(0) for k, v in batch.inputs.items()}, batch.documents)
    checkpointed(subject.model)
    with pytest.raises(AttoscopeError, match="backward pass of another forward pass"):
        gradients(subject, batch, other)
    checkpointed(subject.model, reentrant=True)
    with pytest.raises(AttoscopeError, match="reentrant"):
        gradients(subject, batch)


class Own(Nano):
    """A loop that checkpoints its blocks itself."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.ln_f(x))


def test_layers_that_share_weights_and_a_checkpoint_are_refused() -> None:
    model = Own()
    model.h = nn.ModuleList([model.h[0]] * 3)
    model.gradient_checkpointing = True
    ids = torch.randint(0, 60, (2, 8))
    attoscope.treat(model, "neutreno", {"input_ids": ids})
    with pytest.raises(AttoscopeError, match="layers that share their weights"):
        model(ids).sum().backward()


def test_a_checkpoint_of_one_s_own_is_refused_in_a_sentence() -> None:
    model = Own()
    ids = torch.randint(0, 60, (2, 8))
    attoscope.treat(model, "neutreno", {"input_ids": ids})
    with pytest.raises(AttoscopeError, match="checkpoint that is not one of Hugging Face's"):
        model(ids).sum().backward()


COMPILED = """
import sys, torch, attoscope
from attoscope.unchanged import first_output
from tests.remedies.treated import output, sized

torch.set_num_threads(1)
subject, batch = sized("bert")
treatment = attoscope.treat(subject.model, sys.argv[1])
with torch.no_grad():
    for parameter in treatment.parameters():
        parameter.add_(torch.rand(parameter.shape) * 0.2)
expected = output(subject, batch)
compiled = torch.compile(subject.model, backend="aot_eager", fullgraph=True)
with torch.no_grad():
    for _ in range(2):
        found = first_output(compiled(**batch.inputs))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
first_output(compiled(**batch.inputs))[..., :5].sum().backward()
assert all(bool((p.grad != 0).any()) for p in treatment.parameters())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["neutreno", "spectral"])
def test_a_compiled_forward_is_the_same(kind: str) -> None:
    """In a process without type checks, which the compiler cannot look through."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, kind], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_a_treated_model_is_diagnosed(name: str, kind: str) -> None:
    if (name, kind) == ("llama", "spectral"):
        pytest.skip("grouped heads have no spectral form")
    subject, batch = sized(name)
    moved(attoscope.treat(subject.model, kind, data_of(subject, batch)))
    before = output(subject, batch)
    found = diagnose(subject, batch, null=False)
    assert list(found.readings["site"].values)
    assert torch.equal(output(subject, batch), before)
    layers: list[Layer] = []
    watch(subject, batch, lambda layer, _: layers.append(layer))
    calls = [call for layer in layers for call in layer.calls]
    assert len(calls) == 3
    assert all(call.output_weight is not None for call in calls)


def test_a_treated_model_is_checked() -> None:
    subject, batch = sized("bert")
    attoscope.treat(subject.model, "neutreno")
    ids = batch.inputs["input_ids"]
    assert check(subject, {"input_ids": ids}) is not None


def test_what_a_head_writes_is_what_the_kernel_gave() -> None:
    """The remedy's term is outside the call: heads plus term is what the projection reads."""
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, "neutreno")
    layers: list[Layer] = []
    watch(subject, batch, lambda layer, _: layers.append(layer))
    calls = [call for layer in layers for call in layer.calls]
    into = read(subject, batch, treatment)
    kernel = calls[2].output.transpose(1, 2)
    term = 0.6 * (into[0].values - into[2].values)
    torch.testing.assert_close(kernel + term, into[2].into, rtol=0, atol=1e-5)
