"""Reading a treated model: the attention of every call, and what its output projection read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attoscope.remedies import Treatment
from attoscope.remedies.places import Place
from attoscope.trace import Batch, Layer, Subject, attention_rows, watch
from attoscope.unchanged import first_output
from tests.models import make

KINDS = ("neutreno", "value_residual", "attnscale", "centred", "featscale", "spectral")


@dataclass
class Read:
    """One self-attention call: weights, allowed keys and values by query head, and what the output
    projection read and wrote."""

    weights: Tensor
    allowed: Tensor
    values: Tensor
    into: Tensor
    out: Tensor
    valid: Tensor


def read(subject: Subject, batch: Batch, treatment: Treatment) -> list[Read]:
    """Every treated call, in order. What the projection reads is seen after the remedy's hooks."""
    places = {p["attention"]: Place.of(p) for p in treatment.record["places"]}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles, found = [], []

    def note(name: str) -> Any:
        return lambda module, args, output: seen.__setitem__(name, (args[0], output))

    for name, place in places.items():
        module = subject.model.get_submodule(place.output)
        handles.append(module.register_forward_hook(note(name)))

    def visit(layer: Layer, _: Batch) -> None:
        for call in layer.calls:
            if call.module not in seen:
                continue
            tokens = call.shape[2]
            rows = attention_rows(call, torch.arange(tokens).expand(call.shape[0], -1))
            values = call.value[:, call.key_head()]
            into, out = seen.pop(call.module)
            if places[call.module].time_first:
                into, out = into.transpose(0, 1), out.transpose(0, 1)
            into = into.unflatten(-1, (call.shape[1], -1)).transpose(1, 2)
            found.append(Read(rows.weights, rows.allowed, values, into, out, layer.valid))

    try:
        watch(subject, batch, visit)
    finally:
        for handle in handles:
            handle.remove()
    return found


def output(subject: Subject, batch: Batch) -> Tensor:
    """The model's first output."""
    with torch.no_grad():
        found = first_output(subject.run(batch))
    assert found is not None
    return found


def hooks(model: nn.Module) -> int:
    """How many hooks are left in a model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def sized(name: str) -> tuple[Subject, Batch]:
    """A tiny model whose matrices are large enough for its layers to matter."""
    subject, batch = make(name)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in subject.model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return subject, batch


def data_of(subject: Subject, batch: Batch) -> Any:
    """What `treat` needs: nothing for a Hugging Face model."""
    return None if hasattr(subject.model, "config") else batch
