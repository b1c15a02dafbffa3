"""Where a pre-norm or post-norm model adds its residual branches, and which weights feed them.

Found by data flow and compared on a run in training mode, in which dropout tells the modules before
and after it apart; nothing depends on names of models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.remedies.junctions import owner_of, same
from attoscope.trace import Batch, Subject
from attoscope.trace.projections import projections
from attoscope.trace.sublayers import Matrix, Passing, Sublayer, sublayers, watch_sublayers


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a weight matrix, as (outputs, inputs), that play one role: `rows` as (start, end)."""

    parameter: str
    transposed: bool
    role: str
    inputs: int
    outputs: int
    rows: tuple[tuple[int, int], ...]
    variance: float = 0.0


@dataclass(frozen=True, slots=True)
class Table:
    """A weight outside the branches, its variance, and whether it has its inputs first."""

    parameter: str
    variance: float


@dataclass(frozen=True, slots=True)
class Addition:
    """One residual addition, by dotted names.

    `reader` is a module whose first argument is the stream; `tapped` is, for a "pre" norm, the
    module whose output is the branch as it is added; for "post" the norm of the sum. `norm_name`
    is the branch's norm, `final` (of the last addition) the one that reads the last sum. `number`
    counts the `count` additions of the stack from 0. `heads` are modules whose input is scaled.
    `parts` and `tables` are what is drawn; a record leaves them out.
    """

    stack: str
    layer: int
    kind: str
    norm: str
    reader: str
    tapped: str
    norm_name: str
    last: str
    number: int
    count: int
    dropout: float
    final: str | None = None
    skip: float = 1.0
    branch: float = 1.0
    folds: bool = False
    heads: tuple[tuple[str, float, str | None], ...] = ()
    parts: tuple[Part, ...] = field(default=(), repr=False)
    tables: tuple[Table, ...] = field(default=(), repr=False)

    @property
    def attention(self) -> str:
        """Where the remedy sits: the norm, as the tapped module may be one that runs its parts."""
        return self.norm_name

    @property
    def value(self) -> str:
        """What tells additions apart."""
        return self.last

    @property
    def output(self) -> str:
        """The branch's last linear map."""
        return self.last

    def record(self) -> dict[str, Any]:
        """The addition as plain data."""
        record = asdict(self) | {"heads": [list(head) for head in self.heads]}
        return {name: v for name, v in record.items() if name not in ("parts", "tables")}

    @staticmethod
    def of(record: dict[str, Any]) -> Addition:
        """The addition that `record` wrote down."""
        heads = tuple((name, scale, norm) for name, scale, norm in record["heads"])
        return Addition(**{**record, "heads": heads})


@dataclass(slots=True)
class Seen:
    """A run in training mode: first arguments and outputs of modules, in order, and additions."""

    read: list[tuple[str, Tensor, float]] = field(default_factory=list)
    wrote: list[tuple[str, Tensor, float]] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    passed: dict[tuple[str, int, int], Passing] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)

    def makers(self, tensor: Tensor) -> list[str]:
        """The modules whose output is that tensor, innermost first."""
        return _matching(self.wrote, tensor)

    def readers(self, tensor: Tensor) -> list[str]:
        """The modules whose first argument is that tensor, in the order of the run."""
        return _matching(self.read, tensor)

    def given(self, name: str) -> Tensor | None:
        """What a module read last as its first argument."""
        return next((given for other, given, _ in reversed(self.read) if other == name), None)


def _matching(noted: list[tuple[str, Tensor, float]], tensor: Tensor) -> list[str]:
    size = _size(tensor)
    return [
        name
        for name, other, own in noted
        # Sizes first: they do not depend on the order of the axes.
        if math.isclose(own, size, rel_tol=1e-4, abs_tol=1e-6) and same(other, tensor)
    ]


def _size(tensor: Tensor) -> float:
    # The 3-norm: the 2-norm of all normalised streams is the same.
    floating = tensor.is_floating_point()
    return float(torch.linalg.vector_norm(tensor.float(), 3)) if floating else math.nan


