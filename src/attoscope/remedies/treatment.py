"""What `treat` gives back: what was changed, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from attoscope.errors import AttoscopeError

RECORD = "attoscope_treatments"
_HELD = "_attoscope_held"


@dataclass(frozen=True, slots=True)
class Change:
    """One module that was changed: its dotted name, how, and the parameters that are new in it."""

    module: str
    what: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        new = f" (new: {', '.join(self.parameters)})" if self.parameters else ""
        return f"{self.module}: {self.what}{new}"


class _Held:
    """The treatments of a model, kept with it and copied with it."""

    def __init__(self) -> None:
        self.treatments: list[Treatment] = []


def hold(model: nn.Module, treatment: Treatment) -> None:
    """Keep a treatment with its model."""
    model.__dict__.setdefault(_HELD, _Held()).treatments.append(treatment)


def treatments_of(model: nn.Module) -> tuple[Treatment, ...]:
    """The treatments in a model now, first applied first; a copy of a model has its own."""
    held = model.__dict__.get(_HELD)
    return () if held is None else tuple(held.treatments)


@dataclass(eq=False, repr=False)
class Treatment:
    """A remedy applied to a live model.

    `changed` lists every module touched, `layers` how many attention layers (or residual
    additions: `counted`) that makes and of how many, `notes` what was left alone and what to
    know, `options` what the remedy was given. Where only some layers are treated, a first layer
    that does no more than give its values to the others is not counted. `str` says it all in words.
    Made by `attoscope.treat`.
    """

    model: nn.Module
    remedy: str
    options: dict[str, Any]
    changed: tuple[Change, ...]
    notes: tuple[str, ...]
    layers: tuple[int, int]
    record: dict[str, Any]
    modules: tuple[nn.Module, ...]
    _undo: Callable[[], None] | None
    _fold: Callable[[], None] | None = None
    counted: str = "attention layers"
    active: bool = True
    # What a copy is undone with: hooks and other changes, and replaced attention modules.
    handles: tuple[Any, ...] = ()
    backs: tuple[Any, ...] = ()
    copied: bool = False
    # First layers that only give the others their values, and are not in `layers`.
    anchors: int = 0

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that the remedy brought in, each once; none for a remedy without any."""
        seen: dict[int, nn.Parameter] = {}
        for module in self.modules:
            seen |= {id(p): p for p in module.parameters()}
        yield from seen.values()

    def undo(self) -> None:
        """Take the remedy out: the very parameters of before, no hook left.

        What was trained meanwhile in the model's own parameters stays. Treatments of one model may
        be undone in any order. In a copy of a model (`copy.deepcopy`, `pickle`, `torch.save`) the
        remedy is taken out of the copy alone; weights that it drew anew stay, as the former ones
        are with the first model. Raises `AttoscopeError` when it was undone or folded before.
        """
        self._need_active()
        if self._undo is None:
            self._undo_copy()
        else:
            self._undo()
        self._forget()

    def _undo_copy(self) -> None:
        for handle in self.handles:
            handle.remove()
        ours = {id(module) for module in self.modules}
        for parent in list(self.model.modules()):
            for name in [n for n, m in parent._modules.items() if id(m) in ours]:
                del parent._modules[name]
        for back in reversed(self.backs):
            back.remove()

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: functions that lead back to the first model's modules stay behind."""
        return self.__dict__ | {"_undo": None, "_fold": None, "copied": True}

    def fold(self) -> None:
        """Write the remedy into the model's own weights, and take its modules out.

        The model is then a plain one that computes the same. Raises `AttoscopeError` for a remedy
        that no weights can express (all but "spectral" and those that scale residual additions).
        """
        self._need_active()
        if self._fold is None and self.copied:
            raise AttoscopeError(
                f"fold: got the remedy {self.remedy!r} in a copy of the model that was treated, "
                "which can only be undone; fold the first one before it is copied, or save the "
                "copy with save_pretrained and fold what load_treated gives"
            )
        if self._fold is None:
            raise AttoscopeError(
                f"fold: got the remedy {self.remedy!r}, which no weights of the plain model can "
                "express; expected 'spectral', 'admin', 'deepnet' or 'deepscalelm'; save the "
                "treated model with save_pretrained instead"
            )
        self._fold()
        self._forget()

    def _need_active(self) -> None:
        if not self.active:
            raise AttoscopeError(
                f"the treatment {self.remedy!r} is no longer in the model: it was undone or folded "
                "before; treat the model again"
            )

    def _forget(self) -> None:
        self.active = False
        held = self.model.__dict__[_HELD].treatments
        held[:] = [other for other in held if other is not self]
        if not held:
            del self.model.__dict__[_HELD]
        config = getattr(self.model, "config", None)
        kept = [r for r in getattr(config, RECORD, None) or () if r != self.record]
        if config is not None and hasattr(config, RECORD):
            if kept:
                setattr(config, RECORD, kept)
            else:
                delattr(config, RECORD)

    def _head(self) -> str:
        """One line: the remedy, its options, and where it acts."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        treated, there = self.layers
        head = f"{self.remedy}({options}): {treated} of {there} {self.counted}"
        return head + (", anchored in layer 0" if self.anchors else "")

    def __repr__(self) -> str:
        gone = "" if self.active else " (no longer in the model)"
        return f"<Treatment of {type(self.model).__name__}: {self._head()}{gone}>"

    def __str__(self) -> str:
        lines = [self._head() + ("" if self.active else " (no longer in the model)")]
        lines += [f"  {change}" for change in self.changed]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
