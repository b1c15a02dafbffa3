"""Nine faults. Each breaks a model in place at chosen layers and is undone on leaving the block.

No fault knows an architecture: layers, projections and channels are found by the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.trace import AttentionCall, Batch, Layer, Subject, batches, watch
from attoscope.trace.projections import projections
from attoscope.trace.subject import head_of

SATURATION = 50.0
CHANNEL = 200.0
PULL = 0.5
STRETCH = 4.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to break a model: at which layers of its first stack, and which finding must follow.

    `head` is used by faults of one head. `least` is how many layers in a row have to be broken:
    faults that build up with depth are none in a single layer.
    """

    name: str
    finding: str
    break_: Callable[[_Patient, tuple[int, ...], int], None]
    least: int = 1

    def __str__(self) -> str:
        return self.name


class _Patient:
    """A model on the table: its layers by number, and everything that was changed, to undo it."""

    def __init__(self, subject: Subject, batch: Batch, undo: ExitStack) -> None:
        self.subject = subject
        self.batch = batch
        self.undo = undo
        self.modules: dict[int, nn.Module] = {}
        self.calls: dict[int, AttentionCall] = {}
        stack = subject.layout(batch).stacks[0].name

        def visit(layer: Layer, _: Batch) -> None:
            if layer.stack == stack and layer.calls:
                self.modules[layer.index] = subject.model.get_submodule(layer.name)
                self.calls[layer.index] = layer.calls[0]

        watch(subject, head_of(batch), visit)

    def keep(self, parameter: Tensor) -> None:
        """Remember a parameter's values, to put them back."""
        saved = parameter.detach().clone()

        def restore() -> None:
            with torch.no_grad():
                parameter.copy_(saved)

        self.undo.callback(restore)

    def queries(self, layer: int, factor: float) -> None:
        """Scale all queries of a layer's attention."""
        module = self.calls[layer].module
        for one in projections(self.subject, self.batch, module, "query"):
            self.keep(one.weight)
            if one.bias is not None:
                self.keep(one.bias)
            one.scale(factor)

    def output_weight(self, layer: int) -> Tensor:
        """The output projection of a layer by head; a view of the parameter, kept for undoing."""
        weight = self.calls[layer].output_weight
        if weight is None:
            raise AttoscopeError(
                f"layer {layer}: the projection after its heads was not found; choose another "
                "fault or layer"
            )
        self.keep(weight)
        return weight

    def on_output(self, layer: int, change: Callable[[Tensor], Tensor]) -> None:
        """Pass a layer's output through `change` from now on."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (change(output[0]), *output[1:])
            return change(output)

        handle = self.modules[layer].register_forward_hook(hook)
        self.undo.callback(handle.remove)


def _uniform(patient: _Patient, layers: tuple[int, ...], head: int) -> None:
    for layer in layers:
        patient.queries(layer, 0.0)


def _saturated(patient: _Patient, layers: tuple[int, ...], head: int) -> None:
    for layer in layers:
        patient.queries(layer, SATURATION)


def _dead_head(patient: _Patient, layers: tuple[int, ...], head: int) -> None:
    for layer in layers:
        patient.output_weight(layer)[head].zero_()


def _collapsed(patient: _Patient, layers: tuple[int, ...], head: int) -> None:
    """Every token becomes a multiple of the mean token: rank one, whatever its length was."""

    def change(x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        norm = torch.linalg.vector_norm
        sizes: Tensor = norm(x, dim=-1, keepdim=True) / norm(mean, dim=-1, keepdim=True)
        return mean * sizes

    for layer in layers:
        patient.on_output(layer, change)


def _both_signs(patient: _Patient, layers: tuple[int, ...], head: int) -> None:
    """As rank collapse, but every other token points the opposite way."""

    def change(x: Tensor) -> Tensor:
        sign = torch.ones_like(x[..., :1])
        sign[:, ::2] = -1.0
        sizes: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return sign * sizes * _common(x)

    for layer in layers:
        patient.on_output(layer, change)


def _over_smoothing(patient: _Patient, layers: tuple[int, ...], head: int) -> None:
    """Every token is drawn half of the way towards the common direction, at its own length."""

    def change(x: Tensor) -> Tensor:
        sizes = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.lerp(x, sizes * _common(x), PULL)

    for layer in layers:
        patient.on_output(layer, change)


def _sharpening(patient: _Patient, layers: tuple[int, ...], head: int) -> None:
    """What tokens have beside the common direction gets longer from layer to layer.

    Longer than after the layer before, since a norm in between may have undone that.
    """
    before: list[Tensor] = []

    def change(x: Tensor, first: bool) -> Tensor:
        common = _common(x)
        along = (x * common).sum(-1, keepdim=True) * common
        size = torch.linalg.vector_norm(x - along, dim=-1, keepdim=True).mean(1, keepdim=True)
        goal = STRETCH * (size if first else before[0])
        before[:] = [goal]
        stretched: Tensor = along + goal / size * (x - along)
        return stretched

    for layer in layers:
        patient.on_output(layer, partial(change, first=layer == min(layers)))


def _common(x: Tensor) -> Tensor:
    """The direction that tokens have in common, each of them with the same weight."""
    unit = torch.nn.functional.normalize(x, dim=-1)
    return torch.nn.functional.normalize(unit.mean(1, keepdim=True), dim=-1)


def _massive_channel(patient: _Patient, layers: tuple[int, ...], head: int) -> None:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., 7 % x.shape[-1]] += CHANNEL * x.abs().median()
        return x

    for layer in layers:
        patient.on_output(layer, change)


def _not_a_number(patient: _Patient, layers: tuple[int, ...], head: int) -> None:
    for layer in layers:
        patient.output_weight(layer)[0, 0].fill_(float("nan"))


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("uniform attention", "uniform_attention", _uniform),
        Fault("saturated attention", "saturated_attention", _saturated),
        Fault("dead head", "dead_head", _dead_head),
        Fault("rank collapse", "rank_collapse", _collapsed),
        Fault("collapse with both signs", "sign_collapse", _both_signs),
        Fault("over-smoothing", "over_smoothing", _over_smoothing, least=3),
        Fault("sharpening", "sharpening_blow_up", _sharpening, least=3),
        Fault("massive channel", "massive_channel", _massive_channel),
        Fault("not a number", "non_finite", _not_a_number),
    )
}


@contextmanager
def broken(
    subject: Subject, batch: Any, fault: Fault | str, layers: tuple[int, ...], head: int = 0
) -> Iterator[Subject]:
    """The same subject with a fault at `layers` (and `head`); whole again after the block.

    `batch` is a `Batch`, or texts, ids or images as for `attoscope.trace.batches`: the subject is
    run on a little of it to find its parts.
    Raises `AttoscopeError` when there is no such fault or layer.
    """
    chosen = FAULTS.get(fault) if isinstance(fault, str) else fault
    if chosen is None:
        raise AttoscopeError(f"fault: got {fault!r}; expected one of {', '.join(FAULTS)}")
    if not isinstance(batch, Batch):
        batch = next(batches(subject, batch))
    with ExitStack() as undo:
        patient = _Patient(subject, batch, undo)
        unknown = [layer for layer in layers if layer not in patient.modules]
        if unknown:
            raise AttoscopeError(
                f"layers: got {unknown}; {subject.name} has {sorted(patient.modules)}"
            )
        with torch.no_grad():
            chosen.break_(patient, layers, head)
        yield subject
