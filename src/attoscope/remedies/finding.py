"""Finding the places: one run of the model in which linear maps are matched with attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.places import Heads, Place
from attoscope.remedies.visible import find_sees
from attoscope.trace import AttentionCall, Batch, Layer, Subject, watch


@dataclass(slots=True)
class Found:
    """The self-attention calls of a model that can be treated, and notes on what is left alone."""

    places: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_places(subject: Subject, batch: Batch, *, masked: bool = False) -> Found:
    """Every self-attention call's place, in the order in which they ran.

    With `masked` it is found as well which keys each may see, and compared with the kernel's own.

    Raises `AttoscopeError` where a call's values or outputs are not those of a linear map, or its
    tokens are not those of the document (windows).
    """
    found, crossing = Found(), 0
    layout = subject.layout(batch)

    def visit(layer: Layer, seen: Batch) -> None:
        nonlocal crossing
        for call in layer.calls:
            if call.site.call.startswith("cross"):
                crossing += 1
                continue
            stack = layout.stack(layer.stack)
            place = _place(call, stack.causal, batch, maps)
            if masked:
                module = subject.model.get_submodule(call.module)
                args, kwargs = maps.given[call.module]
                sees = find_sees(call, layer.valid, module, args, kwargs, stack.causal)
                place = replace(place, sees=sees)
            found.places.append(place)
        maps.clear()

    with _watched(subject.model) as maps:
        watch(subject, batch, visit)
    if crossing:
        found.notes.append(f"{crossing} cross-attention calls were left alone")
    found.places = _owned(found.places, maps.runs)
    return found


class _Maps:
    """What every linear map of the layer that runs read and wrote; and how often modules ran."""

    def __init__(self) -> None:
        self.read: list[tuple[str, Tensor]] = []
        self.wrote: list[tuple[str, Tensor]] = []
        self.given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.runs: Counter[str] = Counter()

    def clear(self) -> None:
        self.read.clear()
        self.wrote.clear()
        self.given.clear()


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Maps]:
    maps, handles = _Maps(), []

    def on_run(name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            maps.runs[name] += 1
            maps.given[name] = (args, kwargs)

        return note

    def on_read(name: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor):
                maps.read.append((name, args[0]))

        return note

    def on_write(name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                maps.wrote.append((name, output))

        return note

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(on_run(name), with_kwargs=True))
        if is_linear(module):
            # Before earlier treatments change what it reads: the kernel's own output is sought.
            handles.append(module.register_forward_pre_hook(on_read(name), prepend=True))
            handles.append(module.register_forward_hook(on_write(name)))
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()


def is_linear(module: nn.Module) -> bool:
    """Whether a module has a weight matrix and is no table to look things up in."""
    weight = getattr(module, "weight", None)
    matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return matrix and not isinstance(module, nn.Embedding)


def _place(call: AttentionCall, causal: bool, batch: Batch, maps: _Maps) -> Place:
    where = f"{call.site} ({call.module})"
    if call.value is None or call.output is None:
        raise AttoscopeError(
            f"{where}: its values cannot be seen; expected a kernel that takes queries, keys and "
            "values; load the model with attn_implementation='sdpa' or 'eager'"
        )
    if call.shape[0] != len(batch):
        raise AttoscopeError(
            f"{where}: got {call.shape[0]} sequences for {len(batch)} documents (windows); "
            "expected attention over whole sequences, as a remedy compares tokens across layers"
        )
    value, heads, flipped = _value_map(call, where, maps)
    output = _output_map(call, where, maps, flipped)
    return Place(
        stack=call.site.stack, layer=call.site.layer, attention=call.module, value=value,
        output=output, owner="", heads=heads, causal=causal, time_first=flipped,
    )  # fmt: skip


def _value_map(call: AttentionCall, where: str, maps: _Maps) -> tuple[str, Heads, bool]:
    """The map that wrote the values, how its columns are laid out, and whether time is first."""
    assert call.value is not None
    value = call.value.transpose(1, 2)  # (batch, token, value head, size)
    if not bool(value.any()):
        raise AttoscopeError(
            f"{where}: all its values are 0, so the map that they come from cannot be told; "
            "expected value weights other than 0"
        )
    for name, wrote in reversed(maps.wrote):
        for flipped in (False, True):
            lead = wrote.shape[:2][::-1] if flipped else wrote.shape[:2]
            if wrote.dim() != 3 or lead != value.shape[:2]:
                continue
            rows = wrote.transpose(0, 1) if flipped else wrote
            heads = _heads(rows, value, call.shape[1])
            if heads is not None:
                return name, heads, flipped
    raise AttoscopeError(
        f"{where}: no linear map gives this attention's values as they enter the kernel (they are "
        "normalised, rotated, read from a cache, or each head has a map of its own); expected a "
        "plain value projection"
    )


def _heads(rows: Tensor, value: Tensor, heads: int) -> Heads | None:
    """The layout under which columns of `rows` are the values, or None. A column is compared whole,
    so that chance equality is out of the question."""
    groups, size = value.shape[2:]
    starts: list[int] = []
    for group in range(groups):
        same = (rows == value[:, :, group, :1]).all(0).all(0).nonzero()[:, 0].tolist()
        hits = [s for s in same if torch.equal(rows[..., s : s + size], value[:, :, group])]
        if not hits:
            return None
        # Heads with equal values lie side by side; one that the model repeats is there once.
        end = starts[-1] + size if starts else 0
        starts.append(next((s for s in hits if s >= end), hits[0]))
    # Values that the model has itself repeated to the query heads.
    distinct = list(dict.fromkeys(starts))
    repeat = groups // len(distinct)
    if starts != [start for start in distinct for _ in range(repeat)]:
        return None
    stride = distinct[1] - distinct[0] if len(distinct) > 1 else size
    if any(b - a != stride for a, b in zip(distinct, distinct[1:], strict=False)):
        return None
    if stride != size and (stride < size or rows.shape[-1] != stride * len(distinct)):
        return None
    return Heads(distinct[0], stride, size, len(distinct), heads // len(distinct))


def _output_map(call: AttentionCall, where: str, maps: _Maps, flipped: bool) -> str:
    assert call.output is not None
    output = call.output.flatten(2)
    for name, read in maps.read:
        rows = read.transpose(0, 1) if flipped and read.dim() == 3 else read
        if rows.shape == output.shape and torch.equal(rows, output):
            return name
    raise AttoscopeError(
        f"{where}: no linear map reads the heads' outputs as the kernel gives them (they are "
        "gated, normalised or reshaped before); expected a plain output projection"
    )


def _owned(places: list[Place], runs: Counter[str]) -> list[Place]:
    """The places with their owner: the innermost module around a stack's calls that ran once."""
    owners = {}
    for stack in dict.fromkeys(place.stack for place in places):
        names = [p.attention.split(".") for p in places if p.stack == stack]
        shared = []
        for parts in zip(*names, strict=False):
            if len(set(parts)) > 1:
                break
            shared.append(parts[0])
        around = [".".join(shared[:n]) for n in range(len(shared), -1, -1)]
        owners[stack] = next((name for name in around if runs[name] == 1), "")
    return [replace(place, owner=owners[place.stack]) for place in places]
