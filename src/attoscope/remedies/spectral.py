"""The spectral parameterisation: value and output weights whose product has a chosen spectrum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attoscope.errors import AttoscopeError
from attoscope.remedies.kinds import Built, Kind, check_choice, check_seed, seat, unique
from attoscope.remedies.places import Place, module_at
from attoscope.remedies.taps import output_of, value_of

Mode = Literal["sharpen", "smooth"]
Clip = Literal["linear", "square"]
# With "square" an eigenvalue of 0 has no gradient: it would stay. It starts here instead.
LEAST = 1e-3


class Spectral(nn.Module):
    """`W_V = Q`, `W_O = Lambda Q^T`: Q from the QR factors of `theta`, Lambda from `psi`.

    Lambda is -c(psi) for "sharpen" and c(psi) for "smooth", with c(psi) = psi clipped to [0, 1]
    ("linear", no gradient outside) or min(psi^2, 1) ("square"). The layer's map has eigenvalues
    Lambda, in [-1, 0] or [0, 1], and head h those of its own columns of Q. Costs one QR of a
    (width, width) matrix per layer and forward pass; none where gradients are off and the weights
    have not changed.
    """

    kind: ClassVar[str] = "spectral"

    def __init__(self, place: Place, like: Tensor, width: int, mode: Mode, clip: Clip) -> None:
        super().__init__()
        self.place, self.mode, self.clip = place, mode, clip
        options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.theta = nn.Parameter(torch.empty(width, width, **options))
        self.psi = nn.Parameter(torch.empty(width, **options))
        self._once: tuple[Tensor, Tensor] | None = None
        self._kept: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def spectrum(self) -> Float[Tensor, " width"]:
        """Lambda."""
        size = self.psi.clamp(0, 1) if self.clip == "linear" else self.psi.square().clamp(max=1)
        return -size if self.mode == "sharpen" else size

    def basis(self) -> Float[Tensor, "width width"]:
        """Q: orthonormal columns, in float32 at least."""
        theta = self.theta if self.theta.dtype == torch.float64 else self.theta.float()
        q: Tensor = torch.linalg.qr(theta)[0]
        return q

    def weights(self, *, first: bool) -> tuple[Tensor, Tensor]:
        """(Q, Lambda Q^T) as maps on rows, made by the `first` of the two that need them."""
        if torch.compiler.is_compiling():
            return self._make()
        if torch.is_grad_enabled():
            # One graph serves one value and one output weight, and no more.
            made = None if first else self._once
            made = self._make() if made is None or not made[0].requires_grad else made
            self._once = made if first else None
            return made
        self._once = None
        # By content: weights may be set behind autograd's back, through `.data`.
        kept = self._kept
        now = (self.theta, self.psi)
        if kept is None or not all(_same(a, b) for a, b in zip(kept[:2], now, strict=True)):
            kept = (self.theta.detach().clone(), self.psi.detach().clone(), *self._make())
            self._kept = kept
        return kept[2], kept[3]

    def _make(self) -> tuple[Tensor, Tensor]:
        q = self.basis()
        spread = self.spectrum().to(q.dtype)[:, None] * q.mT
        return q.to(self.theta.dtype), spread.to(self.theta.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_once": None, "_kept": None}

    def extra_repr(self) -> str:
        return f"{self.place.stack}.{self.place.layer}, {self.mode}, {self.clip}"


def _same(one: Tensor, other: Tensor) -> bool:
    alike = one.dtype == other.dtype and one.device == other.device
    return alike and torch.equal(one, other)


class _Part(nn.Module):
    """A parametrization: the weight of one projection, remade from the shared numbers."""

    def __init__(self, shared: Spectral, transposed: bool) -> None:
        super().__init__()
        # In a tuple, so that the numbers are registered, saved and trained once.
        self.shared = (shared,)
        self.transposed = transposed


class ValuePart(_Part):
    """The weight of the value projection, in its columns of a fused one."""

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with Q in place of the value columns."""
        q, _ = self.shared[0].weights(first=True)
        made = q.mT if self.transposed else q  # (out, in) or (in, out)
        heads, axis = self.shared[0].place.heads, 0 if self.transposed else 1
        if weight.shape == made.shape:
            return _own(made)
        rows = heads.put(weight.movedim(axis, -1), made.movedim(axis, -1))
        return rows.movedim(-1, axis).contiguous()


