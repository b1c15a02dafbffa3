"""Which modules are running: a stack of frames kept by hooks on every module of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attoscope.trace.types import AttentionCall


@dataclass(slots=True)
class Frame:
    """One running module: its dotted name, what entered it, and the calls made inside.

    `two_streams` says that two sequences of the same width entered it, as in cross attention.
    """

    name: str
    module: nn.Module
    stream_in: Tensor | None
    two_streams: bool = False
    stream_out: Tensor | None = None
    calls: list[AttentionCall] = field(default_factory=list)


class VisitorError(Exception):
    """Carries a visitor's own error through the model, which is not to blame for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def stream(values: Any) -> Tensor | None:
    """The first floating tensor with a token axis and a width among inputs or outputs."""
    if isinstance(values, Tensor):
        return values if values.is_floating_point() and values.dim() in (2, 3) else None
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, Tensor):
                if (found := stream(value)) is not None:
                    return found
    return None


@contextmanager
def framed(
    model: nn.Module,
    on_enter: Callable[[Frame], None],
    on_exit: Callable[[Frame], None],
) -> Iterator[list[Frame]]:
    """Keep the stack of running modules for the duration of the block; every hook is removed."""
    frames: list[Frame] = []
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering = stream(args)
        entering = stream(kwargs) if entering is None else entering
        two = _two_streams(entering, (*args, *kwargs.values()))
        # Models that swap their own modules while running have some without a name.
        frame = Frame(names.get(id(module), ""), module, entering, two)
        frames.append(frame)
        on_enter(frame)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # An exception inside leaves frames behind; drop whatever is above this module.
        while frames and frames[-1].module is not module:
            frames.pop()
        if not frames:
            return
        frame = frames.pop()
        frame.stream_out = stream(tuple(output.values()) if _is_mapping(output) else output)
        on_exit(frame)

    handles = []
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        yield frames
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, uncompiled; flags and random state are put back after.

    Compiled code runs as it was written: a compiler would look into our hooks as well.
    """
    training = {module: module.training for module in model.modules()}
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices=devices), torch.no_grad(), eager:
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module, flag in training.items():
                module.training = flag


def _two_streams(first: Tensor | None, values: tuple[Any, ...]) -> bool:
    return first is not None and any(
        isinstance(value, Tensor)
        and value is not first
        and value.is_floating_point()
        and value.dim() == first.dim() == 3
        and value.shape[-1] == first.shape[-1]
        and value.data_ptr() != first.data_ptr()
        for value in values
    )


def _is_mapping(output: Any) -> bool:
    return hasattr(output, "values") and hasattr(output, "keys")
