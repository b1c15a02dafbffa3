"""Readings of trained weights and of their factors."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def correlation(
    a: Float[np.ndarray, "*batch rows columns"], b: Float[np.ndarray, "*others rows columns"]
) -> Float[np.ndarray, "*out"]:
    """`<A, B> / (||A||_F ||B||_F)` over leading axes that broadcast; NaN where either is 0."""
    inner = np.einsum("...ij,...ij->...", a, b)
    size = np.linalg.norm(a, axis=(-2, -1)) * np.linalg.norm(b, axis=(-2, -1))
    out = np.full(np.shape(inner), np.nan)
    return np.asarray(np.divide(inner, size, out=out, where=np.asarray(size > 0.0)))


def balance(
    k: Float[np.ndarray, "*batch key_width m"], q: Float[np.ndarray, "*batch query_width m"]
) -> Float[np.ndarray, "*batch"]:
    """`||K^T K - Q^T Q||_F`: kept by gradient flow on factors, driven to 0 by weight decay.

    Source: arXiv 2403.08699, 2410.23819.
    """
    apart = np.swapaxes(k, -1, -2) @ k - np.swapaxes(q, -1, -2) @ q
    return np.asarray(np.linalg.norm(apart, axis=(-2, -1)))


def nuclear_gap(
    k: Float[np.ndarray, "*batch key_width m"], q: Float[np.ndarray, "*batch query_width m"]
) -> Float[np.ndarray, "*batch"]:
    """`(||K||_F^2 + ||Q||_F^2)/2 - ||K Q^T||_*`, at least 0: what the factors waste.

    Source: arXiv 2410.23819.
    """
    squares = (k**2).sum((-2, -1)) + (q**2).sum((-2, -1))
    values = np.linalg.svd(k @ np.swapaxes(q, -1, -2), compute_uv=False)
    return np.asarray(0.5 * squares - values.sum(-1))