def find_additions(
    subject: Subject, batch: Batch, remedy: str
) -> tuple[list[Addition], tuple[Sublayer, ...], Seen]:
    """Every residual addition in the order of the run, its sub-layer, and what the run showed.

    Raises `AttoscopeError` for sub-layers that are neither plainly pre-norm nor post-norm, for
    layers that share weights, and where no module gives a branch as it is added.
    """
    found = sublayers(subject, batch)
    for one in found:
        _check(one, remedy)
    seen = _run(subject, batch, found)
    counts = Counter(one.site.stack for one in found)
    numbers: Counter[str] = Counter()
    reader = PartReader(subject, batch)
    places: list[Addition] = []
    for one in found:
        stack = one.site.stack
        number = numbers[stack]
        numbers[stack] += 1
        place = _addition(reader, one, seen, (number, counts[stack]))
        if any(place.last == other.last for other in places):
            raise AttoscopeError(
                f"{remedy}: {place.last} is in several layers; expected a model in which each "
                "layer has weights of its own, as their variances differ"
            )
        places.append(place)
    _check_taps(places, seen)
    return places, found, seen


def _check(one: Sublayer, remedy: str) -> None:
    if one.kind not in ("attention", "mlp"):
        raise AttoscopeError(
            f"{remedy}: got a sub-layer of kind {one.kind!r} ({one.site}); expected attention to "
            "the stream itself and MLPs one after the other, for which the variances are known"
        )
    named = one.input_norm if one.norm == "pre" else one.sum_norm
    if one.norm not in ("pre", "post") or named is None:
        raise AttoscopeError(
            f"{remedy}: got norm={one.norm!r} at {one.site}"
            f"{'' if named else ' (no norm module)'}; expected a pre-norm or a post-norm model "
            "with one norm module for each branch"
        )
    if one.skip != 1 or one.scale != 1:
        raise AttoscopeError(
            f"{remedy}: {one.site} has a factor at its residual addition already (skip {one.skip}, "
            f"branch {one.scale}); expected a plain x + f(x)"
        )
    if one.kind == "mlp" and one.activation in (None, "other"):
        raise AttoscopeError(
            f"{remedy}: the activation of {one.site} is not known; expected ReLU, GELU, SiLU or "
            "tanh"
        )
    odd = [m.name for m in one.matrices if not m.roles]
    if odd or not one.matrices:
        raise AttoscopeError(
            f"{remedy}: {odd[0] if odd else one.site} plays no role that is known; expected "
            "queries, keys, values and outputs, or the matrices of one MLP"
        )


def _run(subject: Subject, batch: Batch, found: tuple[Sublayer, ...]) -> Seen:
    seen = Seen()

    def keep(one: Passing) -> None:
        seen.passed[one.sublayer.addition] = one

    with _noted(subject.model, seen):
        watch_sublayers(subject, batch, keep, found=found, train=True)
    return seen


