"""A factor in front of the skip of a post-norm sub-layer: `norm(omega x + f(x))`, and folding it.

Two exact ways to write a factor into the weights of the plain `norm(x + f(x))`:

- one number: `norm(omega x + f) = norm(x + f / omega)` with the norm's eps divided by omega^2, so
  that the branch's last weight and bias are divided by omega;
- one per feature: the norm that made x gets omega into its gain and bias, and the columns of the
  matrices that read x are divided by it. It needs a norm before the sub-layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.junctions import Junction
from attoscope.remedies.kinds import Built, seat
from attoscope.remedies.places import module_at
from attoscope.remedies.taps import Remedy
from attoscope.trace import Batch, Subject
from attoscope.trace.frames import undisturbed
from attoscope.unchanged import first_output

Measure = Callable[["SkipFactor", Tensor, Tensor], None]


class SkipFactor(Remedy):
    """`norm(omega x + f(x))` in a model that computes `norm(x + f(x))`.

    `omega` has one number, or one per feature; it is a parameter or a buffer. A hook of the
    reader notes x, one of the norm adds what is missing; where a fixed omega is 1 nothing is
    added, and the sum is that of the plain model bit for bit.
    """

    kind = "skip"
    transient: ClassVar[tuple[str, ...]] = ("stream", "measure")
    fixed: ClassVar[tuple[str, ...]] = ("omega",)

    def __init__(
        self, place: Junction, like: Tensor, width: int | None, trainable: bool
    ) -> None:
        super().__init__(place)
        self.stream: Tensor | None
        self.measure: Measure | None
        self.omega: Tensor
        size, device = 1 if width is None else width, like.device
        if trainable:
            omega = torch.full((size,), place.omega, dtype=like.dtype, device=device)
            self.omega = nn.Parameter(omega)
        else:
            omega = torch.full((size,), place.omega, dtype=torch.float32, device=device)
            self.register_buffer("omega", omega)
        self.plain = not trainable and place.omega == 1.0

    def attach(self, model: nn.Module) -> list[Any]:
        junction: Any = self.place
        reader, norm = module_at(model, junction.reader), module_at(model, junction.norm)
        return [
            reader.register_forward_pre_hook(self.on_read),
            norm.register_forward_pre_hook(self.on_sum),
        ]

    def on_read(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook of the module that reads the stream."""
        self.stream = args[0]

    def on_sum(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hook of the norm."""
        stream, self.stream = self.stream, None
        # A norm that is called alone has no stream beside it.
        if stream is None or stream.shape != args[0].shape:
            return None
        total: Tensor = args[0]
        if self.measure is not None:
            self.measure(self, stream, total - stream)
        elif self.plain:
            return None
        # A sum of skip and branch, as in the plain model, for whoever reads the data flow.
        return (self.omega.to(total.dtype) * stream + (total - stream), *args[1:])


def build_factors(
    model: nn.Module,
    places: list[Junction],
    made: Callable[[Junction, Tensor, int], SkipFactor],
) -> Built:
    """Seat one factor per norm; the way back, and folding."""
    built, names = Built(), []
    made_of: list[tuple[Junction, SkipFactor]] = []
    for place in unique_junctions(places):
        weight = last_weight(model, place)
        norm = module_at(model, place.norm)
        gain = next(norm.parameters(), None)
        width = gain.numel() if gain is not None else weight.shape[0]
        factor = made(place, weight if gain is None else gain, width)
        names.append((place, seat(model, place, factor, factor.kind)))
        made_of.append((place, factor))
        built.modules.append((place, factor, f"norm({_size(factor)} x + f(x))"))
        built.handles += factor.attach(model)

    def undo() -> None:
        for handle in built.handles:
            handle.remove()
        for place, name in names:
            del module_at(model, place.norm)._modules[name]

    def fold() -> None:
        fold_factors(model, [(place, factor.omega.detach()) for place, factor in made_of])
        undo()

    built.undo, built.fold = undo, fold
    return built


def _size(factor: SkipFactor) -> str:
    size = factor.omega.numel()
    return f"{factor.place.omega:.4g}" + ("" if size == 1 else f" (x{size})")


def unique_junctions(places: list[Junction]) -> list[Junction]:
    """Each norm once: layers that share their weights share the factor."""
    return list({place.norm: place for place in places}.values())


def last_weight(model: nn.Module, place: Junction) -> Tensor:
    """The weight of the branch's last linear map."""
    return parameter_at(model, place.last)


def parameter_at(model: nn.Module, name: str) -> Tensor:
    """A parameter by dotted name, or a sentence where there is none."""
    parent, _, child = name.rpartition(".")
    found = getattr(module_at(model, parent), child, None)
    if not isinstance(found, Tensor):
        raise AttoscopeError(
            f"the model has no parameter {name!r}; expected the one that the treatment was made "
            "for, so build it from the same configuration"
        )
    return found


@torch.no_grad()
def fold_factors(
    model: nn.Module, factors: Iterable[tuple[Junction, Float[Tensor, " width"]]]
) -> None:
    """Write the factors into the weights: by the branch where a factor is one number, else by the
    norm before. Nothing is written where one of them cannot be."""
    given = [(place, omega.double()) for place, omega in factors]
    for place, omega in given:
        _check_folds(place, omega)
    for place, omega in given:
        if _uniform(omega):
            _fold_into_branch(model, place, float(omega[0]))
        else:
            _fold_into_norm(model, place, omega)


def _uniform(omega: Tensor) -> bool:
    return bool((omega == omega[0]).all())


def _check_folds(place: Junction, omega: Tensor) -> None:
    if bool((omega == 0).any()):
        raise AttoscopeError(
            f"fold: got a factor of 0 at {place.norm}; expected factors other than 0, as the "
            "weights of the branch are divided by them"
        )
    if _uniform(omega) and "branch" not in place.folds:
        raise AttoscopeError(
            f"fold: the branch that ends in {place.last} does not scale with it, or {place.norm} "
            "has no eps; expected a branch that ends in a linear map; save the treated model "
            "instead"
        )
    if not _uniform(omega) and "norm" not in place.folds:
        raise AttoscopeError(
            f"fold: got a factor for each feature at {place.norm}, and no norm before this "
            "sub-layer whose gain could take it (or something else reads that norm too); "
            "expected one number there (vector=False), or a norm of the embeddings"
        )


def eps_name(norm: nn.Module) -> str | None:
    """What a norm calls its epsilon; None where it has none."""
    names = ("eps", "variance_epsilon", "epsilon")
    return next((n for n in names if isinstance(getattr(norm, n, None), float)), None)


def _fold_into_branch(model: nn.Module, place: Junction, omega: float) -> None:
    last = module_at(model, place.last.rpartition(".")[0])
    last_weight(model, place).div_(omega)
    bias = getattr(last, "bias", None)
    if isinstance(bias, Tensor):
        bias.div_(omega)
    norm = module_at(model, place.norm)
    name = eps_name(norm)
    assert name is not None
    setattr(norm, name, getattr(norm, name) / omega**2)


def _fold_into_norm(model: nn.Module, place: Junction, omega: Float[Tensor, " width"]) -> None:
    assert place.before is not None
    for parameter in module_at(model, place.before).parameters(recurse=False):
        parameter.mul_(omega.to(parameter.dtype))
    for each in place.weights:
        if not each.stream:
            continue
        weight = parameter_at(model, each.parameter)
        weight = weight.T if each.transposed else weight
        weight[: each.stream].div_(omega.to(weight.dtype))


def with_folds(subject: Subject, batch: Batch, places: list[Junction]) -> list[Junction]:
    """The junctions with `folds`, found by trying both ways on the batch with powers of two, which
    leave no rounding behind when they are taken out again."""
    model = subject.model
    if all(eps_name(module_at(model, place.norm)) for place in places):
        places = _tried(subject, batch, places, "branch", set(range(len(places))))
    chosen = {i for i, place in enumerate(places) if place.before is not None}
    return _tried(subject, batch, places, "norm", chosen) if chosen else places


def _tried(
    subject: Subject, batch: Batch, places: list[Junction], way: str, chosen: set[int]
) -> list[Junction]:
    able = [
        replace(place, folds=(*place.folds, way)) if i in chosen else place
        for i, place in enumerate(places)
    ]
    tried = unique_junctions([able[i] for i in sorted(chosen)])
    factors = [(place, _powers(subject.model, place, way)) for place in tried]
    built = build_factors(
        subject.model, tried, lambda place, like, width: SkipFactor(place, like, width, True)
    )
    try:
        for (_, omega), (_, module, _) in zip(factors, built.modules, strict=True):
            module.omega.data.copy_(omega)  # type: ignore[operator]
        expected = output_on(subject, batch)
    finally:
        built.undo()
    fold_factors(subject.model, factors)
    try:
        found = output_on(subject, batch)
    finally:
        fold_factors(subject.model, [(place, 1 / omega) for place, omega in factors])
    return able if alike(found, expected) else places


def _powers(model: nn.Module, place: Junction, way: str) -> Tensor:
    """2 everywhere, or 1/2, 1, 2, 4 in turn."""
    gain = next(module_at(model, place.norm).parameters(), None)
    weight = last_weight(model, place) if gain is None else gain
    width = weight.shape[0]
    powers = torch.arange(width, device=weight.device) % 4 - 1.0
    return 2.0 ** (torch.ones_like(powers) if way == "branch" else powers)


def output_on(subject: Subject, batch: Batch) -> Tensor:
    """The first tensor of the output, with the model left as it was."""
    with undisturbed(subject.model):
        output = first_output(subject.run(batch))
    if output is None:
        raise AttoscopeError(
            f"{subject.name} returned no tensor of numbers; expected one, on which a factor in "
            "its skips can be seen"
        )
    return output.double()


def alike(found: Tensor, expected: Tensor) -> bool:
    """Within a part in a thousand of the size of the output; half precision is far above that."""
    size = float(expected[expected.isfinite()].abs().max())
    difference = (found - expected).abs()
    return float(difference[difference.isfinite()].max()) <= 1e-3 * size
