"""What a branch's weights are to the theory: the mean square of each matrix, gain included."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.trace.branch_types import Matrix, Role, Sublayer
from attoscope.trace.projections import projections
from attoscope.trace.subject import Subject
from attoscope.trace.types import Batch

# Kurtosis of a Gaussian is 3; above this a few weights carry most of the mean square.
_HEAVY = 20.0
_CHUNK = 2**24


@dataclass(frozen=True, slots=True)
class Weights:
    """The part of a matrix that plays one role.

    `square` is the mean of W_ij^2 g_j^2 over its entries, with g the gain of the norm in front
    of it (1 elsewhere): what the theory calls the weight's variance. `kurtosis` is that of W.
    """

    square: float
    kurtosis: float
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class BranchWeights:
    """The roles of one sub-layer's matrices, and what of it the theory does not cover.

    `skip` and `scale` are the factors of stream and branch in their sum; `sum_gain` the mean square
    of the gain of the norm behind the sum (1 without). `reason` says why there is no prediction.
    """

    sublayer: Sublayer
    roles: dict[Role, Weights]
    skip: float = 1.0
    scale: float = 1.0
    sum_gain: float = 1.0
    reason: str = ""
    notes: tuple[str, ...] = ()


class WeightReader:
    """Reads the matrices of a model's sub-layers; how fused ones are laid out is found once."""

    def __init__(self, subject: Subject, batch: Batch, most: int | None = None) -> None:
        """`most`: entries of a matrix that are looked at, in evenly picked rows; None for all."""
        self.subject, self.batch, self.most = subject, batch, most
        self.parameters = dict(subject.model.named_parameters(remove_duplicate=False))
        self.modules = dict(subject.model.named_modules())
        self._rows: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}

    def read(self, one: Sublayer) -> BranchWeights:
        """The weights of one sub-layer; `reason` says why it cannot be predicted."""
        reason = _outside(one)
        if reason:
            return BranchWeights(one, {}, reason=reason)
        roles: dict[Role, Weights] = {}
        try:
            for matrix in one.matrices:
                for role in matrix.roles:
                    first = role not in ("output", "out")
                    gain = self._gain(one.input_norm, matrix.inputs) if first else None
                    part = self._part(one, matrix, role)
                    roles[role] = _weights(part, gain, self.most)
        except AttoscopeError as error:
            return BranchWeights(one, {}, reason=str(error))
        wanted = {"in", "out"} if one.kind == "mlp" else {"query", "key", "value", "output"}
        missing = sorted(wanted - set(roles))
        if missing:
            why = f"its {' and '.join(missing)} matrix was not seen"
            return BranchWeights(one, {}, reason=why)
        if not all(math.isfinite(w.square) for w in roles.values()):
            return BranchWeights(one, {}, reason="some of its weights are not finite")
        assert one.skip is not None and one.scale is not None
        behind = self._gain(one.sum_norm, one.matrices[-1].outputs)
        size = 1.0 if behind is None else float(behind.square().mean())
        notes = self._notes(one, roles)
        return BranchWeights(one, roles, one.skip, one.scale, size, notes=notes)

    def _gain(self, name: str | None, width: int) -> Tensor | None:
        """Per channel, how much a norm multiplies by: read off from its outputs."""
        if name is None:
            return None
        norm = self.modules[name]
        parameter = next(norm.parameters(), None)
        if parameter is None:
            return None
        x = torch.ones(1, 1, width, dtype=parameter.dtype, device=parameter.device)
        x[..., ::2] = -1
        with torch.no_grad():
            up, down = norm(x), norm(-x)
            gain: Tensor = ((up - down) / 2 * x)[0, 0].double()
        return gain

    def _part(self, one: Sublayer, matrix: Matrix, role: Role) -> Tensor:
        """A matrix as (outputs, inputs), cut to what plays one role."""
        weight = self.parameters[matrix.name].detach()
        if weight.dim() != 2:
            raise AttoscopeError("several experts share the work, each with weights of its own")
        if len(matrix.roles) == 1:
            return weight.T if matrix.transposed else weight
        if role in ("gate", "in"):
            rows = weight.T if matrix.transposed else weight
            return rows.chunk(2)[matrix.roles.index(role)]
        if matrix.name.endswith("in_proj_weight"):
            return weight.chunk(3)[matrix.roles.index(role)]
        axis = 1 if matrix.transposed else 0
        rows = weight.index_select(axis, self._layout(one, matrix, role).to(weight.device))
        return rows.T if matrix.transposed else rows

    def _layout(self, one: Sublayer, matrix: Matrix, role: Any) -> Tensor:
        """Which outputs of a fused matrix play a role, found by differentiation, once a stack."""
        key = (one.site.stack, role, tuple(self.parameters[matrix.name].shape))
        if key not in self._rows:
            found = projections(self.subject, self.batch, one.attention, role)
            index = torch.cat([part.index for part in found if part.name in matrix.name])
            if not len(index):
                raise AttoscopeError(
                    f"which part of {matrix.name} makes the {role} is not known"
                )
            self._rows[key] = index.unique()
        return self._rows[key]

    def _notes(self, one: Sublayer, roles: dict[Role, Weights]) -> tuple[str, ...]:
        notes = []
        heavy = [
            f"{role} ({w.kurtosis:.0f})" for role, w in roles.items() if w.kurtosis > _HEAVY
        ]
        if heavy:
            notes.append(
                f"weights with outliers (kurtosis, a Gaussian's is 3): {', '.join(heavy)}"
            )
        if any(m.roles == () for m in one.matrices):
            notes.append("matrices beside the usual ones are left out")
        return tuple(notes)


def _outside(one: Sublayer) -> str:
    """Why the theory has nothing for a branch; empty where it has."""
    if one.kind == "parallel":
        return "attention and MLP run in parallel in one branch"
    if one.kind == "cross":
        return "cross attention reads another stream"
    if one.norm in ("sandwich", "branch"):
        return "its output is normalised before it is added"
    if one.skip is None or one.scale is None:
        return "stream or branch are multiplied by a vector before they are added"
    if one.kind == "mlp" and one.activation == "other":
        return "its activation function is not a known one"
    return ""


def _weights(part: Tensor, gain: Tensor | None, most: int | None) -> Weights:
    """Moments of a matrix (outputs, inputs), in blocks of rows to keep memory low."""
    outputs = part.shape[0]
    if most is not None and part.numel() > most:
        part = part[:: -(-part.numel() // most)]
    rows = max(1, _CHUNK // max(1, part.shape[1]))
    square = plain = fourth = 0.0
    for block in part.split(rows):
        x = block.double()
        squares = x.square()
        plain += float(squares.sum())
        fourth += float(squares.square().sum())
        wide = squares if gain is None else squares * gain.to(x.device).square()
        square += float(wide.sum())
    n = part.numel()
    variance = plain / n
    kurtosis = fourth / n / variance**2 if variance else 0.0
    return Weights(square / n, kurtosis, part.shape[1], outputs)
