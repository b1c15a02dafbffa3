"""The optimisers: which step follows from a gradient, on each parameter by itself.

A rule is told minus the gradient as `exp(log_scale) * direction` and changes the parameters in
place. It gives back, per parameter, the factor that minus the gradient was multiplied by, or (for
steps that are no multiple of it) one over the size of the gradient in the dual norm: the weight of
this step's multipliers in the dual certificate. `log_scale` may be far below what floating point
holds; only `GradientDescent`, whose steps do vanish then, multiplies it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from attoscope.dynamics import _kernels as kernels
from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks

Array = NDArray[np.float64]
Rate = float | int | Callable[[int], float]
# What the official code adds to the norm of a gradient, and as a penalty on factors.
EPS = 2.22e-16
# Below this exponent the mirror map 1/(p-1) loses steps to underflow, or overflows.
LEAST_P = 1.05


@dataclass
class Descent:
    """What a rule is told in each step.

    `directions`: one (trial, rows, columns) per parameter; minus the gradient is
    `exp(log_scale) * direction`. `number` counts the steps done. `log_excess` gives the logarithm
    of the loss above its infimum, per trial, where that is known.
    """

    directions: Sequence[Array]
    log_scale: Array
    number: int = 0
    log_excess: Callable[[], Array] | None = None


@runtime_checkable
class Rule(Protocol):
    """An optimiser. `memory` is an empty dictionary at the start, and the rule's own after."""

    @property
    def log_domain(self) -> bool:
        """Whether the gradient is to be computed without cancellation, relative to its size."""
        ...

    def step(
        self, parameters: Sequence[Array], descent: Descent, memory: dict[str, Any]
    ) -> list[Array]: ...


@dataclass(frozen=True)
class GradientDescent:
    """`W <- W - lr grad`."""

    lr: Rate
    log_domain: bool = True

    def __post_init__(self) -> None:
        _check_rate(self.lr)

    def step(
        self, parameters: Sequence[Array], descent: Descent, memory: dict[str, Any]
    ) -> list[Array]:
        scale = rate(self.lr, descent.number) * np.exp(descent.log_scale)
        for p, d in zip(parameters, descent.directions, strict=True):
            p += scale[:, None, None] * d
        return [scale] * len(parameters)


@dataclass(frozen=True)
class Normalised:
    """`W <- W - lr grad / ||grad||_F`, each factor's gradient by its own norm.

    Args:
        lr: step length; a number or a function of the step number.
        log_domain: True computes the direction without cancellation, and runs as long as one
            likes. False is the rule of the official code to the letter: plain double arithmetic,
            2.22e-16 added to the norm, and on factors a penalty `2.22e-16 (||K||^2 + ||Q||^2)`;
            it carries no information once the softmax is saturated to rounding.

    Source: arXiv 2308.16898, experiments.
    """

    lr: Rate = 0.1
    log_domain: bool = True

    def __post_init__(self) -> None:
        _check_rate(self.lr)

    def step(
        self, parameters: Sequence[Array], descent: Descent, memory: dict[str, Any]
    ) -> list[Array]:
        lr, out = rate(self.lr, descent.number), []
        for p, d in zip(parameters, descent.directions, strict=True):
            out.append(np.empty(len(p)))
            kernels.unit_step(p, d, lr, 0.0 if self.log_domain else EPS, out[-1])
        return out


@dataclass(frozen=True)
class Polyak:
    """Polyak's step: `lr = (loss - infimum) / (2 ||grad||^2)`, the infimum in closed form.

    Linear heads only. Where a run does not select the best tokens, the gradient vanishes and the
    excess loss does not: steps would grow beyond all bounds.

    Args:
        longest: no step is longer than this (Frobenius norm).

    Source: arXiv 2402.05738 (its factor 2 recalled; the bound is ours).
    """

    longest: float | int = 100.0
    log_domain: bool = True

    def __post_init__(self) -> None:
        if not (checks.is_number(self.longest) and 0.0 < self.longest < np.inf):
            raise AttoscopeError(f"longest: got {self.longest!r}; expected a positive number")

    def step(
        self, parameters: Sequence[Array], descent: Descent, memory: dict[str, Any]
    ) -> list[Array]:
        if descent.log_excess is None:
            raise AttoscopeError(
                "Polyak: got a loss whose infimum is not known; expected a LinearHead and no "
                "weight decay, so use Normalised"
            )
        square = sum(np.einsum("rij,rij->r", d, d) for d in descent.directions)
        size = np.sqrt(np.asarray(square))
        # In the units of the directions; excess and gradient may be far below what a double holds.
        excess = descent.log_excess() - descent.log_scale - np.log(2.0)
        most = np.log(self.longest * np.where(size > 0.0, size, 1.0))
        scale = np.exp(np.minimum(excess, most)) * inverse(size) ** 2
        for p, d in zip(parameters, descent.directions, strict=True):
            p += scale[:, None, None] * d
        return [scale] * len(parameters)


