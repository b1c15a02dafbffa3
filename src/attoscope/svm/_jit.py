"""Compiled kernels: numba with its cache on disk, or without one where none can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

# Sums may be reordered and fused; infinities keep their meaning (an unbounded multiplier).
FAST = {"reassoc", "contract", "arcp", "nsz"}


def kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Compiles a kernel on first call; a cache that cannot be written costs only start-up time.

    Numba's cache looks at the kernel's own file: after a change to a kernel that others call,
    touch their files too (an installation writes them all).
    """
    options = {"fastmath": FAST, "nogil": True, **options}
    try:
        return numba.njit(cache=True, **options)(function)
    except (RuntimeError, OSError):
        return numba.njit(**options)(function)
