"""Layers caught in a forward pass that belongs to somebody else's training.

The trace's own machinery, with three differences: the pass is not started here; attention is not
recomputed to check it, since dropout makes outputs irreproducible (the survey, in evaluation mode,
has checked the kernel once); and nothing that goes wrong here reaches the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.trace.capture import Capture, _RegistryCall, _watched_registry
from attoscope.trace.frames import Frame, VisitorError, framed, stream, undisturbed
from attoscope.trace.layout import Layout, puts_time_first, survey
from attoscope.trace.types import AttentionCall, Batch, Layer
from attoscope.trace.watch import _Stream


class EmptyBatch(AttoscopeError):
    """A pass over nothing: there is nothing to read."""


class TrainingCapture(Capture):
    """Attention calls as they are made in training: handed on without a check of their output."""

    def _deliver(self, call: AttentionCall, inner: _RegistryCall | None) -> None:
        if inner is not None and inner.explicit is not None:
            # The model's own softmax: no term of the kernel can have been missed.
            inner.explicit.module = call.module
            call = inner.explicit
        self.on_call(call)


class Catcher:
    """Hands out the layers of one forward pass to `visit`, from `open` to `close`.

    `problem` is what went wrong, if anything did; after it nothing more is handed out.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, visit: Callable[[Layer], None]
    ) -> None:
        self.model, self.layout, self.visit = model, layout, visit
        self.problem: Exception | None = None
        self._open = ExitStack()
        self._stream: _Stream | None = None

    def open(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, inside: bool) -> None:
        """Start to look; `inside` says that the model's own call has begun already."""
        batch = batch_of(self.model, args, kwargs)
        caught = _Stream(self.layout, batch, lambda layer, _: self.visit(layer))
        capture = TrainingCapture(self._guarded(caught.on_call), len(batch))
        caught.asleep = capture.asleep
        self._open.enter_context(_watched_registry(capture))
        enter, leave = self._guarded(caught.on_enter), self._guarded(caught.on_exit)
        hooked = _Below(self.model) if inside else self.model
        caught.frames = self._open.enter_context(framed(hooked, enter, leave))
        frames = caught.frames
        capture.where = lambda: frames[-1].name if frames else ""
        if inside:
            entering = stream(args)
            entering = stream(kwargs) if entering is None else entering
            frames.append(Frame("", self.model, entering))
            enter(frames[0])
        self._open.enter_context(capture)
        self._stream = caught

    def close(self, output: Any = None) -> None:
        """Stop looking; the model's output ends the frame that `inside` began."""
        frames = self._stream.frames if self._stream is not None else []
        self._open.close()
        if output is not None and self._stream is not None and frames:
            frame = frames.pop(0)
            values = tuple(output.values()) if isinstance(output, Mapping) else output
            frame.stream_out = stream(values)
            self._guarded(self._stream.on_exit)(frame)
        frames.clear()
        self._stream = None

    def _guarded(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        def guarded(value: Any) -> None:
            if self.problem is not None:
                return
            try:
                function(value)
            except VisitorError as wrapped:
                self.problem = wrapped.error
            except Exception as error:
                self.problem = error

        return guarded


class _Below(nn.Module):
    """The modules below a model: one that runs already must neither get hooks nor lose them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.whole = (model,)

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """All but the model itself."""
        whole = self.whole[0]
        return (m for m in whole.modules(*args, **kwargs) if m is not whole)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Their names, as seen from the model."""
        yield from self.whole[0].named_modules(*args, **kwargs)


def inner_of(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of `torch.compile` and of data parallelism."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = cast(nn.Module, model._orig_mod)
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it runs compiled, where no hook is called."""
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def surveyed(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Layout:
    """The layout of the inner model, from one extra pass in evaluation mode without gradients.

    Raises `AttoscopeError` where no attention is found, or attention that cannot be read.
    """
    with extra_pass(model):
        batch = len(batch_of(model, args, kwargs))
        return survey(model, lambda: model(*args, **kwargs), batch)


@contextmanager
def extra_pass(model: nn.Module) -> Iterator[None]:
    """A pass of our own that leaves nothing behind, in the casts that autocast keeps neither."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with undisturbed(model), warnings.catch_warnings():
            # Of passes without gradients, as of checkpoints that have none: it is not the user's.
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def batch_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
    """How many sequences a pass has, and which of their tokens are real, from its inputs.

    Padding is known from an `attention_mask` of shape (batch, token) only.
    """
    tensors = [x for x in _tensors((args, kwargs)) if x.dim() > 0]
    if not tensors:
        raise AttoscopeError(
            "the model was called without a tensor: expected at least one with a batch axis; "
            "watch the module that takes the batch"
        )
    first = tensors[0]
    if not first.numel():
        raise EmptyBatch(
            f"the batch is empty (a tensor of shape {tuple(first.shape)}): expected at least one "
            "sequence of one token, so leave such batches out"
        )
    axis = int(first.dim() == 3 and first.is_floating_point() and puts_time_first(model))
    size = first.shape[axis]
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != size:
        mask = None
    return Batch(None, tuple(range(size)), valid=None if mask is None else mask.bool())


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
