"""Fixed attention with a real spectrum, and what counts as smoothed and as sharpened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax

from attoscope.measures.smoothness import spectrum
from attoscope.papers.base import Run
from attoscope.prediction.stacks import frequency_ratio, stack_profile

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
TOKENS = 8
GAP = 0.025
# Two modes that are GAP apart drift by 0.2 GAP per layer at least: exp(-30) at the end.
LAYERS = 6000
CHUNK = 20
SMOOTHED = "frequency ratio below 1e-10 and mean cosine above 0.9999"
SHARPENED = (
    "all tokens on one line (absolute cosine above 0.9999, rank-one residual below 1e-6), "
    "frequency ratio above 1, and mean cosine within 1e-6 of what the signs of the attention "
    "eigenvector of the least eigenvalue give, ((P - M)^2 / n - 1) / (n - 1), at most 1/2"
)


def kernel_attention(rng: np.random.Generator) -> Array:
    """Row-softmax of B B^T with uniform B: all eigenvalues are real, the least two GAP apart.

    Redrawn until they are, since the limit of two modes that are nearly as large comes late.
    """
    while True:
        b = rng.random((TOKENS, TOKENS))
        attention: Array = softmax(b @ b.T, axis=1)
        values = np.sort(np.linalg.eigvals(attention).real)
        if values[1] - values[0] >= GAP:
            return attention


def chunks(run: Run, name: str, number: int) -> list[list[int]]:
    """Seeds of this many draws, in parts that run side by side."""
    seeds = run.rng(name).integers(2**31, size=number)
    return [part.tolist() for part in np.array_split(seeds, -(-number // CHUNK))]


def expected_cosine(attention: Array) -> Array:
    """Mean cosine of tokens on one line, with the signs of the least eigenvector, (draw,)."""
    values, vectors = np.linalg.eig(attention)
    least = values.real.argmin(1)
    signs = np.sign(vectors[np.arange(len(least)), :, least].real).sum(1)
    n = attention.shape[1]
    return np.asarray((signs**2 / n - 1) / (n - 1))


@dataclass(frozen=True)
class Ends:
    """Measures of several token matrices, (draw,) each."""

    cosine: Array
    absolute_cosine: Array
    frequency_ratio: Array
    rank_one_residual: Array

    @classmethod
    def of(cls, tokens: Array) -> Ends:
        """Those of (draw, token, channel)."""
        x = torch.from_numpy(tokens)
        residual = spectrum(x, torch.ones(x.shape[:2], dtype=torch.bool))[1].numpy()
        profile = stack_profile(tokens)
        # The profile tells ratios from 0 only above 3e-8.
        ratio = frequency_ratio(tokens)
        return cls(profile.cosine, profile.absolute_cosine, ratio, residual)

    def smoothed(self) -> Mask:
        """Where all tokens have become equal."""
        return np.asarray((self.frequency_ratio < 1e-10) & (self.cosine > 0.9999))

    def sharpened(self, attention: Array) -> Mask:
        """Where they lie on one line, as the least eigenvector of attention says."""
        line = (self.absolute_cosine > 0.9999) & (self.rank_one_residual < 1e-6)
        signs = np.abs(self.cosine - expected_cosine(attention)) < 1e-6
        return np.asarray(line & signs & (self.frequency_ratio > 1))

    def worst(self) -> dict[str, float]:
        """The ends of the range that the draws cover."""
        return {
            "cosine_from": float(self.cosine.min()),
            "cosine_to": float(self.cosine.max()),
            "absolute_cosine_from": float(self.absolute_cosine.min()),
            "ratio_from": float(self.frequency_ratio.min()),
            "ratio_to": float(self.frequency_ratio.max()),
            "rank_one_residual_to": float(self.rank_one_residual.max()),
        }
