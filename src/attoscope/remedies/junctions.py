"""Where a post-norm model adds a residual branch to its stream: the modules around each addition.

`norm(x + f(x))`: a junction names the norm, a module that reads x (the first linear map of f), the
last linear map of f, and the norm that made x. Found by data flow and compared on a run; nothing
depends on names of models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.trace import Batch, Subject
from attoscope.trace.frames import undisturbed
from attoscope.trace.sublayers import Matrix, Passing, Sublayer, sublayers, watch_sublayers


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix of a branch: its parameter, whether it is stored as (inputs, outputs), its roles.

    The first `stream` of its outputs are made of the stream as it is: none of the last matrix's,
    of a fused cross-attention those of the queries alone.
    """

    parameter: str
    transposed: bool
    roles: tuple[str, ...]
    stream: int


@dataclass(frozen=True, slots=True)
class Junction:
    """One residual addition of a post-norm stack, by dotted names.

    `last` is the weight of the branch's last linear map, `before` the norm that made the stream
    (None where none did), `weights` all matrices of the branch. `count` additions are in the
    stack. `omega` is the factor that the skip starts with; `folds` tells into what a factor can be
    written exactly: the "branch" (one number), the "norm" before (one per feature).
    """

    stack: str
    layer: int
    kind: str
    norm: str
    reader: str
    last: str
    before: str | None
    weights: tuple[Weight, ...]
    count: int
    omega: float = 1.0
    folds: tuple[str, ...] = ()

    @property
    def attention(self) -> str:
        """Where a remedy sits: the norm."""
        return self.norm

    @property
    def value(self) -> str:
        """What tells junctions apart."""
        return self.norm

    @property
    def output(self) -> str:
        """The branch's last linear map."""
        return self.last

    def record(self) -> dict[str, Any]:
        """The junction as plain data."""
        weights = [asdict(w) | {"roles": list(w.roles)} for w in self.weights]
        return asdict(self) | {"weights": weights, "folds": list(self.folds)}

    @staticmethod
    def of(record: dict[str, Any]) -> Junction:
        """The junction that `record` wrote down."""
        weights = tuple(Weight(**w | {"roles": tuple(w["roles"])}) for w in record["weights"])
        folds = tuple(record["folds"])
        return Junction(**{**record, "weights": weights, "folds": folds})


def find_junctions(subject: Subject, batch: Batch, remedy: str) -> list[Junction]:
    """Every residual addition, in the order in which they ran.

    Raises `AttoscopeError` for a model that is not post-norm throughout, and for one in which no
    module reads the stream itself.
    """
    found = sublayers(subject, batch)
    for one in found:
        _check_norm(one, remedy)
    streams, sums = _passed(subject, batch, found)
    with undisturbed(subject.model), _seen(subject.model) as seen:
        subject.run(batch)
    counts = Counter(one.site.stack for one in found)
    made: list[Junction] = []
    previous: dict[str, str] = {}
    runs: Counter[str] = Counter()
    for one, stream, total in zip(found, streams, sums, strict=True):
        assert one.sum_norm is not None
        reader = owner_of(one.matrices[0].name, subject.model)
        run = runs[one.sum_norm]
        runs[one.sum_norm] += 1
        _check_seen(one, seen.read, reader, run, stream)
        _check_seen(one, seen.read, one.sum_norm, run, total)
        before = previous.get(one.site.stack) or _maker_of(stream, seen.wrote)
        previous[one.site.stack] = one.sum_norm
        made.append(_junction(one, reader, before, counts[one.site.stack]))
    # A norm that runs for several additions can take the factor of none of them.
    return [replace(one, before=None) if runs[one.norm] > 1 else one for one in made]


def _junction(one: Sublayer, reader: str, before: str | None, count: int) -> Junction:
    assert one.sum_norm is not None
    weights = tuple(
        Weight(matrix.name, matrix.transposed, matrix.roles, _of_stream(matrix, one))
        for matrix in one.matrices
    )
    return Junction(
        one.site.stack, one.site.layer, one.kind, one.sum_norm, reader, one.matrices[-1].name,
        before, weights, count,
    )  # fmt: skip


