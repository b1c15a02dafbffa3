"""Catching the additions of residual branches as they are made, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from attoscope.errors import AttoscopeError
from attoscope.trace.branch_types import Passing, Sublayer
from attoscope.trace.dataflow import ADDITIONS, CARRIERS, AdditionCounter
from attoscope.trace.frames import Frame, VisitorError
from attoscope.trace.types import Batch
from attoscope.trace.watch import _Stream

Visit = Callable[[Passing], None]


@contextmanager
def modes(model: nn.Module, train: bool, gradients: bool) -> Iterator[None]:
    """Dropout on, and every weight differentiable, as far as asked for."""
    flags = {p: p.requires_grad for p in model.parameters()}
    try:
        if train:
            model.train()
        if gradients:
            for parameter in flags:
                if parameter.is_floating_point():
                    parameter.requires_grad_(True)
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


def with_gradients(batch: Batch) -> Batch:
    """Floating inputs as leaves of their own, so that gradients reach the first stream."""

    def leaf(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().clone().requires_grad_(True) if floating else value

    return replace(batch, inputs=tree_map(leaf, batch.inputs))


class Adder(TorchFunctionMode):
    """Hands out the operands and the result of the additions that it is told to look for."""

    def __init__(self, wanted: tuple[Sublayer, ...], stream: _Stream, visit: Visit) -> None:
        super().__init__()
        self.wanted = {one.addition: one for one in wanted}
        self.stream, self._visit = stream, visit
        self.counter = AdditionCounter()
        self.frames: list[Frame] = []
        self.seen: set[tuple[str, int, int]] = set()
        self.keep = False
        self._kept: list[tuple[Sublayer, Tensor | None, Tensor, Tensor | None]] = []
        self._values: list[tuple[Tensor, Tensor, Tensor]] = []
        self._carried: Any = WeakIdKeyDictionary()

    def enter(self, frame: Frame) -> None:
        """A module begins to run."""
        self.counter.enter(frame)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        key = self.counter.count(name, args, self.frames) if name in ADDITIONS else None
        one = None if key is None else self.wanted.get(key)
        if one is None:
            result = func(*args, **kwargs)
            if self.keep and name in CARRIERS and isinstance(result, Tensor):
                self._carry(args, result)
            return result
        changed = name in ("add_", "__iadd__")
        left = args[0].clone() if changed else args[0]
        branch = left if not one.stream_first else args[1]
        result = func(*args, **kwargs)
        if kwargs.get("alpha", 1) != 1:
            branch = result - left
        self._met(one, left if one.stream_first else args[1], branch, result, changed)
        return result

    def _met(
        self, one: Sublayer, before: Tensor, branch: Tensor, after: Tensor, changed: bool
    ) -> None:
        self.seen.add(one.addition)
        if not self.keep:
            self._hand(one, (before, branch, after))
            return
        # A sum made in place has no tensor of its own before, and not for long after.
        source = None if changed else before
        for _ in range(one.hops):
            source = None if source is None else self._carried.get(source)
        self._kept.append((one, source, branch, None if changed else after))
        self._values.append((before, branch, after.clone() if changed else after))

    def _carry(self, args: tuple[Any, ...], result: Tensor) -> None:
        given = [a for a in args if isinstance(a, Tensor)]
        live = [a for a in given if not isinstance(a, nn.Parameter)]
        if len(live) == 1 and live[0] is not result:
            self._carried[result] = live[0]

    def hand_out(self, scalar: Tensor) -> None:
        """One backward pass; then every addition with its gradients, in the order of the run."""
        tensors = [t for _, *three in self._kept for t in three if t is not None]
        reached = list({id(t): t for t in tensors if t.requires_grad}.values())
        if not scalar.requires_grad or scalar.numel() != 1:
            raise AttoscopeError(
                f"gradient: got a tensor of shape {tuple(scalar.shape)} that "
                f"{'has' if scalar.requires_grad else 'has no'} gradient; expected a scalar made "
                "from the model's output"
            )
        made = torch.autograd.grad(scalar, reached, allow_unused=True)
        gradients = {id(t): g for t, g in zip(reached, made, strict=True)}
        with torch.no_grad():
            for (one, *three), values in zip(self._kept, self._values, strict=True):
                given = [None if t is None else gradients.get(id(t)) for t in three]
                if three[2] is None:
                    given[2] = given[1]
                self._hand(one, values, given)

    def _hand(
        self, one: Sublayer, values: tuple[Tensor, ...], gradients: Sequence[Tensor | None] = ()
    ) -> None:
        after = _rows(values[2])
        first, second = after.shape[:2]
        shape = (second, first) if self.stream.layout.time_first else (first, second)
        valid, _ = self.stream._mask_of(one.site.stack, shape, after.device)

        def turned(tensor: Tensor | None) -> Any:
            return None if tensor is None else self.stream._oriented(_rows(tensor), shape)

        before, branch = turned(values[0]), turned(values[1])
        passing = Passing(one, before, branch, turned(after), valid, *map(turned, gradients))
        try:
            self._visit(passing)
        except Exception as error:
            raise VisitorError(error) from error


def _rows(tensor: Tensor) -> Tensor:
    """(batch, token, width), also of tokens alone and of tokens on a grid."""
    tensor = tensor.detach()
    return tensor[None] if tensor.dim() == 2 else tensor.flatten(1, -2)