@contextmanager
def _noted(model: nn.Module, seen: Seen) -> Iterator[None]:
    handles = []

    def on_read(name: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            seen.started.setdefault(name, len(seen.started))
            seen.runs[name] += 1
            if args and isinstance(args[0], Tensor):
                seen.read.append((name, args[0].detach(), _size(args[0].detach())))

        return note

    def on_write(name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor):
                seen.wrote.append((name, first.detach(), _size(first.detach())))

        return note

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(on_read(name)))
        handles.append(module.register_forward_hook(on_write(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _addition(
    parts: PartReader, one: Sublayer, seen: Seen, number: tuple[int, int]
) -> Addition:
    subject = parts.subject
    passed = seen.passed[one.addition]
    makers = seen.makers(passed.branch)
    norm = one.input_norm if one.norm == "pre" else one.sum_norm
    assert norm is not None
    reader = norm if one.norm == "pre" else owner_of(one.matrices[0].name, subject.model)
    if reader not in seen.readers(passed.before):
        raise AttoscopeError(
            f"{one.site}: {reader or 'the model'} does not read the stream as it is; expected a "
            "branch and a skip that read the same x"
        )
    if one.norm == "pre" and not makers:
        raise AttoscopeError(
            f"{one.site}: no module gives the branch as it is added (it goes through dropout in a "
            "function, perhaps); expected a module; build the model without that dropout"
        )
    if one.norm == "post" and norm not in seen.readers(passed.after):
        raise AttoscopeError(
            f"{one.site}: {norm} does not read the sum as it is; expected norm(x + f(x))"
        )
    drops = [m for m in map(subject.model.get_submodule, makers) if isinstance(m, nn.Dropout)]
    readers = seen.readers(passed.after) if number[0] + 1 == number[1] else []
    return Addition(
        one.site.stack, one.site.layer, one.kind, one.norm, reader,
        _tapped(makers, seen) if one.norm == "pre" else norm, norm, one.matrices[-1].name, *number,
        dropout=drops[0].p if drops else _dropped(one, passed),
        final=next((n for n in readers if _is_norm(subject.model, n)), None),
        parts=tuple(p for m in one.matrices for p in parts.read(one, m)),
    )  # fmt: skip


def _tapped(makers: list[str], seen: Seen) -> str:
    """The outermost module that gives the branch; one that runs once, where there is one."""
    return next((name for name in reversed(makers) if seen.runs[name] == 1), makers[-1])


def _check_taps(places: list[Addition], seen: Seen) -> None:
    """A module that ends several branches may serve them in turn, and nothing else."""
    uses = Counter(place.tapped for place in places)
    for place in places:
        if seen.runs[place.tapped] > uses[place.tapped]:
            raise AttoscopeError(
                f"{place.tapped}: ran {seen.runs[place.tapped]} times for {uses[place.tapped]} "
                "residual additions; expected a module that gives branches and nothing else"
            )


def _is_norm(model: nn.Module, name: str) -> bool:
    sizes = [p.dim() for p in model.get_submodule(name).parameters()]
    return bool(sizes) and max(sizes) == 1


def _dropped(one: Sublayer, passed: Passing) -> float:
    """No module: then nothing may be dropped at all."""
    zeros = float((passed.branch[passed.valid] == 0).double().mean())
    if zeros > 0.01:
        raise AttoscopeError(
            f"{one.site}: {zeros:.0%} of the branch is 0 in training mode, by no nn.Dropout; "
            "expected dropout in a module, or none; build the model without it"
        )
    return 0.0


class PartReader:
    """Cuts matrices by role; how fused ones are laid out is found by differentiation, once for a
    stack and a shape."""

    def __init__(self, subject: Subject, batch: Batch) -> None:
        self.subject, self.batch = subject, batch
        self._rows: dict[tuple[str, str, int, int], tuple[tuple[int, int], ...]] = {}

    def read(self, one: Sublayer, matrix: Matrix) -> list[Part]:
        """The parts of one matrix."""
        shape = self.subject.model.get_parameter(matrix.name).shape
        if len(shape) != 2:
            raise AttoscopeError(
                f"{matrix.name}: got shape {tuple(shape)}; expected one matrix, not several experts"
            )
        if len(matrix.roles) == 1 or "in" in matrix.roles:
            outputs = matrix.outputs // len(matrix.roles)
            rows: Any = ((0, matrix.outputs),)
            return [_part(matrix, matrix.roles[0], outputs, rows)]
        made = []
        for role in matrix.roles:
            rows = self._found(one, matrix, role)
            made.append(_part(matrix, role, sum(end - start for start, end in rows), rows))
        return made

    def _found(self, one: Sublayer, matrix: Matrix, role: Any) -> tuple[tuple[int, int], ...]:
        key = (one.site.stack, role, matrix.inputs, matrix.outputs)
        if key not in self._rows:
            found = projections(self.subject, self.batch, one.attention, role)
            own = [part.index for part in found if matrix.name.endswith(part.name)]
            if not own:
                raise AttoscopeError(
                    f"which part of {matrix.name} makes the {role} is not known"
                )
            self._rows[key] = _ranges(torch.cat(own).unique().tolist())
        return self._rows[key]


def _part(matrix: Matrix, role: str, outputs: int, rows: Any) -> Part:
    return Part(matrix.name, matrix.transposed, role, matrix.inputs, outputs, rows)


def _ranges(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return tuple((start, end) for start, end in ranges)
