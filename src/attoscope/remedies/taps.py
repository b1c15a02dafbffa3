"""What all remedies on values share: a module beside the projections, and hooks that are its own.

A remedy sits in the attention module as a submodule, so that its numbers are in the state dict, and
acts through hooks on the value and the output projection. The hooks are bound methods of it: a copy
of the model, or one that was pickled, has its own.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.places import Place, Spot, module_at

PREFIX = "attoscope_"


class Remedy(nn.Module):
    """Base of the remedies: one per attention module, called by its hooks and never by `forward`.

    `kind` is the remedy's name. Tensors named in `transient` live within one forward pass only and
    are left out of copies; buffers named in `fixed` stay in float32 when the model is converted.
    """

    kind: ClassVar[str]
    transient: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, place: Spot) -> None:
        super().__init__()
        self.place: Any = place
        for name in self.transient:
            setattr(self, name, None)

    def attach(self, model: nn.Module) -> list[Any]:
        """Put the hooks on and give their handles."""
        raise NotImplementedError

    def setting(self, name: str, value: float, like: Tensor) -> None:
        """A number of the remedy, kept in float32 in the state dict whatever the model's dtype."""
        number = torch.tensor(value, dtype=torch.float32, device=like.device)
        self.register_buffer(name, number)

    def _apply(self, fn: Any, recurse: bool = True) -> Remedy:
        kept = {name: self._buffers[name] for name in self.fixed if name in self._buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, number in kept.items():
            moved = self._buffers[name]
            if number is not None and moved is not None and moved.dtype != number.dtype:
                self._buffers[name] = number.to(moved.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | dict.fromkeys(self.transient)

    def extra_repr(self) -> str:
        return f"{self.place.stack}.{self.place.layer}"


def value_of(model: nn.Module, place: Place) -> nn.Module:
    """The value projection of a place."""
    return module_at(model, place.value)


def output_of(model: nn.Module, place: Place) -> nn.Module:
    """The output projection of a place."""
    return module_at(model, place.output)


class Anchor:
    """The first layer's values, for the later layers of one stack and one forward pass.

    Hooks of the module around the stack empty it before and after. Under gradient checkpointing
    the layers are run again in the backward pass: the values are then kept until the next pass.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None
        self.kept = False

    def begin(self, module: nn.Module, args: Any) -> None:
        """Before the stack runs."""
        self.values = None
        self.kept = torch.is_grad_enabled() and _checkpoints(module)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it ran."""
        if not self.kept:
            self.values = None

    def set(self, values: Tensor) -> None:
        """By the first layer."""
        if self.kept and not torch.is_grad_enabled():
            raise AttoscopeError(
                "gradient checkpointing: got the reentrant kind, which hides the first layer's "
                "values from the gradient; enable it with {'use_reentrant': False}"
            )
        self.values = values

    def get(self) -> Tensor:
        """By a later layer."""
        if self.values is None:
            raise AttoscopeError(
                "the first layer's values are missing: the layer did not run in this forward pass "
                "(layer dropping), or layers are run again by a checkpoint that is not one of "
                "Hugging Face's; switch that off"
            )
        return self.values

    def __getstate__(self) -> dict[str, Any]:
        return {"values": None, "kept": False}


def _checkpoints(module: nn.Module) -> bool:
    """Whether layers in it will run again in the backward pass, as Hugging Face has it."""
    if torch.compiler.is_compiling():
        return False
    return any(
        m.training and getattr(m, "gradient_checkpointing", False) for m in module.modules()
    )


def running_again() -> bool:
    """Whether this is a checkpoint's second run of a layer, inside the backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Sample:
    """A few numbers of a tensor, to tell whether a second run is of the same forward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.numbers = self._of(tensor)

    @staticmethod
    def _of(tensor: Tensor) -> Tensor:
        flat = tensor.detach().reshape(-1)
        return flat[:: max(1, flat.numel() // 64)].clone()

    def check(self, tensor: Tensor) -> None:
        """A sentence where the tensor is another one."""
        if not torch.equal(self.numbers, self._of(tensor)):
            raise AttoscopeError(
                "gradient checkpointing: got a backward pass of another forward pass than the "
                "last one; expected one after each forward pass, as the first layer's values are "
                "kept for the last one only"
            )
