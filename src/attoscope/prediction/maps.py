"""What each head does to the stream besides mixing tokens: its value-output map.

Without biases a head adds `A norm(X) V O` to the stream X (one row per token): A is its attention
map, V the columns of the value weight that feed it, O its part of the output weight, and `norm`
the norm in front of attention where there is one. V is found by differentiation, the norm by what
it does, never by names; whatever cannot be shown to be so on real input is left out, with a reason.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attoscope.trace.capture import capturing
from attoscope.trace.frames import Frame, framed, undisturbed
from attoscope.trace.projections import Projection, by_head
from attoscope.trace.subject import Subject, head_of
from attoscope.trace.types import AttentionCall, Batch

# How attention's update joins the stream: alone, beside another branch of the same block, changed
# on the way (normalised or scaled, so that it is not what is added), or in its place: no residual.
Joins = Literal["alone", "beside", "changed", "replaces"]
# Relative differences that rounding explains, by the number of bits of the dtype.
_ROUNDING = {16: 5e-2, 32: 1e-3, 64: 1e-5}
# Beside the square of the first the epsilon of every norm vanishes; beside the second it does not.
_LOUD, _QUIET = 1e3, 1e-4


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm by what it does: `norm(x) = gain * x / sqrt(mean(x^2) + epsilon) + const`.

    Where `centred`, of `x - mean(x)`.
    """

    name: str
    gain: Float[Tensor, " width"]
    centred: bool
    epsilon: float = 0.0

    def scale(self, x: Float[Tensor, "*some width"]) -> Float[Tensor, "*some"]:
        """What each token is divided by: its rms, or its standard deviation where centred."""
        return (self._seen(x).square().mean(-1) + self.epsilon).sqrt()

    def direction(self, x: Float[Tensor, "*some width"]) -> Float[Tensor, "*some width"]:
        """The tokens as the norm makes them before its gain: of rms 1 (0 stays 0)."""
        scale = self.scale(x)[..., None]
        return torch.where(scale > 0, self._seen(x) / scale, 0.0)

    def __call__(self, x: Float[Tensor, "*some width"]) -> Float[Tensor, "*some width"]:
        """The norm without its additive part."""
        return self.direction(x) * self.gain.to(x)

    def _seen(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x


@dataclass(frozen=True, eq=False)
class ValueMaps:
    """The value-output maps of one attention module, `norm(X) value[h] output[h]` for head h.

    Biases are no part of the maps: those of the values, of the norm and of the output (here as
    `bias`) add the same vector to every token, since rows of attention sum to 1. `norm` is None
    where attention reads the stream itself, as in post-norm blocks. The weights are read from
    the model when asked for.
    """

    module: str
    heads: int
    parts: tuple[Projection, ...]
    output_weight: Float[Tensor, "head size width"]
    norm: Norm | None
    bias: Float[Tensor, " width"] | None
    joins: Joins

    @property
    def value(self) -> Float[Tensor, "head width size"]:
        """Value columns by query head; heads that share a key head have the same ones."""
        each = self.heads // len(self.parts)
        columns = torch.stack([_columns(part) for part in self.parts])
        return columns.double().cpu().repeat_interleave(each, 0)

    @property
    def output(self) -> Float[Tensor, "head size width"]:
        """Rows of the output weight by head."""
        return self.output_weight.detach().double().cpu()

    def effective(self, gain: bool = True) -> Float[Tensor, "head width size"]:
        """Value columns with the norm in front folded in, up to each token's scale.

        `C diag(gamma) V`, with C = I - 11^T / width where the norm centres. With `gain=False`
        gamma is left out.
        """
        value = self.value
        if self.norm is None:
            return value
        if gain:
            value = self.norm.gain.to(value)[:, None] * value
        return value - value.mean(1, keepdim=True) if self.norm.centred else value

    def writes(
        self, output: Float[Tensor, "*some head size"]
    ) -> Float[Tensor, "*some head width"]:
        """What each head adds to the stream, from the heads' outputs; the bias is not in it."""
        weight = self.output_weight.detach().double()
        return torch.einsum("...hs,hsw->...hw", output.double().to(weight), weight)


@dataclass(frozen=True, eq=False)
class Maps:
    """`found`: by the name of the module that makes the call; `missing`: why not."""

    found: dict[str, ValueMaps] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def value_maps(subject: Subject, batch: Batch) -> Maps:
    """The value-output maps of every attention module, from one run on a little of `batch`.

    Each is checked on that run: the values must be the value columns times what the norm gives,
    up to a constant. Modules of which this is not so are in `missing`, with the reason.
    """
    maps = Maps()
    small = head_of(batch)
    subject.layout(small)
    # Cached, so that a parametrized weight is one tensor, which the run computes with.
    with parametrize.cached():
        record = _recorded(subject, small)
        biases = _Biases(subject.model)
        for seen in record:
            name = seen.owner.name
            if name in maps.found or name in maps.missing:
                continue
            made = _made(seen, biases)
            if isinstance(made, ValueMaps):
                maps.found[name] = made
            else:
                maps.missing[name] = made
    return maps


@dataclass(slots=True)
class _Seen:
    """One call, the module that made it, its block, and what ran in the block around it."""

    call: AttentionCall
    owner: Frame
    block: Frame
    parts: tuple[Projection, ...]
    before: list[Frame]
    inside: list[Frame] = field(default_factory=list)


def _recorded(subject: Subject, small: Batch) -> list[_Seen]:
    """All calls of one run with gradients; the model is handed back as it was."""
    blocks = subject.layout(small).blocks
    record: list[_Seen] = []
    left: list[Frame] = []
    starts: dict[int, int] = {}

    def enter(frame: Frame) -> None:
        if frame.name in blocks:
            starts[id(frame)] = len(left)

    def leave(frame: Frame) -> None:
        left.append(frame)
        if frame.name in blocks:
            for seen in record:
                if seen.block is frame:
                    seen.inside = left[starts[id(frame)] :]

    def on_call(call: AttentionCall) -> None:
        block = next((f for f in reversed(frames) if f.name in blocks), None)
        if block is None or any(seen.owner.name == frames[-1].name for seen in record):
            return
        with capture.asleep():
            parts = tuple(by_head(call, frames[-1].module, "value"))
        record.append(_Seen(call, frames[-1], block, parts, left[starts[id(block)] :]))

    with _differentiable(subject.model), capturing(on_call, len(small)) as capture:
        with framed(subject.model, enter, leave) as frames:
            subject.run(small)
    return record


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients for every weight; flags are put back."""
    flags = {p: p.requires_grad for p in model.parameters() if p.is_floating_point()}
    try:
        for parameter in flags:
            parameter.requires_grad_(True)
        with undisturbed(model), torch.enable_grad():
            yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


@torch.no_grad()
def _made(seen: _Seen, biases: _Biases) -> ValueMaps | str:
    """The maps of a call, or why there are none."""
    call, heads = seen.call, seen.call.shape[1]
    stream = seen.block.stream_in
    if call.shape[2] != call.shape[3]:
        return "cross attention: what is mixed is not the stream itself"
    if call.output_weight is None or call.output is None:
        return "the projection of the heads' outputs was not found"
    if not seen.parts or heads % len(seen.parts):
        return "no matrix was found whose rows or columns feed the values of one head each"
    if stream is None:
        return "the block takes in no residual stream"
    read = _read(seen)
    if read is None or read.shape != stream.shape:
        return "the values are made from other tensors than the stream or its norm"
    if call.output_weight.shape[2] != stream.shape[-1]:
        return (
            f"a map of unequal dimensions: it reads {stream.shape[-1]} channels and writes "
            f"{call.output_weight.shape[2]}"
        )
    if not _linear(seen, read):
        return "the values are not a linear map of what the value projection reads"
    norm = None
    if not _close(read, stream, read):
        norm = _norm_before(seen, read, stream)
        if norm is None:
            return "between the stream and the values stands something other than one norm"
    bias = biases.of(call.output_weight)
    made = ValueMaps(
        seen.owner.name, heads, seen.parts, call.output_weight, norm, bias, "changed"
    )
    return ValueMaps(**{**made.__dict__, "joins": _joins(seen, made)})


def _columns(part: Projection) -> Float[Tensor, "width size"]:
    rows = part.weight.detach().index_select(part.axis, part.index)
    return rows.T if part.axis == 0 else rows


def _read(seen: _Seen) -> Tensor | None:
    """What the module that holds the value weight takes in."""
    holder = seen.parts[0].name.rpartition(".")[0]
    if holder:
        name = f"{seen.owner.name}.{holder}" if seen.owner.name else holder
        for frame in reversed(seen.before):
            if frame.name == name:
                return frame.stream_in
    return seen.owner.stream_in


def _linear(seen: _Seen, read: Tensor) -> bool:
    """Whether the values are `read @ columns + const`, for the first and the last key head."""
    value = seen.call.value
    assert value is not None
    batch, groups, tokens, _ = value.shape
    if read.shape[:2] == (tokens, batch) != (batch, tokens):
        read = read.transpose(0, 1)
    if read.dim() != 3 or read.shape[:2] != (batch, tokens) or groups != len(seen.parts):
        return False
    for group in {0, groups - 1}:
        columns = _columns(seen.parts[group])
        if columns.shape[0] != read.shape[-1]:
            return False
        made = read.double() @ columns.double()
        rest = value[:, group].double() - made
        if not _close(rest, rest.mean((0, 1)).expand_as(rest), value[:, group]):
            return False
    return True


def _close(one: Tensor, other: Tensor, size: Tensor) -> bool:
    """Equal up to rounding beside the largest number of `size`."""
    if one.shape != other.shape:
        return False
    bound = _ROUNDING[torch.finfo(size.dtype).bits] * float(size.abs().max())
    return float((one.double() - other.double()).abs().max()) <= bound


def _norm_before(seen: _Seen, read: Tensor, stream: Tensor) -> Norm | None:
    """The module that ran before the call, took in the stream and gave what was read."""
    for frame in seen.before:
        before, after = frame.stream_in, frame.stream_out
        if before is None or after is None or before.shape != after.shape:
            continue
        if _close(after, read, read) and _close(before, stream, stream):
            norm = norm_of(frame.module, stream.shape[-1], frame.name)
            if norm is not None:
                return norm
    return None


def norm_of(module: nn.Module, width: int, name: str = "") -> Norm | None:
    """The gain of a norm and whether it centres, from what it gives; None when it is no norm.

    A norm gives `gain * x / rms(x) + const`. With x of mean 0 and large beside its epsilon,
    `gain = (norm(x) - norm(-x)) / 2 / (x / rms(x))`; it centres when adding a constant to x
    changes nothing; the epsilon shows where x is small; and what it gives for another x must
    then be as said.
    """
    signs = torch.ones(width, dtype=torch.float64)
    signs[1::2] = -1
    x = signs * torch.linspace(1, 2, width, dtype=torch.float64)
    x = _LOUD * (x - x.mean())
    other = _LOUD * torch.randn(width, generator=torch.Generator().manual_seed(0)).double()
    try:
        run = copy.deepcopy(module).double().cpu().eval()
        quiet = x * _QUIET / _LOUD
        inputs = torch.stack([x, -x, x + 3 * _LOUD, other, quiet, -quiet])[None]
        with torch.no_grad():
            plus, minus, moved, given, *low = run(inputs)[0].double()
    except Exception:  # noqa: BLE001 - a foreign module may raise anything, and is then no norm
        return None
    if plus.shape != x.shape or not (x != 0).all():
        return None
    gain = (plus - minus) / 2 * x.square().mean().sqrt() / x
    centred = _close(moved.float(), plus.float(), plus.float())
    lost = ((plus - minus).norm() / (low[0] - low[1]).norm()).square() - 1
    norm = Norm(name, gain, centred, max(0.0, float(lost * quiet.square().mean())))
    expected = norm(other) + (plus + minus) / 2
    return norm if _close(expected.float(), given.float(), given.float()) else None


class _Biases:
    """The bias beside an output weight, found by the memory that the weight lies in."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @cached_property
    def _by_memory(self) -> Mapping[int, nn.Module]:
        found: dict[int, nn.Module] = {}
        for module in self.model.modules():
            made = getattr(module, "parametrizations", {})
            weights = [*module.parameters(recurse=False), *(getattr(module, n) for n in made)]
            for weight in weights:
                if weight.dim() == 2:
                    found.setdefault(weight.data_ptr(), module)
        return found

    def of(self, weight: Tensor) -> Tensor | None:
        module = self._by_memory.get(weight.data_ptr())
        bias = getattr(module, "bias", None)
        if not isinstance(bias, Tensor) or bias.shape != weight.shape[-1:]:
            return None
        return bias.detach()


def _joins(seen: _Seen, maps: ValueMaps) -> Joins:
    """Whether the stream plus attention's update is seen in the block, or the rest without it."""
    stream, out = seen.block.stream_in, seen.block.stream_out
    assert stream is not None and seen.call.output is not None
    update = maps.writes(seen.call.output).sum(-2)
    if maps.bias is not None:
        update = update + maps.bias.double()
    if update.shape != stream.shape:
        update = update.transpose(0, 1)
    if update.shape != stream.shape:
        return "changed"
    size = update.to(stream.dtype)
    rounding = 4 * torch.finfo(stream.dtype).eps * float(stream.abs().max())

    def is_there(wanted: Tensor) -> bool:
        bound = rounding + _ROUNDING[torch.finfo(stream.dtype).bits] * float(size.abs().max())
        return any(
            one is not None
            and one.shape == wanted.shape
            and float((one.double() - wanted).abs().max()) <= bound
            for frame in seen.inside
            for one in (frame.stream_in, frame.stream_out)
        )

    if is_there(stream.double() + update):
        return "alone"
    if out is not None and _close(out, size, size):
        return "replaces"
    if out is not None and out.shape == stream.shape:
        if is_there(out.double() - stream.double() - update):
            return "beside"
    return "changed"
