"""One labelled instance of token selection, and several side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from attoscope.errors import AttoscopeError

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Instance:
    """Sequences of tokens with one query and one label each, and the head that scores tokens.

    Args:
        tokens: (sequence, token, width).
        queries: (sequence, query width); a column of ones where a prompt is trained: then the
            weight (width, 1) is the prompt.
        labels: (sequence,) of +1 and -1.
        head: (width,) of a linear head `v^T a`, or (width, hidden) of `sum relu(a^T V)`.
        flipped: (sequence,) True where the label is wrong; None where all are right.

    `stack` puts several on a leading trial axis, which every array then has.
    """

    tokens: Float[np.ndarray, "*trial sequence token width"]
    queries: Float[np.ndarray, "*trial sequence query_width"]
    labels: Float[np.ndarray, "*trial sequence"]
    head: Float[np.ndarray, "*trial width"] | Float[np.ndarray, "*trial width hidden"]
    flipped: Bool[np.ndarray, "*trial sequence"] | None = None

    @property
    def linear(self) -> bool:
        """Whether the head is a vector."""
        return self.head.ndim == self.tokens.ndim - 2

    @property
    def scores(self) -> Float[np.ndarray, "*trial sequence token"]:
        """`label_i * h(token_it)`: what the label gains from each token alone."""
        if self.linear:
            values = np.einsum("...ntd,...d->...nt", self.tokens, self.head)
        else:
            hidden = np.einsum("...ntd,...dh->...nth", self.tokens, self.head)
            values = np.maximum(hidden, 0.0).sum(-1)
        return np.asarray(self.labels[..., None] * values)

    @property
    def optimal(self) -> Int[np.ndarray, "*trial sequence"]:
        """Position of the token with the best score in each sequence."""
        return np.asarray(self.scores.argmax(-1))


def stack(instances: Iterable[Instance]) -> Instance:
    """Instances of one shape on a leading trial axis.

    Raises `AttoscopeError` where there is none, or their shapes differ.
    """
    several = list(instances)
    if not several:
        raise AttoscopeError("instances: got none; expected at least one to stack")
    return Instance(*(_stacked(f.name, several) for f in fields(Instance)))


def _stacked(name: str, instances: list[Instance]) -> Any:
    parts = [getattr(instance, name) for instance in instances]
    shapes = [None if part is None else part.shape for part in parts]
    for trial, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise AttoscopeError(
                f"instances: got {name} of shape {shapes[0]} in trial 0 and {shape} in trial "
                f"{trial}; expected one shape, so stack instances of equal sizes"
            )
    return None if shapes[0] is None else np.stack(parts)


def check_sizes(**sizes: int) -> None:
    """Raises `AttoscopeError` where a size is below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise AttoscopeError(f"{name}: got {size}; expected a whole number, at least 1")
