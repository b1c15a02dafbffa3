"""How alike tokens become along depth: a family of measures that disagree in known regimes.

Tokens may point the same way (cosine), lie on one line with either sign (absolute cosine,
rank-one residual), or be equal (frequency ratio, Dirichlet energy). They are shown together,
because each is blind to something: one massive token dominates all but the cosines, which weigh
every token alike; the cosine of a rank-one matrix with mixed signs is small.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attoscope.measures.base import Measure, Reading, RowSampler, Witness, WitnessKey
from attoscope.measures.points import points
from attoscope.measures.rules import Rule
from attoscope.measures.smoothness_rules import RULES
from attoscope.measures.smoothness_specs import SPECS
from attoscope.measures.tally import Tally
from attoscope.trace.types import Batch, Layer

QUANTITIES = (
    "cosine",
    "frequency_ratio",
    "dirichlet_energy",
    "cosine_all",
    "frequency_ratio_all",
    "absolute_cosine",
    "rank_one_residual",
    "effective_rank",
    "effective_rank_share",
    "absolute_cosine_random",
)


class Smoothness:
    """Cosines, frequency ratio, ranks and energy of the tokens at each point of the stream.

    Args:
        tokens: content tokens per sequence on which the spectrum (ranks, residual) and the
            absolute cosine are computed; None takes all. The other readings use every token.
        seed: for the choice of tokens and the bootstrap.
    """

    name: ClassVar[str] = "smoothness"
    needs: ClassVar[Literal["attention", "stream"]] = "stream"
    rules: ClassVar[tuple[Rule, ...]] = RULES

    def __init__(self, *, tokens: int | None = 128, seed: int = 0) -> None:
        self.sampler = RowSampler(tokens, seed)
        self.tally = Tally(QUANTITIES, seed=seed)
        self.witnesses: dict[WitnessKey, Witness] = {}
        self.modules: dict[str, str] = {}

    def update(self, layer: Layer, batch: Batch) -> None:
        """Take in the stream where it enters the stack and where it leaves the layer."""
        for point in points(layer, torch.float64):
            self.modules.setdefault(point.name, layer.name)
            positions, real = self.sampler(point.content, batch.documents)
            quantities = torch.cat(
                [
                    family(point.x, point.content),
                    family(point.x, point.valid)[:2],
                    spectrum(_taken(point.x, positions, real), real),
                ]
            )
            # A broken sequence was set to 0, and has no smoothness.
            quantities = torch.where(point.broken, math.nan, quantities).T
            self.tally.add(
                point.name,
                batch.documents,
                quantities.cpu().double().numpy(),
                broken=point.broken.cpu().numpy(),
            )

    def merge(self, other: Measure) -> None:
        """Add what another `Smoothness` of the same seed took in."""
        if not isinstance(other, Smoothness):
            raise ValueError(f"cannot merge {type(other).__name__} into Smoothness")
        self.tally.merge(other.tally)
        self.modules.update(other.modules)

    def read(self) -> list[Reading]:
        """All readings, dims (point,)."""
        return self.tally.readings(SPECS, ("point",))


def family(
    x: Float[Tensor, "batch token width"], among: Bool[Tensor, "batch token"]
) -> Float[Tensor, "quantity batch"]:
    """Cosine, frequency ratio and Dirichlet energy, without a token × token matrix.

    With unit rows u, n tokens, J = (1/n) 1 1^T and X the tokens:
    cosine = (|sum u|^2 - n) / (n (n-1)); frequency ratio = |(I-J) X| / |J X|; Dirichlet energy
    (uniform weights) over |X|^2 = |(I-J) X|^2 / |X|^2. NaN with fewer than two tokens.
    """
    norms = torch.linalg.vector_norm(x, dim=-1)
    here = among.to(x.dtype)
    inverse = torch.where(among & (norms > 0), 1 / norms, 0.0)
    sums = torch.stack([here, inverse], 1) @ x
    count = here.sum(1)
    nonzero = (inverse > 0).sum(1)
    square = sums.square().sum(-1)
    cosine = (square[:, 1] - nonzero) / (nonzero * (nonzero - 1))
    energy = (norms.square() * here).sum(1)
    low = square[:, 0] / count
    high = (energy - low).clamp(min=0.0)
    # Below the rounding of the sums there is nothing to tell from 0.
    high = torch.where(high < 4 * torch.finfo(x.dtype).eps * energy, 0.0, high)
    two = torch.where(count >= 2, 0.0, math.nan)
    ratio = torch.where(low > 0, (high / low).sqrt(), math.nan)
    cosine = torch.where(nonzero >= 2, cosine.clamp(-1.0, 1.0), math.nan)
    return torch.stack([cosine, ratio, high / energy]) + two


def spectrum(
    y: Float[Tensor, "batch token width"], real: Bool[Tensor, "batch token"]
) -> Float[Tensor, "quantity batch"]:
    """Absolute cosine, rank-one residual, effective rank, its share of the possible, a null.

    `y` holds the tokens packed to the left, 0 where not `real`. Singular values s are square
    roots of the eigenvalues of the smaller Gram matrix in float64, good to about 1e-8 of the
    largest: rank-one residual = sqrt(1 - s_1^2 / sum s^2); effective rank = exp(entropy of
    s / sum s). The null is the mean |cosine| of random directions, sqrt(2 / (pi d)) for large
    d.
    """
    count = real.sum(1).to(y.dtype)
    width = y.shape[2]
    norms = torch.linalg.vector_norm(y, dim=-1)
    inverse = torch.where(norms > 0, 1 / norms, 0.0)
    if y.shape[1] <= width:
        smaller = y @ y.mT
        cosines = (inverse[:, None] @ smaller.abs() @ inverse[..., None])[:, 0, 0]
    else:
        smaller = y.mT @ y
        cosines = _absolute_cosines(y * inverse[..., None])
    nonzero = (inverse > 0).sum(1)
    absolute = (cosines - nonzero) / (nonzero * (nonzero - 1))
    absolute = torch.where(nonzero >= 2, absolute.clamp(0.0, 1.0), math.nan)
    values = _eigenvalues(smaller)
    energy = values.sum(1)
    residual = ((energy - values.amax(1)) / energy).clamp(min=0.0).sqrt()
    singular = values.sqrt()
    shares = singular / singular.sum(1, keepdim=True)
    rank = torch.special.entr(shares).sum(1).exp()
    most = count.clamp(max=width)
    two = torch.where((count >= 2) & (energy > 0), 0.0, math.nan)
    chance = torch.full_like(rank, random_cosine(width))
    return torch.stack([absolute, residual, rank, rank / most, chance]) + two


def _absolute_cosines(unit: Float[Tensor, "batch token width"]) -> Float[Tensor, " batch"]:
    """Sum of |cosine| over all pairs, in blocks of as many rows as there are channels.

    So no token × token matrix has to exist, however long the document.
    """
    total = unit.new_zeros(len(unit))
    for rows in unit.split(unit.shape[2], 1):
        total += (rows @ unit.mT).abs().sum((1, 2))
    return total


def random_cosine(width: int) -> float:
    """Expected |cosine| of two random directions: gamma(d/2) / (sqrt(pi) gamma((d+1)/2))."""
    log = math.lgamma(width / 2) - math.lgamma((width + 1) / 2)
    return math.exp(log) / math.sqrt(math.pi)


def _eigenvalues(gram: Float[Tensor, "batch n n"]) -> Float[Tensor, "batch n"]:
    """Eigenvalues of Gram matrices, rounding noise (positive or negative) set to 0."""
    # Scaled first: squares of very large or very small streams leave no room otherwise.
    scale = gram.diagonal(dim1=1, dim2=2).amax(1).clamp(min=torch.finfo(gram.dtype).tiny)
    scale = torch.where(torch.isfinite(scale), scale, 1.0)[:, None, None]
    values: Tensor = torch.linalg.eigvalsh((gram / scale).nan_to_num(0.0, 0.0, 0.0))
    noise = gram.shape[1] * torch.finfo(gram.dtype).eps * values.amax(1, keepdim=True)
    return torch.where(values > noise, values, 0.0)


def _taken(
    x: Float[Tensor, "batch token width"],
    positions: Int[Tensor, "batch row"],
    real: Bool[Tensor, "batch row"],
) -> Float[Tensor, "batch row width"]:
    """Tokens at the positions, 0 where not real."""
    rows = torch.arange(len(x), device=x.device)[:, None]
    return x[rows, positions] * real[..., None]
