"""Numbers of one head: the spectrum of its value-output map, and of its attention map."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from attoscope.prediction.maps import ValueMaps
from attoscope.prediction.spectra import (
    AttentionSpectrum,
    Dominance,
    ValueOutputSpectrum,
    dominance,
    value_output_spectrum,
)

Kinds = tuple[Dominance, Dominance | None, float]


@dataclass(frozen=True, eq=False)
class HeadMap:
    """The spectrum of one head's map, with and without the norm's gain, and its null.

    `radius` is that of the disc which the eigenvalues of a random Gaussian map of the same norms
    fill: ||V|| ||O|| / sqrt(size width). `energy` is ||V O||^2 / width: by how much a random map
    of the same norm multiplies the squared length of a token, on average.
    """

    spectrum: ValueOutputSpectrum
    plain: ValueOutputSpectrum | None
    radius: float
    energy: float
    wider: bool

    def compare(self, attention: AttentionSpectrum, scale: float, residual: bool) -> Kinds:
        """Which eigenvalue wins: with the gain, without it, and the margin of a random map.

        `scale` is what the norm divides a token by. The largest |1 + a z| over a disc |z| <= R
        is 1 + |a| R, so a random map has the margin ln((1 + R) / (1 + |a_2| R)).
        """

        def of(spectrum: ValueOutputSpectrum) -> Dominance:
            return dominance(
                attention.values, spectrum.values / scale, residual=residual, wider=self.wider
            )

        reach = self.radius / scale
        random = math.log1p(reach) - math.log1p(attention.second * reach)
        if not residual:
            random = -math.log(attention.second) if attention.second > 0 else math.inf
        return of(self.spectrum), None if self.plain is None else of(self.plain), random


def head_maps(maps: ValueMaps) -> Iterator[HeadMap]:
    """The spectra of every head of an attention module, one after the other."""
    outputs = maps.output.numpy()
    with_gain = maps.effective().numpy()
    without = None if maps.norm is None else maps.effective(gain=False).numpy()
    for head, output in enumerate(outputs):
        value = with_gain[head]
        yield HeadMap(
            spectrum=value_output_spectrum(value, output),
            plain=None if without is None else value_output_spectrum(without[head], output),
            radius=_norm(value) * _norm(output) / math.sqrt(output.size),
            energy=float(((value.T @ value) * (output @ output.T)).sum()) / len(value),
            wider=len(value) > len(output),
        )


def uniform_spectrum(tokens: int, causal: bool) -> tuple[float, float]:
    """Second-largest modulus and smallest real part of attention that weighs all keys alike.

    Causal: the diagonal 1, 1/2, …, 1/n. Else the matrix of 1/n, whose other eigenvalues are 0.
    """
    return (0.5, 1 / tokens) if causal else (0.0, 0.0)


def random_asymmetry(width: int) -> float:
    """Of V O with independent Gaussian entries: tr(H H) is ||H||^2 / width on average."""
    return math.sqrt(2 - 2 / width)


def _norm(matrix: Float[np.ndarray, "rows columns"]) -> float:
    return float(np.linalg.norm(matrix))
