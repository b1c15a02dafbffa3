"""Where a model's layers are, found by running it once on a little input. No list of names.

A layer (block) is a module that maps a residual stream to one of the same shape and contains an
attention call. Of several such modules around one call the innermost is taken that stands in a
list of modules of one class; else the outermost in any numbered list; else the outermost of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.trace.capture import capturing
from attoscope.trace.frames import Frame, framed
from attoscope.trace.merge import are_heads
from attoscope.trace.missed import (
    Seen,
    nothing_found,
    plain_layers,
    refuse_kernels,
    refuse_missed,
)
from attoscope.trace.rows import allowed_rows
from attoscope.trace.types import AttentionCall


@dataclass(frozen=True, slots=True)
class Stack:
    """One stack of layers: its name, the module list it lives in (`path`), and its shape.

    `layers` are the numbers of the layers that attend and `calls` their calls, in order;
    `final` names the norm after the last layer; `routes` counts how the calls were caught;
    `length` is how many tokens it had in the survey; `split` says that each head is a call.
    """

    name: str
    path: str
    layers: tuple[int, ...]
    calls: tuple[tuple[int, str], ...]
    heads: int
    key_heads: int
    width: int | None
    causal: bool
    final: str | None
    routes: tuple[tuple[str, int], ...]
    length: int
    split: bool

    def names(self, layer: int) -> tuple[str, ...]:
        """Names of a layer's calls, in the order in which they are made."""
        return tuple(call for at, call in self.calls if at == layer)


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's stacks; `blocks` and `members` name the stack of a layer module, by its name.

    `members` holds every module of a stack's list, also those without attention, because they
    count when layers are numbered. `plain` are layers in which no attention call was made;
    `readers` the stacks whose tokens are those of the text.
    """

    stacks: tuple[Stack, ...]
    blocks: dict[str, str]
    members: dict[str, str]
    finals: dict[str, str]
    time_first: bool
    plain: tuple[str, ...]
    readers: frozenset[str] = frozenset()

    def reading(self, tokens: int | None) -> Layout:
        """The same, knowing which stacks read the text, of which the survey had `tokens`.

        They have as many tokens as it had; a decoder beside an encoder reads something else.
        """
        several = len(self.stacks) > 1
        names = (
            s.name
            for s in self.stacks
            if s.length == tokens and not (several and s.name == "decoder")
        )
        return replace(self, readers=frozenset(names))

    def stack(self, name: str) -> Stack:
        """The stack of that name."""
        return next(s for s in self.stacks if s.name == name)


def survey(model: nn.Module, run: Any, batch: int, ignore: tuple[str, ...] = ()) -> Layout:
    """Run once (`run()` is the forward pass) and find the stacks, or say what is missing.

    Modules whose name starts with one of `ignore` may stay unwatched: use it for attention that
    is not softmax attention.
    """
    refuse_kernels(model)
    seen: list[Seen] = []
    entered: list[Frame] = []

    def on_call(call: AttentionCall) -> None:
        seen.append(_look(call, tuple(frames)))

    with capturing(on_call, batch) as capture:
        with framed(model, entered.append, lambda _: None) as frames:
            capture.where = lambda: frames[-1].name if frames else ""
            run()
    if not seen:
        raise AttoscopeError(nothing_found(model, capture))
    return _arrange(model, seen, entered, ignore, tuple(capture.unfinished))


def queries_of_first_call(run: Callable[[], Any], batch: int) -> int | None:
    """How many queries the first attention call of a run has; None when there is none."""
    found: list[int] = []
    with capturing(lambda call: found.append(call.shape[2]), batch):
        run()
    return found[0] if found else None


def puts_time_first(model: nn.Module) -> bool:
    """Whether one of torch's own attention modules in it expects (time, batch, width)."""
    return any(
        isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in model.modules()
    )


def _look(call: AttentionCall, path: tuple[Frame, ...]) -> Seen:
    batch, heads, queries, keys = call.shape
    first = torch.zeros(batch, 1, dtype=torch.long, device=_device(call))
    causal = keys > 1 and bool((allowed_rows(call, first).sum(-1) <= 1).all())
    groups = heads if call.key is None else call.key.shape[1]
    return Seen(path, queries, queries != keys, heads, groups, causal, call.route)


def _device(call: AttentionCall) -> torch.device:
    tensor = call.probabilities if call.query is None else call.query
    assert tensor is not None
    return tensor.device


def _arrange(
    model: nn.Module,
    seen: list[Seen],
    entered: list[Frame],
    ignore: tuple[str, ...],
    unfinished: tuple[str, ...],
) -> Layout:
    block_of = [_block(model, one) for one in seen]
    containers: dict[str, list[int]] = {}
    for i, block in enumerate(block_of):
        containers.setdefault(_container(block.name), []).append(i)
    labels = _labels(containers, seen)
    order = {path: _numbering(model, path, entered, block_of) for path in containers}
    blocks = {block.name: labels[_container(block.name)] for block in block_of}
    members = {
        frame.name: labels[path] for path in containers for frame in order[path]
    } | blocks
    finals = _finals(entered, order, labels)
    stacks = tuple(
        _stack(path, labels, seen, block_of, indices, order[path], finals)
        for path, indices in containers.items()
    )
    plain = plain_layers(entered, seen, members, blocks, ignore)
    refuse_missed(model, seen, blocks, plain, unfinished, ignore)
    by_module = {module: stack for stack, module in finals.items()}
    return Layout(stacks, blocks, members, by_module, puts_time_first(model), plain)