def _of_stream(matrix: Matrix, one: Sublayer) -> int:
    if matrix is one.matrices[-1]:
        return 0
    if one.kind != "cross":
        return matrix.outputs
    return matrix.outputs // len(matrix.roles) if "query" in matrix.roles else 0


def _check_norm(one: Sublayer, remedy: str) -> None:
    if one.norm != "post":
        kind = "no norm" if one.norm == "none" else f"a {one.norm}-norm"
        raise AttoscopeError(
            f"{remedy}: got {kind} sub-layer ({one.site}); expected a post-norm model, in which "
            "every residual sum goes through a norm; a pre-norm stack needs no such factor, as "
            "its branches already have an ever smaller share of the stream"
        )
    if one.sum_norm is None:
        raise AttoscopeError(
            f"{remedy}: the sum of {one.site} is normalised by a function; expected a module, "
            "such as nn.LayerNorm, on which a factor can act"
        )


class _Seen:
    """First arguments of modules by name and run, and outputs of norms, in order."""

    def __init__(self) -> None:
        self.read: dict[tuple[str, int], Tensor] = {}
        self.wrote: list[tuple[str, Tensor]] = []
        self.runs: Counter[str] = Counter()


@contextmanager
def _seen(model: nn.Module) -> Iterator[_Seen]:
    seen, handles = _Seen(), []

    def on_read(name: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor):
                seen.read[name, seen.runs[name]] = args[0]
            seen.runs[name] += 1

        return note

    def on_write(name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.wrote.append((name, output))

        return note

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(on_read(name)))
        sizes = [p.dim() for p in module.parameters()]
        if sizes and max(sizes) == 1:
            handles.append(module.register_forward_hook(on_write(name)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _passed(
    subject: Subject, batch: Batch, found: tuple[Sublayer, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """The stream and the sum of every addition, in the order of `found`."""
    kept: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}

    def visit(one: Passing) -> None:
        kept[one.sublayer.addition] = (one.before, one.after)

    watch_sublayers(subject, batch, visit, found=found)
    pairs = [kept[one.addition] for one in found]
    return [before for before, _ in pairs], [after for _, after in pairs]


def same(given: Tensor | None, expected: Tensor) -> bool:
    """Equal to rounding: a watched run may take another kernel than a plain one."""
    if given is None or given.numel() != expected.numel():
        return False
    given = given[None] if given.dim() == 2 else given
    turned = given.transpose(0, 1) if given.shape != expected.shape else given
    close = 1e-2 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-4
    both = (given, turned)
    return any(
        x.shape == expected.shape and torch.allclose(x, expected, rtol=close, atol=close)
        for x in both
    )


def _check_seen(
    one: Sublayer, read: dict[tuple[str, int], Tensor], name: str, run: int, expected: Tensor
) -> None:
    if not same(read.get((name, run)), expected):
        what = "sum" if name == one.sum_norm else "stream"
        raise AttoscopeError(
            f"{one.site}: {name or 'the model'} does not read the {what} of this sub-layer as it "
            "is (something is added to it or changes it before); expected a plain "
            "norm(x + f(x)), in which the skip and the branch read the same x"
        )


def _maker_of(stream: Tensor, wrote: list[tuple[str, Tensor]]) -> str | None:
    """The norm whose output the stream is, up to dropout."""
    return next((name for name, output in wrote if same(output, stream)), None)


def owner_of(parameter: str, model: nn.Module) -> str:
    """The module that is called with the input of a weight, by the weight's dotted name."""
    name = parameter.rpartition(".")[0]
    # The projection of torch's own attention is no module that is called.
    parent = name.rpartition(".")[0]
    holder = model.get_submodule(parent) if name else model
    return parent if isinstance(holder, nn.MultiheadAttention) and _plain(holder) else name


def _plain(module: nn.MultiheadAttention) -> bool:
    return getattr(module, "in_proj_weight", None) is not None
