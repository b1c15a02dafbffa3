"""What a module does to numbers: is it a norm, which activation is it. Told by trying it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NormKind = Literal["layer", "rms"]
_CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "squared_relu": lambda x: F.relu(x).square(),
}
_CLOSE = 5e-3  # the tanh form of GELU is 5e-4 from the exact one; half precision rounds at 4e-3


def norm_kind(module: nn.Module, width: int) -> NormKind | None:
    """ "layer" or "rms" for a module whose output does not change when its input is scaled.

    A layer norm's output does not change either when a constant is added. None for all else,
    and for modules that take more than one tensor or have a weight matrix.
    """
    if any(p.dim() > 1 for p in module.parameters()):
        return None
    parameter = next(module.parameters(), None)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, width, generator=generator)
    if parameter is not None:
        x = x.to(parameter.device, parameter.dtype)
    try:
        plain, scaled, shifted = (module(value) for value in (x, 2 * x, x + 1))
    except Exception:  # a foreign module may raise anything when it is called alone
        return None
    if not isinstance(plain, Tensor) or plain.shape != x.shape:
        return None
    if not _alike(scaled, plain) or float(plain.float().std()) == 0:
        return None
    return "layer" if _alike(shifted, plain) else "rms"


def _alike(first: Tensor, second: Tensor) -> bool:
    first, second = first.float(), second.float()
    return float((first - second).norm()) <= 0.02 * float(second.norm())


def _equal(part: Tensor, whole: Tensor) -> bool:
    # Vectorised kernels round the tail of a row in another way.
    return part.shape == whole.shape and torch.allclose(part, whole, rtol=1e-4, atol=1e-5)


def curve_name(function: Callable[[Tensor], Any]) -> str | None:
    """The activation function's name; "other" for an unknown one, None for what is none.

    An activation maps every number by itself, to something that is no multiple of it.
    """
    x = torch.linspace(-4, 4, 64).reshape(1, 2, 32)
    try:
        y = function(x)
        part = function(x[..., :7])
    except Exception:  # as above
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape or not _equal(part, y[..., :7]):
        return None
    slope = float((x * y).sum() / x.square().sum())
    if float((y - slope * x).abs().max()) < _CLOSE:
        return None
    for name, curve in _CURVES.items():
        if float((curve(x) - y).abs().max()) < _CLOSE:
            return name
    return "other"
