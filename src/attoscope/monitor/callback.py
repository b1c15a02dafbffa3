"""The same for `transformers.Trainer`: `Trainer(..., callbacks=[attoscope.TrainerCallback()])`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import transformers

from attoscope.errors import AttoscopeError
from attoscope.monitor.alarms import Alarm
from attoscope.monitor.watching import Log, watch


class TrainerCallback(transformers.TrainerCallback):
    """Watches the model that a `Trainer` trains; `callback.log` has `rows` and `alarms`.

    Arguments are those of `attoscope.watch`. Gradients are read as the optimiser gets them, which
    is after clipping (`max_grad_norm`); the norm before it is in the Trainer's own logs. A training
    that ends by an exception is unwatched when the next one begins, when the callback is dropped,
    or by `callback.close()`.

    Raises:
        AttoscopeError: when training begins with `torch_compile=True`: the Trainer keeps the
            compiled model to itself.
    """

    def __init__(
        self,
        every: Any = 100,
        *,
        loggers: Iterable[Any] = (),
        rows: Any = 32,
        sequences: Any = 4,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        self.options: dict[str, Any] = {
            "every": every,
            "loggers": tuple(loggers),
            "rows": rows,
            "sequences": sequences,
            "on_alarm": on_alarm,
        }
        self.log: Log | None = None
        self._finalizer: Any = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Start to watch."""
        if getattr(args, "torch_compile", False):
            raise AttoscopeError(
                "torch_compile=True: the Trainer compiles the model where it cannot be watched; "
                "leave it off, or train in a loop of your own with attoscope.watch(compiled)"
            )
        self.close()
        self.log = watch(model, **self.options)
        self.log.__enter__()
        self._finalizer = weakref.finalize(self, self.log.close)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching; the rows stay."""
        if self.log is not None:
            self.log.close()
        if self._finalizer is not None:
            self._finalizer.detach()