class OutputPart(_Part):
    """The weight of the output projection."""

    def forward(self, weight: Tensor) -> Tensor:
        """Lambda Q^T."""
        _, spread = self.shared[0].weights(first=False)
        return _own(spread.mT if self.transposed else spread)


def _own(made: Tensor) -> Tensor:
    """A copy: code that initialises `module.weight` in place must not reach what is kept."""
    return made.clone(memory_format=torch.contiguous_format)


def row_map(module: nn.Module) -> tuple[Tensor, bool]:
    """A linear module's weight and whether it is stored (out, in), as `nn.Linear` does."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight, not isinstance(getattr(module, "nf", None), int)


def nearest_start(
    value: Float[Tensor, "width values"],
    output: Float[Tensor, "values width"],
    size: int,
    mode: Mode,
) -> tuple[Float[Tensor, "width width"], Float[Tensor, " width"]]:
    """(Q, |Lambda|) nearest to H = value @ output in the Frobenius norm, in float64.

    The symmetric part of H, its eigenvalues clipped to the interval. Eigenvectors are shared out so
    that each head of `size` columns gets those that lie most in what its values read.
    """
    value, output = value.double().cpu(), output.double().cpu()
    product = value @ output
    eigenvalues, vectors = torch.linalg.eigh((product + product.mT) / 2)
    kept = (-eigenvalues if mode == "sharpen" else eigenvalues).clamp(0, 1)
    heads = value.unflatten(1, (-1, size)).movedim(1, 0)  # (head, width, size)
    read = torch.linalg.qr(heads)[0]
    share = (read.mT @ vectors).square().sum(1)  # (head, eigenvector)
    seats = share.repeat_interleave(size, 0)
    _, order = linear_sum_assignment(seats.numpy(), maximize=True)
    return vectors[:, order], kept[order]


class SpectralKind(Kind):
    name = "spectral"
    defaults: ClassVar[dict[str, Any]] = {
        "mode": "sharpen", "clip": "linear", "start": "nearest", "seed": 0
    }  # fmt: skip

    def check(self, options: dict[str, Any]) -> None:
        check_choice("mode", options["mode"], ("sharpen", "smooth"))
        check_choice("clip", options["clip"], ("linear", "square"))
        check_choice("start", options["start"], ("nearest", "random"))
        check_seed("seed", options["seed"])

    def build(self, model: nn.Module, places: list[Place], options: dict[str, Any]) -> Built:
        made = [(place, _shared(model, place, options)) for place, _ in unique(places)]
        built = Built()
        backs: list[_Left] = []
        for place, shared in made:
            name = seat(model, place, shared, self.name)
            backs.append(_parametrize(model, place, shared, name))
            built.handles += backs[-1].handles
            sign = "[-1, 0]" if options["mode"] == "sharpen" else "[0, 1]"
            built.modules.append((place, shared, f"eigenvalues of value x output in {sign}"))
        if any(_biased(model, place) for place, _ in made):
            built.notes.append(
                "biases of the value and output projections stay as they are: they add the same "
                "vector to every token, outside the spectrum"
            )

        def leave(folded: bool) -> None:
            for back in backs:
                back.leave(folded)

        built.undo, built.fold = lambda: leave(False), lambda: leave(True)
        return built


def _biased(model: nn.Module, place: Place) -> bool:
    maps = (value_of(model, place), output_of(model, place))
    return any(getattr(module, "bias", None) is not None for module in maps)


def _shared(model: nn.Module, place: Place, options: dict[str, Any]) -> Spectral:
    where, heads = f"{place.stack}.{place.layer} ({place.attention})", place.heads
    value, transposed = row_map(value_of(model, place))
    output, output_transposed = row_map(output_of(model, place))
    value, output = (
        (value.mT if transposed else value),
        (output.mT if output_transposed else output),
    )
    width = value.shape[0]
    if heads.repeat > 1:
        raise AttoscopeError(
            f"spectral: got {heads.count} value heads for {heads.count * heads.repeat} query heads "
            f"in {where} (grouped attention), whose values have no spectrum of full width; "
            "expected as many of both"
        )
    if heads.width != width or output.shape != (width, width):
        raise AttoscopeError(
            f"spectral: got heads x size = {heads.count} x {heads.size} and a width of {width} in "
            f"{where}; expected a square map, heads x size = width"
        )
    for module in (value_of(model, place), output_of(model, place)):
        plain = isinstance(module._parameters.get("weight"), nn.Parameter)
        if not plain or parametrize.is_parametrized(module):
            raise AttoscopeError(
                f"spectral: got weights in {where} that are parametrized already, or are no "
                "parameters; expected plain ones"
            )
    shared = Spectral(place, value, width, options["mode"], options["clip"])
    if not value.is_meta:
        with torch.no_grad():
            _start(shared, heads.own(value), output, options)
    return shared


def _start(shared: Spectral, value: Tensor, output: Tensor, options: dict[str, Any]) -> None:
    if options["start"] == "random":
        generator = torch.Generator().manual_seed(options["seed"] + shared.place.layer)
        width = value.shape[0]
        theta = torch.randn(width, width, generator=generator) * width**-0.5
        size = torch.rand(width, generator=generator) * 0.9 + 0.05
    else:
        theta, size = nearest_start(value, output, shared.place.heads.size, shared.mode)
    shared.theta.copy_(theta)
    shared.psi.copy_(size if shared.clip == "linear" else size.clamp(min=LEAST).sqrt())


@dataclass(slots=True)
class Remade:
    """A module whose weight is remade; `remove` gives it its own again."""

    module: nn.Module
    trained: bool
    order: list[str]

    def remove(self) -> nn.Parameter:
        """The module's own weight, in its former place."""
        weight = _plain_again(self.module, self.order)
        weight.requires_grad_(self.trained)
        return weight


