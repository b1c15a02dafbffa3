"""Watch a model while somebody else's loop trains it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from attoscope.errors import AttoscopeError
from attoscope.monitor import gradients
from attoscope.monitor.alarms import Alarm, check
from attoscope.monitor.catching import (
    Catcher,
    EmptyBatch,
    extra_pass,
    inner_of,
    is_compiled,
    surveyed,
)
from attoscope.monitor.readings import LayerReader
from attoscope.monitor.table import Row, Sinks, Table
from attoscope.trace.layout import Layout
from attoscope.trace.types import Layer

# After so many steps of the optimiser without a pass of the model, something is amiss.
UNSEEN = 3


def watch(
    model: Any,
    every: Any = 100,
    *,
    loggers: Iterable[Any] = (),
    rows: Any = 32,
    sequences: Any = 4,
    on_alarm: Callable[[Alarm], None] | None = None,
) -> Log:
    """A context manager that reads the model every `every` training steps: `with … as log:`.

    Read are entropy, margin and scale of attention, growth and smoothness of the residual stream,
    and moments of gradients, layer by layer: `attoscope.monitor.readings.MEANINGS` and
    `attoscope.monitor.gradients.MEANINGS` say what each is. They end up in `log.rows`, and the
    alarms that follow in `log.alarms`.

    A training step is everything up to an optimiser's step over the model's parameters, however
    many forward passes it takes; of these the first is read. Passes in evaluation mode or without
    gradients, and those of activation checkpointing, do not count. The pass that is read is the
    model's own; only the first look (and, for a compiled model, each one) runs the batch once more,
    in evaluation mode. Training itself is the same to the last bit.

    Args:
        model: the module that the loop calls: also one wrapped for data parallelism (rank 0 reads
            its own share of the batch), or compiled by `torch.compile(model)`.
        every: read at steps 0, `every`, 2 `every` …
        loggers: objects with `log(dict)` or `add_scalar(tag, value, step)`, or functions of a dict;
            each gets every row.
        rows: query rows and tokens read per sequence.
        sequences: sequences read per batch.
        on_alarm: called with each alarm as it comes; what it raises ends the training.

    Raises:
        AttoscopeError: no attention that can be read, at the first look; a model that was compiled
            in place. Later trouble is a warning: it does not end the training.
    """
    for name, value in (("every", every), ("rows", rows), ("sequences", sequences)):
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise AttoscopeError(
                f"{name}: got {value!r}; expected a whole number of at least 1"
            )
    return Log(model, every, Sinks(loggers), LayerReader(rows, sequences), on_alarm)


class Log(Table):
    """What was read: `rows`, `alarms`, and `count`, the number of training steps so far."""

    def __init__(
        self,
        model: Any,
        every: int,
        sinks: Sinks,
        reader: LayerReader,
        on_alarm: Callable[[Alarm], None] | None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise AttoscopeError(
                f"model: got a {type(model).__name__}; expected the torch module that is trained"
            )
        if model._compiled_call_impl is not None:
            raise AttoscopeError(
                "model: it was compiled in place (model.compile()), where no hook is called; use "
                "`compiled = torch.compile(model)`, watch and call that"
            )
        self.model, self.every = model, every
        self.alarms: list[Alarm] = []
        self.count = 0
        self._inner = inner_of(model)
        self._sinks, self._reader, self._on_alarm = sinks, reader, on_alarm
        self._layout: Layout | None = None
        self._sites: dict[str, str] = {}
        self._groups: dict[str, list[nn.Parameter]] = {}
        self._parameters: set[int] = set()
        self._handles: list[Any] = []
        self._catcher: Catcher | None = None
        self._row: Row | None = None
        self._passes = 0
        self._unseen = 0
        self._busy = False
        self._warned = False

    def __enter__(self) -> Log:
        if self._handles:
            raise AttoscopeError("this log is watching already: call attoscope.watch again")
        self._parameters = {id(p) for p in self._inner.parameters()}
        self._handles = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._passes and not self.count:
            warnings.warn(
                f"attoscope.watch: {self._passes} training passes of the "
                f"{type(self.model).__name__} were seen and no step of a torch optimiser that "
                "holds its parameters, so the log is empty: call log.step() after each step",
                stacklevel=2,
            )
        self.close()

    def close(self) -> None:
        """Stop watching and remove every hook; a step that has not ended is dropped."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forget()

    def add(self, **values: Any) -> None:
        """Put numbers of your own, such as the loss, into the row of the step that is being read.

        Between two looks nothing is kept: call it at every step, before the optimiser's step.
        Until the next pass the row of the step just made takes them too, but loggers have it by
        then. Raises `AttoscopeError` for what is no number.
        """
        for name, value in values.items():
            if not _is_number(value):
                raise AttoscopeError(
                    f"{name}: got {type(value).__name__}; expected one number, as loss.item()"
                )
        row = self._row
        made = self.rows[-1] if self.rows and not self._passes else None
        if row is None and made is not None and made["step"] == self.count - 1:
            row = made
        if row is not None:
            for name, value in values.items():
                row[name] = float(value.item() if hasattr(value, "item") else value)

    def gradients(self) -> None:
        """Read gradients now, before clipping; otherwise they are read as the optimiser gets them.

        With a `GradScaler`, call `scaler.unscale_(optimizer)` first, as for clipping.
        """
        self._read_gradients(1.0)

    def step(self) -> None:
        """End a training step, where no optimiser of `torch.optim` does; otherwise of no effect."""
        if self._passes:
            self._read_gradients(1.0)
            self._end()

    # Forward passes ------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._busy or not _trains(module):
            return
        self._passes += 1
        self._unseen = 0
        if self._passes > 1 or self.count % self.every or _rank():
            return
        self._forget()
        self._row = {"step": self.count}
        self._busy = True
        try:
            if self._layout is None:
                self._layout = surveyed(self._inner, args, kwargs)
        except EmptyBatch as error:
            self._warn(f"a look at step {self.count} failed: {error}")
            return
        except BaseException:
            self._row = None
            raise
        finally:
            self._busy = False
        self._catcher = Catcher(self._inner, self._layout, self._visit)
        try:
            if is_compiled(module):
                self._read_apart(self._catcher, args, kwargs)
            else:
                self._catcher.open(args, kwargs, inside=module is self._inner)
        except Exception as error:
            self._catcher.problem = error

    def _read_apart(
        self, catcher: Catcher, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Inside compiled code nothing can be seen: the batch runs once more as it was written."""
        self._busy = True
        try:
            with extra_pass(self._inner):
                catcher.open(args, kwargs, inside=False)
                self._inner(*args, **kwargs)
        finally:
            catcher.close()
            self._busy = False

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._busy or self._catcher is None:
            return
        catcher, self._catcher = self._catcher, None
        catcher.close(output if module is self._inner else None)
        if output is None or self._row is None:
            self._row = None
            return
        if catcher.problem is not None:
            self._warn(f"a look at step {self.count} failed: {catcher.problem}")
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._row["loss"] = float(loss.detach())

    def _visit(self, layer: Layer) -> None:
        if layer.final or self._row is None:
            return
        self._row |= self._reader(layer)
        site = f"{layer.stack}.{layer.index}"
        if site not in self._sites:
            self._sites[site] = layer.name
            self._groups = {}

    # Steps ---------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._row is not None and self._owns(optimizer):
            self._read_gradients(_scale(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._owns(optimizer):
            return
        if not self._passes:
            self._unseen += 1
            if self._unseen == UNSEEN and not self.count:
                self._warn(
                    f"the optimiser took {UNSEEN} steps and the watched "
                    f"{type(self.model).__name__} was not called in training mode: watch the "
                    "module that the loop calls (the result of torch.compile, where it is used)"
                )
            return
        if self._row is not None:
            self._row |= gradients.adam_surprise(self._groups, optimizer)
        self._end()

    def _read_gradients(self, scale: float) -> None:
        if self._row is None or "gradient_norm" in self._row:
            return
        if not self._groups:
            self._groups = gradients.by_layer(self._inner, self._sites)
        self._row |= gradients.moments(self._groups, scale)

    def _end(self) -> None:
        """A training step is over: the row is whole."""
        row, self._row = self._row, None
        passes, self._passes = self._passes, 0
        self.count += 1
        if row is None:
            return
        row["passes"] = passes
        found = check(row, self.rows)
        row["alarms"] = len(found)
        self.rows.append(row)
        self.alarms += found
        self._sinks(row)
        if self._on_alarm is not None:
            for alarm in found:
                self._on_alarm(alarm)

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        return any(id(p) in self._parameters for group in groups for p in group["params"])

    def _forget(self) -> None:
        if self._catcher is not None:
            self._catcher.close()
        self._catcher = self._row = None

    def _warn(self, sentence: str) -> None:
        if not self._warned:
            warnings.warn(f"attoscope.watch: {sentence}", stacklevel=2)
        self._warned = True


def _trains(module: nn.Module) -> bool:
    """A pass that trains: in training mode, with gradients, and not recomputed in a backward."""
    recomputed = torch._C._current_graph_task_id() != -1
    return module.training and torch.is_grad_enabled() and not recomputed


def _is_number(value: Any) -> bool:
    """Whether one real number is given, without a wait for the device that holds it."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) or (
        isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf"
    )


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0


def _scale(optimizer: torch.optim.Optimizer) -> float:
    """What `GradScaler` leaves to a fused optimiser to divide by; 1 where it did it itself."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale) or math.nan