@dataclass(frozen=True)
class Steepest:
    """Steepest descent in a norm: the unit step of that norm which lowers the loss fastest.

    frobenius `G/||G||`; max `sign(G)`; spectral `U V^T` of the compact singular value
    decomposition; l1 the largest entry's sign; nuclear `u_1 v_1^T`. With momentum in front of the
    map: Signum (max), Muon (spectral).

    Args:
        norm: "frobenius", "max", "spectral", "l1" or "nuclear".
        lr: step length in that norm; a number or a function of the step number.
        momentum: `M <- momentum M + G` before the map, 0 to below 1.

    Source: arXiv 2502.04664.
    """

    norm: str
    lr: Rate = 0.1
    momentum: float | int = 0.0
    log_domain: bool = True

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_momentum("momentum", self.momentum)
        if not isinstance(self.norm, str) or self.norm not in MAPS:
            raise AttoscopeError(f"norm: got {self.norm!r}; expected one of {', '.join(MAPS)}")

    def step(
        self, parameters: Sequence[Array], descent: Descent, memory: dict[str, Any]
    ) -> list[Array]:
        lr, out = rate(self.lr, descent.number), []
        fade = _fade(memory, descent.log_scale)
        for j, (p, d) in enumerate(zip(parameters, descent.directions, strict=True)):
            if self.momentum > 0.0:
                with np.errstate(over="ignore", invalid="ignore"):
                    d = d + self.momentum * fade * memory.get(f"mean{j}", 0.0)
                memory[f"mean{j}"] = d
            refuse_overflow("a gradient or a mean of them", descent.number, d)
            unit, dual = steepest(self.norm, d)
            p += lr * unit
            out.append(lr * inverse(dual))
        return out


@dataclass(frozen=True)
class Adam:
    """Adam without its epsilon, which would stop training once gradients are small.

    Args:
        lr: a number or a function of the step number.
        betas: decay of the mean and of the mean square.
    """

    lr: Rate = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    log_domain: bool = True

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise AttoscopeError(f"betas: got {self.betas!r}; expected a pair of numbers")
        for beta in self.betas:
            _check_momentum("betas", beta)

    def step(
        self, parameters: Sequence[Array], descent: Descent, memory: dict[str, Any]
    ) -> list[Array]:
        lr, k, (b1, b2), out = rate(self.lr, descent.number), descent.number + 1, self.betas, []
        fade = _fade(memory, descent.log_scale)
        for j, (p, d) in enumerate(zip(parameters, descent.directions, strict=True)):
            with np.errstate(over="ignore", invalid="ignore"):
                mean = b1 * fade * memory.get(f"mean{j}", 0.0) + (1.0 - b1) * d
                square = b2 * fade**2 * memory.get(f"square{j}", 0.0) + (1.0 - b2) * d**2
            refuse_overflow("a mean of gradients", descent.number, mean, square)
            memory[f"mean{j}"], memory[f"square{j}"] = mean, square
            root = np.sqrt(square / (1.0 - b2**k))
            p += lr * mean / (1.0 - b1**k) * inverse(root)
            out.append(lr * inverse(np.abs(d).sum((1, 2))))
        return out


