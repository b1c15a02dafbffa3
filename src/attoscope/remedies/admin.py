"""Admin: factors in front of the skips of a post-norm model, so that it starts like a pre-norm one.

`x_i = norm(omega_i x_{i-1} + f_i(x_{i-1}))`. A branch has the share `V_i / (omega_i^2 + V_i)` of
the variance of its sum, V_i its own variance; small changes of the weights change the output in
proportion to the sum of these shares. Source: arXiv 2004.08249.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.finding import Found
from attoscope.remedies.junctions import Junction, find_junctions
from attoscope.remedies.kinds import Built, Kind, check_choice
from attoscope.remedies.probe import made_up
from attoscope.remedies.skips import SkipFactor, build_factors, unique_junctions, with_folds
from attoscope.trace import Batch, Subject, batches

SCALES = ("profile", "O(n)", "O(logn)", "O(1)")
DOCUMENTS = 32


def closed_form(additions: int, scale: str = "O(logn)") -> float:
    """omega for a stack of so many residual additions, the same for all of them.

    `omega^2` is 1 for "O(n)", `(n+1) / ln(n+1) - 1` for "O(logn)" and n for "O(1)": with branches
    of unit variance the shares add up to n/2, `n ln(n+1) / (n+1)` and n/(n+1). At least 1.

    Raises `AttoscopeError` for another scale and for fewer than one addition. Source: the
    closed forms of admin-torch 0.1.0.
    """
    check_choice("scale", scale, SCALES[1:])
    if additions < 1:
        raise AttoscopeError(f"additions: got {additions}; expected at least 1")
    square = {
        "O(n)": 1.0,
        "O(logn)": (additions + 1) / math.log(additions + 1) - 1,
        "O(1)": float(additions),
    }[scale]
    return math.sqrt(square)


class Admin(SkipFactor):
    """Admin's omega at one residual addition."""

    kind = "admin"


class AdminKind(Kind):
    name = "admin"
    place_type: ClassVar[Any] = Junction
    counted: ClassVar[str] = "residual additions"
    defaults: ClassVar[dict[str, Any]] = {
        "scale": "profile", "vector": True, "trainable": True, "seed": 0,
    }  # fmt: skip

    def check(self, options: dict[str, Any]) -> None:
        check_choice("scale", options["scale"], SCALES)
        for name in ("vector", "trainable"):
            check_choice(name, options[name], (True, False))
        if options["vector"] and not options["trainable"]:
            raise AttoscopeError(
                "vector: got True with trainable=False; expected vector=False, as a fixed omega "
                "has the same number for every feature"
            )
        if not isinstance(options["seed"], int):
            raise AttoscopeError(f"seed: got {options['seed']!r}; expected a whole number")

    def find(self, subject: Subject, batch: Batch, data: Any, options: dict[str, Any]) -> Found:
        refuse_factors(subject.model, self.name)
        places = with_folds(subject, batch, find_junctions(subject, batch, self.name))
        scale, notes = options["scale"], []
        if scale == "profile":
            shown = profile_batch(subject, data)
            places = profile(subject, shown, places, seed=options["seed"])
            if data is None:
                notes = [
                    "omega was profiled on made-up inputs; give data to profile it on your own"
                ]
        else:
            places = [replace(p, omega=closed_form(p.count, scale)) for p in places]
        found: Any = places
        return Found(found, notes)

    def build(self, model: nn.Module, places: list[Any], options: dict[str, Any]) -> Built:
        def made(place: Junction, like: Tensor, width: int) -> SkipFactor:
            return Admin(
                place, like, width if options["vector"] else None, options["trainable"]
            )

        return build_factors(model, places, made)


def refuse_factors(model: nn.Module, remedy: str) -> None:
    """A sentence where the skips have factors already."""
    for name, module in model.named_modules():
        if isinstance(module, SkipFactor):
            raise AttoscopeError(
                f"{remedy}: {name.rpartition('.')[0]} has a factor of {module.kind!r} already; "
                "expected a model without; undo that treatment first"
            )


def profile_batch(subject: Subject, data: Any) -> Batch:
    """The first batch of the data, whole; made-up inputs where there are none."""
    given = made_up(subject) if data is None else data
    return next(iter(batches(subject, given, batch_size=DOCUMENTS)))


def profile(
    subject: Subject, batch: Batch, places: list[Junction], *, seed: int = 0
) -> list[Junction]:
    """The junctions with omega from one forward pass in training mode.

    `omega_1 = 1`, `omega_{i+1}^2 = Var(omega_i x_{i-1}) + Var(a_i)` with variances over all
    numbers of the valid tokens, a_i the branch after its dropout; each stack starts anew. The
    model comes back as it was. Raises `AttoscopeError` where layers share their norms, as each
    addition has an omega of its own.
    """
    if len(unique_junctions(places)) < len(places):
        raise AttoscopeError(
            "scale: got 'profile' for a model whose layers share their weights; expected one of "
            f"{', '.join(SCALES[1:])}, which give all additions the same omega"
        )
    time_first = subject.layout(batch).time_first
    next_omega = {place.stack: 1.0 for place in places}
    omegas: dict[str, float] = {}

    def measure(factor: SkipFactor, stream: Tensor, branch: Tensor) -> None:
        place: Any = factor.place
        omega = omegas[place.norm] = next_omega[place.stack]
        factor.omega.fill_(omega)
        valid = _valid(batch, place.stack, len(next_omega) > 1, stream, time_first)
        skip, own = (omega**2 * _variance(stream, valid), _variance(branch, valid))
        next_omega[place.stack] = math.sqrt(skip + own)

    built = build_factors(
        subject.model, places, lambda place, like, width: Admin(place, like, None, False)
    )
    try:
        for _, module, _ in built.modules:
            module.measure = measure  # type: ignore[assignment]
        with _training(subject.model, seed):
            subject.run(batch)
    finally:
        built.undo()
    return [replace(place, omega=omegas[place.norm]) for place in places]


def _variance(values: Tensor, valid: Tensor | None) -> float:
    rows = values if valid is None else values[valid]
    return float(rows.float().var(correction=0))


def _valid(
    batch: Batch, stack: str, several: bool, stream: Tensor, time_first: bool
) -> Tensor | None:
    valid = batch.decoder_valid if several and "decoder" in stack else batch.valid
    if valid is None:
        return None
    turned = valid.T if time_first else valid
    return turned.to(stream.device) if turned.shape == stream.shape[:-1] else None


@contextmanager
def _training(model: nn.Module, seed: int) -> Iterator[None]:
    """Training mode without gradients; flags and random state are put back after."""
    flags = {module: module.training for module in model.modules()}
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        model.train()
        try:
            yield
        finally:
            for module, flag in flags.items():
                module.training = flag
