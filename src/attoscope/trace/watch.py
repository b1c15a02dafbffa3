"""Run a model once and hand out each layer as it goes by.

A callback and not a generator: a forward pass cannot be suspended half-way without threads, and
threads would hide it from the modes and flags that belong to the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.trace.capture import capturing
from attoscope.trace.frames import Frame, VisitorError, framed, undisturbed
from attoscope.trace.layout import Layout
from attoscope.trace.merge import as_heads
from attoscope.trace.types import AttentionCall, Batch, Layer, Site

if TYPE_CHECKING:
    from attoscope.trace.subject import Subject

Visit = Callable[[Layer, Batch], None]


def watch(subject: Subject, batch: Batch, visit: Visit) -> Any:
    """Run `subject` on `batch`; call `visit(layer, batch)` after each layer; give the output.

    A layer is handed out when it has just run and is forgotten afterwards, so memory is that of
    one layer. The `batch` that `visit` gets numbers the sequences of that layer: a layer that
    splits each sequence into windows has several per document. The model comes back as it was:
    hooks, training flags, random state; no gradient is recorded.

    Raises `AttoscopeError` when a layer that attended in the survey did not attend now.
    """
    layout = subject.layout(batch)
    stream = _Stream(layout, batch, visit)
    with undisturbed(subject.model), capturing(stream.on_call, len(batch)) as capture:
        stream.asleep = capture.asleep
        with framed(subject.model, stream.on_enter, stream.on_exit) as frames:
            stream.frames = frames
            capture.where = lambda: frames[-1].name if frames else ""
            try:
                output = subject.run(batch)
            except VisitorError as wrapped:
                raise wrapped.error from None
    stream.check_complete()
    return output


class _Stream:
    """Gathers the calls of the layer that is running and hands the layer out when it ends."""

    def __init__(self, layout: Layout, batch: Batch, visit: Visit) -> None:
        self.layout, self.batch, self.visit = layout, batch, visit
        self.frames: list[Frame] = []
        self.asleep: Callable[[], AbstractContextManager[None]] = nullcontext
        self.index = {stack.name: -1 for stack in layout.stacks}
        self.seen: dict[str, list[tuple[int, str]]] = {s.name: [] for s in layout.stacks}
        self.last: dict[str, Tensor | None] = {}

    def on_enter(self, frame: Frame) -> None:
        stack = self.layout.members.get(frame.name)
        if stack is not None:
            self.index[stack] += 1

    def on_call(self, call: AttentionCall) -> None:
        for frame in reversed(self.frames):
            stack = self.layout.blocks.get(frame.name)
            if stack is not None:
                break
        else:
            where = self.frames[-1].name if self.frames else "outside every module"
            raise AttoscopeError(
                f"an attention call at {where} was not there when the model was surveyed: its "
                "layers depend on the input; give one batch at a time"
            )
        layer, before = self.index[stack], self.seen[stack]
        names = self.layout.stack(stack).names(layer)
        position = sum(at == layer for at, _ in before)
        # A call that the survey did not see gets a name that nothing expects.
        name = names[position] if position < len(names) else f"self{position + 1}"
        before.append((layer, name))
        call.site = Site(stack, layer, name)
        call.module = self.frames[-1].name
        frame.calls.append(call)

    def on_exit(self, frame: Frame) -> None:
        final = self.layout.finals.get(frame.name)
        if final is not None and frame.stream_in is self.last.get(final):
            self._hand_out(frame, final, self.index[final] + 1, final=True)
        stack = self.layout.members.get(frame.name)
        if stack is not None:
            self.last[stack] = frame.stream_out
            if frame.calls:
                self._hand_out(frame, stack, self.index[stack], final=False)

    def _hand_out(self, frame: Frame, stack: str, index: int, final: bool) -> None:
        calls = tuple(frame.calls)
        if len(calls) > 1 and self.layout.stack(stack).split:
            calls = (as_heads(calls),)
        frame.calls = []
        batch = self._numbered(calls[0]) if calls else self.batch
        shape = (
            (calls[0].shape[0], calls[0].shape[2])
            if calls
            else self._final_shape(frame.stream_in)
        )
        if shape is None:
            return
        valid, special = self._masks(stack, shape, frame)
        cross = next((c for c in calls if c.site.call.startswith("cross")), None)
        key_valid, key_special = (None, None)
        if cross is not None:
            keys = (cross.shape[0], cross.shape[3])
            key_valid, key_special = self._mask_of("encoder", keys, valid.device)
        layer = Layer(
            stack=stack, index=index, name=frame.name, calls=calls,
            stream_in=self._oriented(frame.stream_in, shape),
            stream_out=self._oriented(frame.stream_out, shape),
            valid=valid, special=special,
            key_valid=key_valid, key_special=key_special, final=final,
        )  # fmt: skip
        with self.asleep():
            try:
                self.visit(layer, batch)
            except Exception as error:
                raise VisitorError(error) from error

    def _numbered(self, call: AttentionCall) -> Batch:
        sequences, documents = call.shape[0], len(self.batch)
        if sequences == documents:
            return self.batch
        if sequences % documents:
            raise AttoscopeError(
                f"attention at {call.module} has {sequences} sequences for {documents} documents;"
                " expected a multiple; feed batches whose first axis is the document"
            )
        each = sequences // documents
        numbers = tuple(d for d in self.batch.documents for _ in range(each))
        return replace(
            self.batch, documents=numbers, valid=None, special=None, decoder_valid=None
        )

    def _final_shape(self, tensor: Tensor | None) -> tuple[int, int] | None:
        if tensor is None or tensor.dim() != 3:
            return None
        first, second = tensor.shape[:2]
        return (second, first) if self.layout.time_first else (first, second)

    def _masks(self, stack: str, shape: tuple[int, int], frame: Frame) -> tuple[Tensor, Tensor]:
        tensor = frame.stream_in if frame.stream_in is not None else frame.stream_out
        device = tensor.device if tensor is not None else torch.device("cpu")
        return self._mask_of(stack, shape, device)

    def _mask_of(
        self, stack: str, shape: tuple[int, int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Valid and special tokens of a stack; a stack of another length is taken as all valid."""
        of_decoder = len(self.layout.stacks) > 1 and "decoder" in stack
        valid = self.batch.decoder_valid if of_decoder else self.batch.valid
        special = None if of_decoder else self.batch.special
        if valid is None or tuple(valid.shape) != shape:
            valid = torch.ones(shape, dtype=torch.bool)
        if special is None or tuple(special.shape) != shape:
            special = torch.zeros(shape, dtype=torch.bool)
        return valid.to(device), special.to(device)

    def _oriented(self, tensor: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
        """The stream as (batch, token, width), whichever axis the model puts first."""
        if tensor is None:
            return None
        if tensor.dim() == 2:
            tensor = tensor[None]
        if self.layout.time_first and tuple(tensor.shape[1::-1]) == shape:
            tensor = tensor.transpose(0, 1)
        elif tuple(tensor.shape[:2]) != shape and tuple(tensor.shape[1::-1]) == shape:
            tensor = tensor.transpose(0, 1)
        return tensor.detach() if tuple(tensor.shape[:2]) == shape else None

    def check_complete(self) -> None:
        for stack in self.layout.stacks:
            missing = set(stack.calls) - set(self.seen[stack.name])
            if missing:
                layer, call = sorted(missing)[0]
                raise AttoscopeError(
                    f"{len(missing)} of {len(stack.calls)} attention calls of the {stack.name} "
                    f"did not happen this time (first: layer {layer}, {call}); the model skips "
                    "layers depending on its input, which cannot be averaged over"
                )
