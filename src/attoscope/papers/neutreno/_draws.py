"""What the claims share: seeds, random attention, and a ratio that is exact near collapse."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attoscope.papers.base import Run


def seeds(run: Run, *, quick: int, paper: int) -> list[int]:
    """As many seeds as the scale of the run asks for, from its own seed."""
    drawn: list[int] = (
        run.rng("draws").integers(2**31, size=run.pick(quick=quick, paper=paper)).tolist()
    )
    return drawn


def normal(rng: np.random.Generator, *shape: int) -> Float[Tensor, "*axes"]:
    """Standard normal numbers in float64."""
    return torch.from_numpy(rng.standard_normal(shape))


def frequency_ratio(x: Float[Tensor, "*batch token width"]) -> Float[Tensor, "*batch"]:
    """`|(I-J) X| / |J X|`; the sums of `measures.smoothness` see nothing below 3e-8."""
    mean = x.mean(-2, keepdim=True)
    low = torch.linalg.matrix_norm(mean) * x.shape[-2] ** 0.5
    ratio: Tensor = torch.linalg.matrix_norm(x - mean) / low
    return ratio
