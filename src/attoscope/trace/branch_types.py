"""What is known of a residual branch: where it is, its norms and matrices; and what passed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from attoscope.trace.curves import NormKind
from attoscope.trace.types import Site

Kind = Literal["attention", "mlp", "cross", "parallel"]
Norm = Literal["pre", "post", "sandwich", "branch", "none"]
Role = Literal["query", "key", "value", "output", "in", "gate", "out"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix of a branch: the dotted name of its parameter, in the order of the run.

    `transposed` says that it is stored as (inputs, outputs), else (outputs, inputs). A matrix
    that makes queries, keys and values at once has several `roles`, in the order of its outputs
    only where the model is torch's own; () where its role could not be seen.
    """

    name: str
    inputs: int
    outputs: int
    transposed: bool
    roles: tuple[Role, ...]


@dataclass(frozen=True, slots=True)
class Sublayer:
    """One residual branch: `after = before + branch`, where `before` is skip times the stream.

    `site` is the stack, the layer and the kind of branch; `module` the outermost module whose
    output is the branch ("" where there is none); `block` the layer's module; `attention` the
    module that its (first) attention call carries, "" without one. `norm`: "pre"
    (the branch's input is normalised), "post" (the sum is), "sandwich" (the branch's input and
    its output), "branch" (its output alone), "none". `input_norm`, `branch_norm` and `sum_norm`
    name the norm modules. `skip` is the factor in front of the stream, None where it is a
    tensor. `gated` and `activation` are those of an MLP: the activation's name where its curve
    is a known one ("relu", "gelu", "silu", "tanh"), else "other". `addition` tells where the sum
    is made: (module, which run of it, which addition in it), and
    `stream_first` whether the stream is its first operand; `hops` counts the casts, views and
    scalings between the stream and that operand.

    `scale` is the number that the branch's last module is multiplied by before the sum (None
    where it is a tensor). In parallel blocks that add one branch after the other the second one
    reads the stream before the first.
    """

    site: Site
    kind: Kind
    block: str
    module: str
    attention: str
    norm: Norm
    norm_kind: NormKind | None
    input_norm: str | None
    branch_norm: str | None
    sum_norm: str | None
    matrices: tuple[Matrix, ...]
    gated: bool
    activation: str | None
    skip: float | None
    scale: float | None
    addition: tuple[str, int, int]
    stream_first: bool
    hops: int

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of its norm modules, in the order in which they run."""
        named = (self.input_norm, self.branch_norm, self.sum_norm)
        return tuple(name for name in named if name)


@dataclass(frozen=True, slots=True)
class Found:
    """A model's sub-layers and, a sentence each, what was not recognised."""

    sublayers: tuple[Sublayer, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Passing:
    """A sub-layer as it went by: `after = before + branch`, all (batch, token, width).

    They are what is added, so factors in front of them are in them. `valid` marks real tokens.
    The gradients are there only where `watch_sublayers` was asked for them; `before_gradient` is
    that of the stream that the skip and the branch read, before any factor. For a post-norm model
    `before` is the normalised stream and `after` the sum before its norm. A sum that is made in
    place has no `before_gradient`.
    """

    sublayer: Sublayer
    before: Float[Tensor, "batch token width"]
    branch: Float[Tensor, "batch token width"]
    after: Float[Tensor, "batch token width"]
    valid: Bool[Tensor, "batch token"]
    before_gradient: Float[Tensor, "batch token width"] | None = None
    branch_gradient: Float[Tensor, "batch token width"] | None = None
    after_gradient: Float[Tensor, "batch token width"] | None = None
