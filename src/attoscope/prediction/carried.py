"""The stream carried forward by attention alone, beside what the model did with it."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attoscope.measures.base import Reading
from attoscope.measures.smoothness import family
from attoscope.measures.tally import Tally
from attoscope.prediction.documents import Document
from attoscope.prediction.maps import ValueMaps
from attoscope.prediction.specs import POINTS
from attoscope.trace.types import Layer

QUANTITIES = (
    *(spec.name for spec in POINTS),
    "random_frequency_ratio",
    "random_cosine",
)


class Carried:
    """`X <- X + sum_h A_h norm(X) V_h O_h` from the model's own X_0, with its own A_h.

    Nothing is kept but one stream per stack and document, and one of the null, in which V and O
    are Gaussian with the same norms.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.tally = Tally(QUANTITIES, seed=seed)
        self.streams: dict[tuple[str, int], tuple[int, Tensor, Tensor]] = {}

    def take(self, layer: Layer, one: Document, maps: ValueMaps) -> None:
        """Carry one document through one layer."""
        key = layer.stack, one.number
        if layer.index == 0:
            self.streams[key] = (-1, one.x, one.x)
            self._note(f"{layer.stack}.in", one, one.x, one.x, one.x)
        if key not in self.streams:
            return
        before, x, random = self.streams[key]
        if layer.index != before + 1:
            # A layer between was not readable: what attention alone does is not known from here.
            del self.streams[key]
            return
        value, output = maps.effective(), maps.output
        x = _through(x, one, maps, value, output)
        random = _through(random, one, maps, *self._random(layer.name, value, output))
        self.streams[key] = (layer.index, x, random)
        self._note(f"{layer.stack}.{layer.index}", one, x, random, one.out)

    def readings(self) -> list[Reading]:
        """Readings over (point,): attention alone, with its null, and the model itself."""
        return self.tally.readings(POINTS, ("point",)) if self.tally.places else []

    def _random(self, name: str, value: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """Gaussian factors of the same norms, the same for a layer whatever the document."""
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return _drawn(rng, value), _drawn(rng, output)

    def _note(self, point: str, one: Document, x: Tensor, random: Tensor, real: Tensor) -> None:
        ours, theirs, nulls = (_likeness(each, one.content) for each in (x, real, random))
        row = [ours[1], theirs[1], ours[0], theirs[0], nulls[1], nulls[0]]
        self.tally.add(point, (one.number,), np.array([row]))


def _through(
    x: Float[Tensor, "token width"],
    one: Document,
    maps: ValueMaps,
    value: Float[Tensor, "head width size"],
    output: Float[Tensor, "head size width"],
) -> Float[Tensor, "token width"]:
    """One layer of attention alone. The value columns hold the norm's gain already."""
    seen = x if maps.norm is None else maps.norm.direction(x)
    update = (one.attention @ (seen @ value) @ output).sum(0)
    x = update if maps.joins == "replaces" else x + update
    # Without a norm the update is linear: only the direction matters, and size may overflow.
    return x / x.abs().max().clamp(min=1e-300) if maps.norm is None else x


def _drawn(rng: np.random.Generator, like: Tensor) -> Tensor:
    drawn = torch.from_numpy(rng.standard_normal(tuple(like.shape)))
    norms = [torch.linalg.vector_norm(each, dim=(1, 2), keepdim=True) for each in (like, drawn)]
    scaled: Tensor = drawn * norms[0] / norms[1]
    return scaled


def _likeness(x: Tensor, content: Bool[Tensor, " token"]) -> list[float]:
    """Cosine and frequency ratio of the content tokens."""
    return [float(each) for each in family(x[None], content[None])[:2, 0]]
