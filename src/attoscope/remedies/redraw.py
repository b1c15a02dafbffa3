"""Drawing a model's weights anew, and the way back: what is outside the branches is found here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attoscope.remedies.additions import Addition, Part, Seen, Table
from attoscope.remedies.places import module_at
from attoscope.remedies.skips import parameter_at


def input_tables(model: nn.Module, seen: Seen, first: Addition, stream: Tensor) -> list[Table]:
    """What makes the stream, with variances that give it the variance 1 in training.

    K embedding tables that are summed have `(1 - p) / K` each. Without a table, the last map
    before the first branch (patches, say) has `(1 - p) / (fan-in * mean square of its input)`.
    """
    kept = 1 - stream_dropout(model, seen, stream)
    before = [n for n, at in seen.started.items() if at < seen.started[first.reader]]
    named = [(name, model.get_submodule(name)) for name in before]
    tables = [
        f"{name}.weight"
        for name, module in named
        if isinstance(module, nn.Embedding) and module.embedding_dim == stream.shape[-1]
    ]
    if tables:
        return [Table(name, kept / len(tables)) for name in tables]
    for name, module in reversed(named):
        weight = module._parameters.get("weight")
        given = seen.given(name)
        if weight is None or weight.dim() < 2 or given is None or name == first.reader:
            continue
        if not given.is_floating_point() or isinstance(module, nn.Embedding):
            continue
        square = float(given.double().square().mean())
        fan_in = weight[0].numel()
        return [Table(f"{name}.weight", kept / (fan_in * square))] if square else []
    return []


def stream_dropout(model: nn.Module, seen: Seen, stream: Tensor) -> float:
    """The rate of the dropout that a stream has gone through before its first branch."""
    makers = [model.get_submodule(name) for name in seen.makers(stream)]
    return next((float(m.p) for m in makers if isinstance(m, nn.Dropout)), 0.0)


def output_tables(
    model: nn.Module, seen: Seen, places: list[Addition], tables: Iterable[Table]
) -> tuple[list[Table], tuple[tuple[str, float, str | None], ...]]:
    """The maps that ran after the last branch, and the heads that have an embedding's weights.

    A map of its own has `1 / inputs`; a head with the variance v of its table reads
    `1 / sqrt(v d)` times its input, given by the norm that is named with it.
    """
    inside = {part.parameter for place in places for part in place.parts}
    start = max(seen.started[place.reader] for place in places)
    shared = {id(parameter_at(model, t.parameter)): t.variance for t in tables}
    after, heads = [], []
    for name, at in seen.started.items():
        module = model.get_submodule(name)
        weight = module._parameters.get("weight")
        if at < start or weight is None or weight.dim() != 2 or f"{name}.weight" in inside:
            continue
        if id(weight) in shared:
            scale = 1 / math.sqrt(shared[id(weight)] * weight.shape[1])
            heads.append((name, scale, _norm_before(model, seen, name)))
        elif not isinstance(module, nn.Embedding) and seen.given(name) is not None:
            after.append(Table(f"{name}.weight", 1 / weight.shape[1]))
    return after, tuple(heads)


def _norm_before(model: nn.Module, seen: Seen, name: str) -> str | None:
    given = seen.given(name)
    for maker in reversed([] if given is None else seen.makers(given)):
        sizes = [p.dim() for p in module_at(model, maker).parameters()]
        if sizes and max(sizes) == 1:
            return maker
    return None


def redraw(model: nn.Module, places: list[Addition], seed: int) -> Callable[[], None]:
    """Draw all weights of the places; biases become 0 and norms the identity. Gives the way back.

    The tables come first, so that the same seed draws the same ones without the rest.
    """
    changed: dict[str, Tensor] = {}

    def keep(name: str) -> Tensor:
        parameter = parameter_at(model, name)
        changed.setdefault(name, parameter.detach().clone())
        return parameter

    def back() -> None:
        with torch.no_grad():
            for name, values in changed.items():
                parameter_at(model, name).copy_(values)

    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for table in [table for place in places for table in place.tables]:
                _draw_table(model, keep(table.parameter), table, generator)
                _no_bias(model, table.parameter, keep)
            for part in [part for place in places for part in place.parts]:
                _draw_part(keep(part.parameter), part, generator)
                _no_bias(model, part.parameter, keep)
            for name in _norms(model, places):
                _plain_norm(model, name, keep)
    except BaseException:
        back()
        raise
    return back


def _draw_table(
    model: nn.Module, weight: Tensor, table: Table, generator: torch.Generator
) -> None:
    drawn = torch.randn(weight.shape, generator=generator)
    padding = getattr(module_at(model, table.parameter.rpartition(".")[0]), "padding_idx", None)
    if padding is not None and not bool(weight[padding].any()):
        drawn[padding] = 0
    weight.copy_(drawn * math.sqrt(table.variance))


def _draw_part(parameter: Tensor, part: Part, generator: torch.Generator) -> None:
    matrix = parameter.T if part.transposed else parameter
    for start, end in part.rows:
        drawn = torch.randn(end - start, matrix.shape[1], generator=generator)
        matrix[start:end] = (drawn * math.sqrt(part.variance)).to(matrix)


def _no_bias(model: nn.Module, name: str, keep: Callable[[str], Tensor]) -> None:
    owner = name.rpartition(".")[0]
    for bias in ("bias", "in_proj_bias"):
        if isinstance(getattr(module_at(model, owner), bias, None), nn.Parameter):
            keep(f"{owner}.{bias}" if owner else bias).zero_()


def _norms(model: nn.Module, places: list[Addition]) -> list[str]:
    """The norms of the branches, the last one, and every other layer normalisation."""
    used = [name for p in places for name in (p.norm_name, p.final) if name is not None]
    more = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    return list(dict.fromkeys([*used, *more]))


def _plain_norm(model: nn.Module, name: str, keep: Callable[[str], Tensor]) -> None:
    """Gain 1, which some norms write as 1 and some as 0, and bias 0."""
    norm: Any = module_at(model, name)
    own = norm._parameters
    if own.get("bias") is not None:
        keep(f"{name}.bias").zero_()
    gain = own.get("weight")
    if gain is None:
        return
    keep(f"{name}.weight").fill_(1)
    signs = torch.ones(1, 1, gain.numel(), dtype=gain.dtype, device=gain.device)
    signs[..., ::2] = -1
    if float(norm(signs).abs().mean()) > 1.5:
        gain.zero_()
