"""The stacks of the paper at a small width: fairseq's initialisation, no dropout, float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import attoscope
from attoscope.papers.base import Run
from attoscope.trace import Subject

WIDTH, HEADS, TOKENS, BATCH = 64, 4, 16, 4


@dataclass(frozen=True, slots=True)
class Variant:
    """One model of the comparison: its name, where its norms are, and Admin's scale if any."""

    name: str
    pre: bool = False
    scale: str | None = None


POST, PRE = Variant("Post-LN"), Variant("Pre-LN", pre=True)
ADMIN = Variant("Admin, profiled", scale="profile")
LOGARITHMIC, CONSTANT = Variant("O(log n)", scale="O(logn)"), Variant("O(1)", scale="O(1)")
LINEAR = Variant("O(n)", scale="O(n)")
NAMED = {each.name: each for each in (POST, PRE, ADMIN, LOGARITHMIC, CONSTANT, LINEAR)}


def seeds(run: Run, *, quick: int, paper: int) -> list[int]:
    """As many seeds as the scale of the run asks for, from its own seed."""
    drawn: list[int] = (
        run.rng("stacks").integers(2**31, size=run.pick(quick=quick, paper=paper)).tolist()
    )
    return drawn


def stack(name: str, sublayers: int, seed: int) -> tuple[Subject, Tensor]:
    """An untrained model of so many sub-layers (two in a layer) and its input; the weights of a
    seed are the same for all variants.

    Xavier uniform throughout, with queries, keys and values as one (3D, D) matrix; biases 0; the
    input is Gaussian and layer-normalised.
    """
    variant, generator = NAMED[name], torch.Generator().manual_seed(seed)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=variant.pre,
        dtype=torch.float64,
    )  # fmt: skip
    model = nn.TransformerEncoder(layer, sublayers // 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter, generator=generator)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    x = normal_input(generator)
    if variant.scale is not None:
        attoscope.treat(model, "admin", x, scale=variant.scale, vector=False, trainable=False)
    return Subject.of(model), x


def normal_input(
    generator: torch.Generator,
) -> Float[Tensor, "batch token width"]:
    """Gaussian tokens with mean 0 and variance 1 each."""
    shape = (BATCH, TOKENS, WIDTH)
    return F.layer_norm(torch.randn(shape, generator=generator, dtype=torch.float64), (WIDTH,))
