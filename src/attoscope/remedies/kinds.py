"""What every remedy has to say about itself: its options, what it needs, how it is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.finding import Found, find_places
from attoscope.remedies.places import Place, Spot, module_at
from attoscope.remedies.probe import with_padding
from attoscope.remedies.taps import PREFIX, Remedy, value_of
from attoscope.trace import Batch, Subject

LARGEST = torch.finfo(torch.float32).max


@dataclass(slots=True)
class Built:
    """A remedy in a model: the module of each place, what it does there, and the way back."""

    modules: list[tuple[Spot, nn.Module, str]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    undo: Callable[[], None] = lambda: None
    fold: Callable[[], None] | None = None


class Kind:
    """One remedy by name: `defaults` are its options, `anchored` says that the first layer of a
    stack takes part in what happens in the others. `place_type` is what it acts on, `counted` the
    words for many of them; `splits` says that fused attention projections must be taken apart."""

    name: str
    place_type: ClassVar[Any] = Place
    counted: ClassVar[str] = "attention layers"
    splits: ClassVar[bool] = True
    anchored: ClassVar[bool] = False
    defaults: ClassVar[dict[str, Any]] = {}

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """All options, checked. Raises `AttoscopeError` for an unknown one or a bad value."""
        for name in given:
            if name not in self.defaults:
                known = ", ".join(self.defaults) or "none"
                raise AttoscopeError(
                    f"{name}: {self.name!r} has no such option; expected one of: {known}"
                )
        chosen = self.defaults | given
        self.check(chosen)
        return chosen

    def check(self, options: dict[str, Any]) -> None:
        """Raise `AttoscopeError` for a value out of range."""

    def masked(self, options: dict[str, Any]) -> bool:
        """Whether it needs to know which keys a query may see."""
        return False

    def warnings(
        self, subject: Subject, batch: Batch, options: dict[str, Any], inputs: str
    ) -> list[str]:
        """What to know about these options on this model, found by running it."""
        return []

    def find(self, subject: Subject, batch: Batch, data: Any, options: dict[str, Any]) -> Found:
        """Where it acts, found by running the model on `batch`, a small part of `data`."""
        masked = self.masked(options)
        batch = with_padding(subject, batch) if masked else batch
        return find_places(subject, batch, masked=masked)

    def initialise(
        self, model: nn.Module, places: list[Any], options: dict[str, Any]
    ) -> Callable[[], None]:
        """Draw weights anew where the remedy says so, and give the way back. Not when loading."""
        return lambda: None

    def build(self, model: nn.Module, places: list[Any], options: dict[str, Any]) -> Built:
        """Put the remedy into the model; on an error nothing is left of it."""
        raise NotImplementedError


def check_number(name: str, value: Any, low: float = -math.inf) -> None:
    """A finite number from `low` on, or a sentence."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Whole numbers may be too large for any float: these are compared as they are.
    if not number or not -LARGEST <= value <= LARGEST or value < low:
        expected = "a finite number" if low == -math.inf else f"a finite number from {low:g} on"
        raise AttoscopeError(f"{name}: got {_short(value)}; expected {expected}")


def check_seed(name: str, value: Any) -> None:
    """A whole number that torch takes for a seed, or a sentence."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 0 <= value < 2**62:
        raise AttoscopeError(
            f"{name}: got {_short(value)}; expected a whole number from 0 on, below 2^62"
        )


def _short(value: Any) -> str:
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return "a whole number of more than 38 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """One of the names, or a sentence."""
    if not isinstance(value, str | bool | int | float) or value not in choices:
        raise AttoscopeError(
            f"{name}: got {_short(value)}; expected one of {', '.join(map(str, choices))}"
        )


def openers(places: list[Any]) -> dict[str, Any]:
    """The first place of every stack."""
    first: dict[str, Any] = {}
    for place in places:
        first.setdefault(place.stack, place)
    return first


def unique(places: list[Place]) -> Iterator[tuple[Place, bool]]:
    """Each pair of modules once, in order, and whether several layers share it."""
    runs: dict[tuple[str, str], list[Place]] = {}
    for place in places:
        runs.setdefault((place.value, place.output), []).append(place)
    for same in runs.values():
        yield same[0], len(same) > 1


def weight_of(model: nn.Module, place: Place) -> Tensor:
    """The value projection's weight, for its device and dtype."""
    weight: Tensor = value_of(model, place).weight  # type: ignore[assignment]
    return weight


def seat(model: nn.Module, place: Spot, remedy: nn.Module, kind: str) -> str:
    """Register a remedy in its attention module; gives the name that it got there."""
    attention = module_at(model, place.attention)
    name, number = f"{PREFIX}{kind}", 1
    while name in attention._modules:
        number += 1
        name = f"{PREFIX}{kind}_{number}"
    remedy.train(attention.training)
    attention.add_module(name, remedy)
    return name


def installed(model: nn.Module, pairs: list[tuple[Place, Remedy, str]]) -> Built:
    """Seat remedies that act through hooks and put the hooks on, with the way back."""
    built = Built(modules=list(pairs))
    names = [(place, seat(model, place, remedy, remedy.kind)) for place, remedy, _ in pairs]
    for _, remedy, _ in pairs:
        built.handles += remedy.attach(model)

    def undo() -> None:
        for handle in built.handles:
            handle.remove()
        for place, name in names:
            del module_at(model, place.attention)._modules[name]

    built.undo = undo
    return built
