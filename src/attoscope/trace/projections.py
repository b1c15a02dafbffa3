"""Which entries of which weights make a head's queries, keys and values.

Found by differentiation, not by name: the entries of a matrix that feed head h are those in which
the gradient of that head's queries does not vanish. Fused, transposed and grouped projections
are all read this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attoscope.errors import AttoscopeError
from attoscope.trace.capture import capturing
from attoscope.trace.frames import Frame, framed
from attoscope.trace.subject import Subject, head_of
from attoscope.trace.types import AttentionCall, Batch

Part = Literal["query", "key", "value"]


@dataclass(frozen=True, slots=True)
class Projection:
    """Where one head's part of a projection lives: `weight` along `axis` at `index`, and bias.

    `head` counts key heads for keys and values of grouped attention. A parametrized weight is
    what the module computed with, which cannot be changed from here.
    """

    part: Part
    head: int
    name: str
    weight: Tensor
    axis: int
    index: Tensor
    bias: Tensor | None

    def scale(self, factor: float) -> None:
        """Multiply this head's projection (weight and bias) in place."""
        if not isinstance(self.weight, nn.Parameter):
            raise AttoscopeError(
                f"{self.name}: got a parametrized weight; expected a plain one to scale: undo or "
                "fold what parametrized it"
            )
        with torch.no_grad():
            rows = self.weight.index_select(self.axis, self.index) * factor
            self.weight.index_copy_(self.axis, self.index, rows)
            if self.bias is not None:
                self.bias.index_copy_(0, self.index, self.bias[self.index] * factor)


def projections(
    subject: Subject, batch: Batch, module: str, part: Part
) -> tuple[Projection, ...]:
    """The projections of every head for the attention call made inside `module`.

    `module` is the dotted name that a call carries. Raises `AttoscopeError` when no matrix in it
    feeds the heads one by one.
    """
    small = head_of(batch)
    found: list[Projection] = []

    def on_call(call: AttentionCall) -> None:
        if frames[-1].name == module and not found:
            owner = frames[-1].module
            with capture.asleep():
                found.extend(by_head(call, owner, part))

    def idle(_: Frame) -> None:
        return None

    flags = {p: p.requires_grad for p in subject.model.parameters()}
    training = {m: m.training for m in subject.model.modules()}
    try:
        subject.model.requires_grad_(True).eval()
        with (
            torch.enable_grad(),
            parametrize.cached(),
            capturing(on_call, len(small)) as capture,
        ):
            with framed(subject.model, idle, idle) as frames:
                subject.run(small)
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
        for each, mode in training.items():
            each.training = mode
    if not found:
        raise AttoscopeError(
            f"no {part} projection was found in {module!r}; expected a matrix in it whose rows or "
            "columns feed one head each; name a module that an attention call carries"
        )
    return tuple(found)


def by_head(call: AttentionCall, owner: nn.Module, part: Part) -> Iterator[Projection]:
    """The projections of every head of a call, which was made with gradients inside `owner`.

    Parametrized weights are found where the call ran within `parametrize.cached()`.
    """
    tensor = getattr(call, part)
    if tensor is None or not tensor.requires_grad:
        return
    named = dict(_weights(owner))
    matrices = {name: p for name, p in named.items() if p.dim() == 2 and p.requires_grad}
    for head in range(tensor.shape[1]):
        grads = torch.autograd.grad(
            tensor[:, head].float().square().sum(),
            list(matrices.values()),
            retain_graph=True,
            allow_unused=True,
        )
        for (name, weight), gradient in zip(matrices.items(), grads, strict=True):
            if gradient is None:
                continue
            place = _place(gradient, tensor.shape[-1], tensor.shape[1])
            if place is not None:
                axis, index = place
                bias = named.get(name.removesuffix("weight") + "bias")
                yield Projection(part, head, name, weight, axis, index, bias)
                break


def _weights(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parametrized weights by the name that they bear in their module, and then parameters.

    In this order, because what a weight is made of may look like one head's worth, too.
    """
    for name, module in owner.named_modules():
        if parametrize.is_parametrized(module):
            for each in module.parametrizations:
                yield f"{name}.{each}".lstrip("."), getattr(module, str(each))
    for name, parameter in owner.named_parameters():
        if "parametrizations" not in name.split("."):
            yield name, parameter


def _place(gradient: Tensor, size: int, heads: int) -> tuple[int, Tensor] | None:
    """The axis and indices in which the gradient lives, when they are one head's worth."""
    used = gradient != 0
    for axis in (0, 1):
        index = used.any(1 - axis).nonzero()[:, 0]
        alone = heads > 1 or gradient.shape[axis] % size == 0
        if len(index) == size and alone:
            return axis, index
    return None
