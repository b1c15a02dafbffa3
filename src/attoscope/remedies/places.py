"""Where a remedy acts: an attention module, its value projection and its output projection.

Found by running the model once, not by name: the value projection is the linear map whose output
holds the heads' values to the last bit, the output projection the one that reads the heads'
outputs. A model in which something stands between them and the kernel is refused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.visible import Sees


@runtime_checkable
class Spot(Protocol):
    """Where a remedy acts: a layer of a stack, the module that the remedy sits in (`attention`),
    and the modules that tell it from others (`value`, `output`), by dotted name."""

    @property
    def stack(self) -> str: ...

    @property
    def layer(self) -> int: ...

    @property
    def attention(self) -> str: ...

    @property
    def value(self) -> str: ...

    @property
    def output(self) -> str: ...

    def record(self) -> dict[str, Any]:
        """It as plain data."""
        ...


@dataclass(frozen=True, slots=True)
class Heads:
    """Which columns of a value projection's output are the values of which head.

    `count` value heads of `size` columns each, the first at `start`, each `stride` after the one
    before; every value head serves `repeat` query heads (grouped attention).
    """

    start: int
    stride: int
    size: int
    count: int
    repeat: int

    @property
    def width(self) -> int:
        """Columns of all query heads together."""
        return self.count * self.repeat * self.size

    @property
    def packed(self) -> bool:
        """Whether the value heads stand one after the other."""
        return self.stride == self.size

    def own(self, projected: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead values"]:
        """The value heads, one after the other, out of a projection's output."""
        if self.packed:
            return projected[..., self.start : self.start + self.count * self.size]
        parts: Tensor = projected.unflatten(-1, (-1, self.stride))[..., : self.count, :]
        first = self.start % self.stride
        return parts[..., first : first + self.size].flatten(-2)

    def spread(self, values: Float[Tensor, "*lead values"]) -> Float[Tensor, "*lead width"]:
        """Value heads repeated to the query heads, as the output projection reads them."""
        if self.repeat == 1:
            return values
        parts: Tensor = values.unflatten(-1, (self.count, self.size))
        return parts.repeat_interleave(self.repeat, -2).flatten(-2)

    def put(
        self, projected: Float[Tensor, "*lead features"], values: Float[Tensor, "*lead values"]
    ) -> Float[Tensor, "*lead features"]:
        """The projection's output with other values in it; the rest is as it was."""
        if self.packed:
            end = self.start + self.count * self.size
            parts = [projected[..., : self.start], values, projected[..., end:]]
            return torch.cat([part for part in parts if part.shape[-1]], -1)
        parts = projected.unflatten(-1, (-1, self.stride))
        first, last = self.start % self.stride, self.start % self.stride + self.size
        new = values.unflatten(-1, (self.count, self.size))
        return torch.cat([parts[..., :first], new, parts[..., last:]], -1).flatten(-2)

    def columns(self) -> list[int]:
        """Numbers of the value heads' columns, in order."""
        starts = (self.start + self.stride * head for head in range(self.count))
        return [column for start in starts for column in range(start, start + self.size)]


@dataclass(frozen=True, slots=True)
class Place:
    """One attention call's modules, by dotted name, and how its heads are laid out.

    `owner` is a module that runs once around all calls of the `stack`; `time_first` says that
    tokens are the first axis of what the projections see; `sees` says which keys a query may see,
    for remedies that need it.
    """

    stack: str
    layer: int
    attention: str
    value: str
    output: str
    owner: str
    heads: Heads
    causal: bool
    time_first: bool
    sees: Sees | None = None

    def record(self) -> dict[str, Any]:
        """The place as plain data."""
        record = asdict(self)
        if record["sees"] is not None:
            record["sees"]["masks"] = list(record["sees"]["masks"])
        return record

    @staticmethod
    def of(record: dict[str, Any]) -> Place:
        """The place that `record` wrote down."""
        heads = Heads(**record["heads"])
        sees = None if record["sees"] is None else Sees.of(record["sees"])
        return Place(**{**record, "heads": heads, "sees": sees})


def module_at(model: nn.Module, name: str) -> nn.Module:
    """A submodule by dotted name, or a sentence where there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise AttoscopeError(
            f"the model has no module {name!r}; expected the one that the treatment was made for, "
            "so build it from the same configuration"
        ) from error