@dataclass(frozen=True)
class Mirror:
    """Mirror descent with the entrywise potential `|W|^p / p`.

    `V = sign(W) |W|^(p-1) - lr grad`, `W = sign(V) |V|^(1/(p-1))`; p = 2 is gradient descent.

    Args:
        p: at least 1.05; nearer to 1 the power 1/(p-1) leaves double precision.
        lr: a number or a function of the step number.
        normalised: divide the gradient by its entrywise l_q norm, 1/p + 1/q = 1.

    Source: arXiv 2410.14581.
    """

    p: float | int
    lr: Rate = 0.1
    normalised: bool = True
    log_domain: bool = True

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        if not (checks.is_number(self.p) and LEAST_P <= self.p < np.inf):
            raise AttoscopeError(
                f"p: got {self.p!r}; expected a number of at least {LEAST_P}, as nearer to 1 the "
                "mirror map leaves double precision"
            )

    def step(
        self, parameters: Sequence[Array], descent: Descent, memory: dict[str, Any]
    ) -> list[Array]:
        lr, out, q = rate(self.lr, descent.number), [], self.p / (self.p - 1.0)
        for w, d in zip(parameters, descent.directions, strict=True):
            scale = lr * np.exp(descent.log_scale)
            if self.normalised:
                top = np.abs(d).max((1, 2))
                ratio = np.abs(d) * inverse(top)[:, None, None]
                scale = lr * inverse(top * (ratio**q).sum((1, 2)) ** (1.0 / q))
            v = np.sign(w) * np.abs(w) ** (self.p - 1.0) + scale[:, None, None] * d
            w[...] = np.sign(v) * np.abs(v) ** (1.0 / (self.p - 1.0))
            out.append(scale)
        return out


def steepest(norm: str, direction: Array) -> tuple[Array, Array]:
    """The unit step in a norm with the largest inner product, and that product (dual norm).

    `direction` is (trial, rows, columns); a direction of zero gives no step.
    """
    return MAPS[norm](direction)


def _frobenius(d: Array) -> tuple[Array, Array]:
    size = np.sqrt(np.einsum("rij,rij->r", d, d))
    return d * inverse(size)[:, None, None], size


def _sign(d: Array) -> tuple[Array, Array]:
    return np.sign(d), np.abs(d).sum((1, 2))


def _entry(d: Array) -> tuple[Array, Array]:
    flat = d.reshape(len(d), -1)
    at, rows = np.abs(flat).argmax(1), np.arange(len(d))
    unit = np.zeros_like(flat)
    unit[rows, at] = np.sign(flat[rows, at])
    return unit.reshape(d.shape), np.abs(flat[rows, at])


def _polar(d: Array) -> tuple[Array, Array]:
    u, s, v = np.linalg.svd(d, full_matrices=False)
    # Directions of rounding noise would be blown up to full size.
    kept = s > s[:, :1] * max(d.shape[1:]) * np.finfo(np.float64).eps
    return np.asarray((u * kept[:, None, :]) @ v), np.asarray(s.sum(1))


def _pair(d: Array) -> tuple[Array, Array]:
    u, s, v = np.linalg.svd(d, full_matrices=False)
    unit = u[:, :, :1] * v[:, :1, :] * (s[:, :1, None] > 0.0)
    return np.asarray(unit), np.asarray(s[:, 0])


MAPS: dict[str, Callable[[Array], tuple[Array, Array]]] = {
    "frobenius": _frobenius,
    "max": _sign,
    "spectral": _polar,
    "l1": _entry,
    "nuclear": _pair,
}


def rate(lr: Rate, number: int) -> float:
    """The step length of step `number`, counted from 0."""
    value = lr(number) if callable(lr) else lr
    if not checks.is_number(value):
        raise AttoscopeError(f"lr: got {value!r} for step {number}; expected a number")
    return float(value)


def inverse(size: Array) -> Array:
    """1 / size, and 0 where that is 0."""
    return np.divide(1.0, size, out=np.zeros_like(size), where=size > 0.0)


def refuse_overflow(what: str, number: int, *arrays: Array) -> None:
    """Steps that are too long end beyond what a double holds."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise AttoscopeError(
            f"lr: got {what} that is no longer finite by step {number}; expected steps that do "
            "not overflow, so lower lr"
        )


def _fade(memory: dict[str, Any], log_scale: Array) -> Array:
    """What turns the last step's units into those of this one, (trial, 1, 1)."""
    last = memory.get("log_scale", log_scale)
    memory["log_scale"] = log_scale.copy()
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(last - log_scale)[:, None, None])


def _check_rate(lr: Rate) -> None:
    if not callable(lr) and not (checks.is_number(lr) and 0.0 < lr < np.inf):
        raise AttoscopeError(
            f"lr: got {lr!r}; expected a positive number, or a function of the step number"
        )


def _check_momentum(name: str, value: float | int) -> None:
    if not (checks.is_number(value) and 0.0 <= value < 1.0):
        raise AttoscopeError(f"{name}: got {value!r}; expected 0 to below 1")
