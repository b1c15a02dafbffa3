"""Factors on both sides of a residual addition, `x <- lambda x + beta f(x)`, and folding them.

Exact ways to write them into the weights of the plain `x + f(x)`:

- post-norm: `norm(lambda x + beta f) = norm(x + (beta / lambda) f)` with the norm's eps divided by
  lambda^2;
- pre-norm: with `y_i = x_i / (lambda_1 ... lambda_i)` the stack is `y_i = y_{i-1} + beta_i /
  (lambda_1 ... lambda_i) f_i(norm(y_{i-1}))`, as a norm does not feel the size of what it reads:
  its eps is divided by the square of the product so far. The last norm undoes the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.additions import Addition
from attoscope.remedies.kinds import Built, seat
from attoscope.remedies.places import module_at
from attoscope.remedies.skips import alike, eps_name, output_on, parameter_at
from attoscope.remedies.taps import Remedy
from attoscope.trace import Batch, Subject


class ResidualScale(Remedy):
    """`lambda x + beta f(x)` in a model that computes `x + f(x)`.

    In a post-norm model a hook of the norm makes the sum anew. In a pre-norm model the branch is
    given out as `beta f(x) + (lambda - 1) x`. The two numbers are in the configuration's record,
    not in the state dict, which stays that of the plain model.
    """

    kind = "deepscalelm"
    transient: ClassVar[tuple[str, ...]] = ("stream",)

    def __init__(self, place: Addition) -> None:
        super().__init__(place)
        self.stream: Tensor | None
        self.skip, self.branch = place.skip, place.branch

    def attach(self, model: nn.Module) -> list[Any]:
        place: Any = self.place
        reader, tapped = module_at(model, place.reader), module_at(model, place.tapped)
        read = reader.register_forward_pre_hook(self.on_read)
        if place.norm == "post":
            return [read, tapped.register_forward_pre_hook(self.on_sum)]
        return [read, tapped.register_forward_hook(self.on_branch)]

    def on_read(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook of the module that reads the stream."""
        self.stream = args[0]

    def on_sum(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hook of a post-norm model's norm."""
        stream, total = self._taken(args[0]), args[0]
        if stream is None:
            return None
        return (self.skip * stream + self.branch * (total - stream), *args[1:])

    def on_branch(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hook of the module that gives a pre-norm model's branch."""
        several = isinstance(output, tuple)
        own = output[0] if several else output
        stream = self._taken(own)
        if stream is None:
            return output
        scaled = self.branch * own + (self.skip - 1) * stream
        return (scaled, *output[1:]) if several else scaled

    def _taken(self, like: Tensor) -> Tensor | None:
        """The stream that was noted, once; a module called on its own has none beside it."""
        stream, self.stream = self.stream, None
        return None if stream is None or stream.shape != like.shape else stream

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, lambda={self.skip:.4g}, beta={self.branch:.4g}"


class HeadScale(Remedy):
    """A factor on what the output layer reads, where it has the weights of the embedding."""

    kind = "deepscalelm_head"

    def __init__(self, place: Addition, scale: float) -> None:
        super().__init__(place)
        self.scale = scale

    def attach(self, model: nn.Module) -> list[Any]:
        head = module_at(model, self.place.attention)
        return [head.register_forward_pre_hook(self.on_read)]

    def on_read(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hook of the output layer."""
        return (args[0] * self.scale, *args[1:])


def build_scales(model: nn.Module, places: list[Addition]) -> Built:
    """Seat the factors; the way back, and folding."""
    built, names = Built(), []
    made: list[tuple[Addition, Remedy, str]] = []
    for place in places:
        what = f"{place.skip:.4g} x + {place.branch:.4g} f(x), f of {place.kind}"
        what += f" from {place.tapped}" if place.norm == "pre" else ""
        made.append((place, ResidualScale(place), what))
        for name, scale, _ in place.heads:
            head = replace(place, norm_name=name)
            made.append((head, HeadScale(head, scale), f"reads {scale:.4g} times its input"))
    for place, module, what in made:
        names.append((place, seat(model, place, module, module.kind)))
        built.modules.append((place, module, what))
    for _, module, _ in made:
        built.handles += module.attach(model)

    def undo() -> None:
        for handle in built.handles:
            handle.remove()
        for place, name in names:
            del module_at(model, place.attention)._modules[name]

    def fold() -> None:
        fold_scales(model, places)
        undo()

    built.undo, built.fold = undo, fold
    return built


@torch.no_grad()
def fold_scales(model: nn.Module, places: list[Addition]) -> None:
    """Write the factors into weights and eps; nothing is written where that is not exact."""
    _check_folds(places)
    product: dict[str, float] = {}
    for place in places:
        before = product.get(place.stack, 1.0)
        if place.norm == "post":
            _scale_branch(model, place, place.branch / place.skip)
            _divide_eps(model, place.norm_name, place.skip**2)
        else:
            after = product[place.stack] = before * place.skip
            _scale_branch(model, place, place.branch / after)
            _divide_eps(model, place.norm_name, before**2)
            if place.final is not None:
                _divide_eps(model, place.final, after**2)
        for _, scale, norm in place.heads:
            assert norm is not None
            for parameter in module_at(model, norm).parameters(recurse=False):
                parameter.mul_(scale)


def _check_folds(places: list[Addition]) -> None:
    stuck = next((place for place in places if not place.folds), None)
    if stuck is not None:
        raise AttoscopeError(
            f"fold: the factors at {stuck.tapped} cannot be written into weights (a norm has no "
            "eps, or what reads the last sum or the output layer's input is no norm); save the "
            "treated model instead"
        )
    whole = all(
        sum(other.stack == place.stack for other in places) == place.count for place in places
    )
    if not whole:
        raise AttoscopeError(
            "fold: only some layers of a stack were treated; expected all of them (layers=None), "
            "as the factors add up along the stream; save the treated model instead"
        )


def _scale_branch(model: nn.Module, place: Addition, factor: float) -> None:
    parameter_at(model, place.last).mul_(factor)
    bias = getattr(module_at(model, place.last.rpartition(".")[0]), "bias", None)
    if isinstance(bias, Tensor):
        bias.mul_(factor)


def _divide_eps(model: nn.Module, name: str, square: float) -> None:
    norm = module_at(model, name)
    eps = eps_name(norm)
    assert eps is not None
    setattr(norm, eps, getattr(norm, eps) / square)


def with_folds(subject: Subject, batch: Batch, places: list[Addition]) -> list[Addition]:
    """The places with `folds` where folding gives the same output: tried on the batch."""
    model = subject.model
    able = [replace(place, folds=True) for place in places]
    norms = {p.norm_name for p in places} | {p.final for p in places if p.final}
    ends = [p for p in places if p.norm == "pre" and p.number + 1 == p.count]
    shared = {name for p in places for _, _, name in p.heads}
    lacking = None in shared or any(p.final is None for p in ends)
    if lacking or not all(eps_name(module_at(model, name)) for name in norms):
        return places
    built = build_scales(model, able)
    try:
        expected = output_on(subject, batch)
    finally:
        built.undo()
    gains = [p for n in shared if n for p in module_at(model, n).parameters(recurse=False)]
    kept = [(p, p.detach().clone()) for p in [*_folded(model, places), *gains]]
    eps = [(module_at(model, n), eps_name(module_at(model, n))) for n in norms]
    before = [getattr(norm, str(name)) for norm, name in eps]
    try:
        fold_scales(model, able)
        found = output_on(subject, batch)
    finally:
        with torch.no_grad():
            for parameter, values in kept:
                parameter.copy_(values)
        for (norm, name), value in zip(eps, before, strict=True):
            setattr(norm, str(name), value)
    return able if alike(found, expected) else places


def _folded(model: nn.Module, places: list[Addition]) -> list[Tensor]:
    """The weights and biases that a fold of the branches would change."""
    found = []
    for place in places:
        found.append(parameter_at(model, place.last))
        bias = getattr(module_at(model, place.last.rpartition(".")[0]), "bias", None)
        if isinstance(bias, Tensor):
            found.append(bias)
    return found