@dataclass(slots=True)
class _Left:
    """The way back for one place."""

    attention: nn.Module
    name: str
    handles: list[Remade]

    def leave(self, folded: bool) -> None:
        made = [_detached(handle.module) for handle in self.handles] if folded else []
        for at, handle in enumerate(self.handles):
            weight = handle.remove()
            if folded:
                with torch.no_grad():
                    weight.copy_(made[at])
        del self.attention._modules[self.name]


def _parametrize(model: nn.Module, place: Place, shared: Spectral, name: str) -> _Left:
    """Remake both weights from the shared numbers; gives the way back."""
    handles = []
    for module, part in (
        (value_of(model, place), ValuePart),
        (output_of(model, place), OutputPart),
    ):
        original, transposed = row_map(module)
        handles.append(Remade(module, original.requires_grad, list(module._parameters)))
        # A weight that is remade whole has nothing left to train.
        if part is OutputPart or original.numel() == shared.theta.numel():
            original.requires_grad_(False)
        made = part(shared, transposed).train(module.training)
        parametrize.register_parametrization(module, "weight", made, unsafe=True)
    return _Left(module_at(model, place.attention), name, handles)


def _detached(module: nn.Module) -> Tensor:
    with torch.no_grad():
        weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


def _plain_again(module: nn.Module, order: list[str]) -> nn.Parameter:
    """Take the parametrization off. Torch's own function takes it off copies of the module as well,
    with which it shares a class."""
    held: Any = module.parametrizations
    original: nn.Parameter = held["weight"].original
    if len(held) > 1 or len(held["weight"]) > 1:
        raise AttoscopeError(
            "spectral: got another parametrization put on top of it; expected to be undone last: "
            "remove that one first"
        )
    del module._modules["parametrizations"]
    module.__class__ = type(module).__bases__[0]
    module.register_parameter("weight", original)
    module._parameters = {key: module._parameters[key] for key in order}
    return original
