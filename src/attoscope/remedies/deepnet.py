"""DeepNet: one factor for the skips of a post-norm model, and small branches at the start.

`x_i = norm(alpha x_{i-1} + f_i(x_{i-1}))`, Xavier normal weights, with the gain beta on values,
outputs and both matrices of the MLP. Source: arXiv 2203.00555.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.admin import refuse_factors
from attoscope.remedies.finding import Found
from attoscope.remedies.junctions import Junction, Weight, find_junctions
from attoscope.remedies.kinds import Built, Kind, check_choice
from attoscope.remedies.places import module_at
from attoscope.remedies.skips import SkipFactor, build_factors, parameter_at, with_folds
from attoscope.trace import Batch, Subject


def constants(encoder_layers: int, decoder_layers: int = 0) -> dict[str, tuple[float, float]]:
    """(skip alpha, gain beta) of each stack, for N encoder and M decoder layers.

    Both stacks: encoder `0.81 (N^4 M)^(1/16)` and `0.87 (N^4 M)^(-1/16)`, decoder `(3M)^(1/4)` and
    `(12M)^(-1/4)`. One stack of n layers: `(2n)^(1/4)` and `(8n)^(-1/4)`.

    Raises `AttoscopeError` where there is no layer at all. Source: DeepNet's table of constants.
    """
    n, m = encoder_layers, decoder_layers
    if min(n, m) < 0 or n + m == 0:
        raise AttoscopeError(
            f"layers: got {n} in the encoder and {m} in the decoder; expected at least one"
        )
    if n and m:
        both = (n**4 * m) ** (1 / 16)
        return {
            "encoder": (0.81 * both, 0.87 / both),
            "decoder": ((3 * m) ** 0.25, (12 * m) ** -0.25),
        }
    return {"encoder" if n else "decoder": ((2 * (n + m)) ** 0.25, (8 * (n + m)) ** -0.25)}


class DeepNet(SkipFactor):
    """DeepNet's alpha at one residual addition."""

    kind = "deepnet"


class DeepNetKind(Kind):
    name = "deepnet"
    place_type: ClassVar[Any] = Junction
    counted: ClassVar[str] = "residual additions"
    defaults: ClassVar[dict[str, Any]] = {"reinitialise": True, "seed": 0}

    def check(self, options: dict[str, Any]) -> None:
        check_choice("reinitialise", options["reinitialise"], (True, False))
        if not isinstance(options["seed"], int):
            raise AttoscopeError(f"seed: got {options['seed']!r}; expected a whole number")

    def find(self, subject: Subject, batch: Batch, data: Any, options: dict[str, Any]) -> Found:
        refuse_factors(subject.model, self.name)
        places = with_folds(subject, batch, find_junctions(subject, batch, self.name))
        table = {name: pair[0] for name, pair in _of_stacks(places).items()}
        found: Any = [replace(place, omega=table[place.stack]) for place in places]
        drawn = (
            "the sub-layers' weights were drawn anew; undo puts the former ones back, and what "
            "was trained in them since then is lost"
        )
        return Found(found, [drawn] if options["reinitialise"] else [])

    def build(self, model: nn.Module, places: list[Any], options: dict[str, Any]) -> Built:
        return build_factors(
            model, places, lambda place, like, width: DeepNet(place, like, None, False)
        )

    def initialise(
        self, model: nn.Module, places: list[Any], options: dict[str, Any]
    ) -> Callable[[], None]:
        if not options["reinitialise"]:
            return lambda: None
        gains = {name: pair[1] for name, pair in _of_stacks(places).items()}
        drawn = {
            w.parameter: (w, gains[place.stack]) for place in places for w in place.weights
        }
        for weight, _ in drawn.values():
            _check_order(model, weight)
        before = {name: parameter_at(model, name).detach().clone() for name in drawn}
        generator = torch.Generator().manual_seed(options["seed"])
        for weight, gain in drawn.values():
            _draw(parameter_at(model, weight.parameter), weight, gain, generator)

        def back() -> None:
            with torch.no_grad():
                for name, values in before.items():
                    parameter_at(model, name).copy_(values)

        return back


def _of_stacks(places: list[Junction]) -> dict[str, tuple[float, float]]:
    """The constants by the name of the stack, which reads another one where it has cross
    attention."""
    layers = {place.stack: place.layer + 1 for place in places}
    crossed = {place.stack for place in places if place.kind == "cross"}
    if not crossed:
        return {stack: constants(count)["encoder"] for stack, count in layers.items()}
    encoder = sum(count for stack, count in layers.items() if stack not in crossed)
    decoder = sum(count for stack, count in layers.items() if stack in crossed)
    table = constants(encoder, decoder)
    return {stack: table["decoder" if stack in crossed else "encoder"] for stack in layers}


def _check_order(model: nn.Module, weight: Weight) -> None:
    owner = module_at(model, weight.parameter.rpartition(".")[0])
    if len(weight.roles) > 1 and not isinstance(owner, nn.MultiheadAttention):
        raise AttoscopeError(
            f"reinitialise: {weight.parameter} makes {', '.join(weight.roles)} in an order that is "
            "not known; expected a matrix for each; give reinitialise=False and draw the weights "
            "yourself"
        )


@torch.no_grad()
def _draw(parameter: Tensor, weight: Weight, gain: float, generator: torch.Generator) -> None:
    """Xavier normal, each part of a fused matrix by itself; queries and keys with gain 1."""
    matrix = parameter.T if weight.transposed else parameter
    roles = weight.roles or ("",)
    for role, part in zip(roles, matrix.chunk(len(roles)), strict=True):
        own = 1.0 if role in ("query", "key") else gain
        std = own * math.sqrt(2 / sum(part.shape))
        drawn = torch.randn(part.shape, generator=generator, dtype=torch.float32)
        part.copy_(std * drawn)