def _block(model: nn.Module, seen: Seen) -> Frame:
    """The frame that is the layer around a call; see the rule at the top of this file."""
    same = [f for f in seen.path if f.name and _keeps_shape(f)]
    numbered = [f for f in same if f.name.rpartition(".")[2].isdigit()]
    alike = [f for f in numbered if _homogeneous(model, _container(f.name))]
    if alike:
        return alike[-1]
    if numbered or same:
        return (numbered or same)[0]
    return seen.path[-1]


def _keeps_shape(frame: Frame) -> bool:
    before, after = frame.stream_in, frame.stream_out
    return before is not None and after is not None and before.shape == after.shape


def _homogeneous(model: nn.Module, path: str) -> bool:
    return len({type(child) for child in model.get_submodule(path).children()}) == 1


def _container(name: str) -> str:
    return name.rpartition(".")[0]


def _numbering(
    model: nn.Module, path: str, entered: list[Frame], block_of: list[Frame]
) -> list[Frame]:
    """Frames that count as layers of a stack, in the order in which they ran."""
    ids = {id(frame) for frame in block_of}
    numbered = all(
        f.name.rpartition(".")[2].isdigit() for f in block_of if _container(f.name) == path
    )
    return [
        f
        for f in entered
        if f.name
        and _container(f.name) == path
        and (id(f) in ids or (numbered and f.name.rpartition(".")[2].isdigit()))
    ] or [f for f in block_of if _container(f.name) == path][:1]


def _labels(containers: dict[str, list[int]], seen: list[Seen]) -> dict[str, str]:
    """A short name for each stack: encoder or decoder, by its path or else by causality."""
    wanted = {}
    for path, indices in containers.items():
        parts = path.split(".")
        causal = any(seen[i].causal for i in indices)
        named = [p for p in parts if p in ("encoder", "decoder")]
        wanted[path] = named[-1] if named else ("decoder" if causal else "encoder")
    repeated = {label for label, n in Counter(wanted.values()).items() if n > 1}
    return {
        path: (path.replace(".", "/") if label in repeated and path else label)
        for path, label in wanted.items()
    }


def _stack(
    path: str,
    labels: dict[str, str],
    seen: list[Seen],
    block_of: list[Frame],
    indices: list[int],
    order: list[Frame],
    finals: dict[str, str],
) -> Stack:
    position = {id(frame): i for i, frame in enumerate(order)}
    layer_of = {i: position[id(block_of[i])] for i in indices}
    split = all(
        are_heads([seen[i].path[-1].name for i in mine], [seen[i].heads for i in mine])
        for layer in set(layer_of.values())
        if (mine := [i for i in indices if layer_of[i] == layer])
    )
    calls: list[tuple[int, str]] = []
    for i, layer in layer_of.items():
        # A layer's second call that reads two sequences is cross attention, whatever their lengths.
        later = any(at == layer for at, _ in calls)
        crossing = seen[i].crossing or (later and seen[i].path[-1].two_streams)
        name = "self" if split else _call_name(crossing, calls, layer, len(labels) > 1)
        calls.append((layer, name))
    stream = block_of[indices[0]].stream_in
    name = labels[path]
    return Stack(
        name=name,
        path=path,
        layers=tuple(dict.fromkeys(layer for layer, _ in calls)),
        calls=tuple(calls),
        heads=len(calls) // len(set(layer_of.values()))
        if split
        else max(seen[i].heads for i in indices),
        key_heads=len(calls) // len(set(layer_of.values()))
        if split
        else max(seen[i].key_heads for i in indices),
        width=stream.shape[-1] if stream is not None else None,
        causal=any(seen[i].causal for i in indices),
        final=finals.get(name),
        routes=tuple(sorted(Counter(seen[i].route for i in indices).items())),
        length=seen[indices[0]].queries,
        split=split,
    )


def _call_name(crossing: bool, before: list[tuple[int, str]], layer: int, several: bool) -> str:
    """`self`, `cross`, or a numbered name when a layer makes more calls than that."""
    taken = [call for at, call in before if at == layer]
    kind = "cross" if crossing or (several and "self" in taken) else "self"
    if kind not in taken:
        return kind
    return f"{kind}{sum(call.startswith(kind) for call in taken) + 1}"


def _finals(
    entered: list[Frame], order: dict[str, list[Frame]], labels: dict[str, str]
) -> dict[str, str]:
    """The norm after each stack: the module that takes the last layer's output unchanged in."""
    last = {labels[path]: frames[-1] for path, frames in order.items() if frames}
    found: dict[str, str] = {}
    for name, block in last.items():
        for frame in entered:
            takes = frame.stream_in is not None and frame.stream_in is block.stream_out
            if any(frame.name.startswith(f"{path}.") for path in labels if path):
                continue
            matrices = any(p.dim() > 1 for p in frame.module.parameters())
            if takes and not matrices and _keeps_shape(frame) and _is_norm(frame.module):
                found[name] = frame.name
                break
    return found


def _is_norm(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
