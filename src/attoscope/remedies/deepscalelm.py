"""DeepScaleLM: weight variances and residual factors that keep variance and gradients near 1.

`x <- lambda x + beta f(x)` at every residual addition, `beta^2 = k / N^alpha`, `lambda^2 = 1 -
beta^2`, and branches that have the variance 1 at the start. Source: arXiv 2403.09635.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.moments.measured import token_correlation
from attoscope.moments.unit_variance import (
    Branch,
    entering_correlations,
    residual_factors,
    weight_variance,
)
from attoscope.remedies.additions import Addition, Seen, find_additions
from attoscope.remedies.admin import profile_batch, refuse_factors
from attoscope.remedies.finding import Found
from attoscope.remedies.kinds import Built, Kind, check_choice, check_number
from attoscope.remedies.redraw import input_tables, output_tables, redraw, stream_dropout
from attoscope.remedies.residual_scales import build_scales, with_folds
from attoscope.trace import Batch, Subject
from attoscope.trace.sublayers import Passing, Sublayer, watch_sublayers

PAPER_R0 = 0.221


class DeepScaleKind(Kind):
    name = "deepscalelm"
    place_type: ClassVar[Any] = Addition
    counted: ClassVar[str] = "residual additions"
    defaults: ClassVar[dict[str, Any]] = {
        "count": "layers", "k": 2.0, "alpha": 1.0, "r0": None, "reinitialise": True, "seed": 0,
    }  # fmt: skip

    def check(self, options: dict[str, Any]) -> None:
        check_choice("count", options["count"], ("layers", "sublayers"))
        check_choice("reinitialise", options["reinitialise"], (True, False))
        for name in ("k", "alpha"):
            check_number(name, options[name], 0.0)
        if options["r0"] is not None:
            check_number("r0", options["r0"])
            if not 0 < options["r0"] <= 1:
                raise AttoscopeError(
                    f"r0: got {options['r0']}; expected a correlation above 0 and at most 1, or "
                    "None to measure it on the data"
                )
        if not isinstance(options["seed"], int):
            raise AttoscopeError(f"seed: got {options['seed']!r}; expected a whole number")

    def find(self, subject: Subject, batch: Batch, data: Any, options: dict[str, Any]) -> Found:
        refuse_factors(subject.model, self.name)
        found_places, found, seen = find_additions(subject, batch, self.name)
        places = _with_factors(found_places, options)
        places = _with_tables(subject, places, found, seen)
        shown = None if data is None else profile_batch(subject, data)
        starts = _starts(subject, shown, places, found, seen, options)
        places = _with_variances(subject, batch, places, found, starts)
        places = with_folds(subject, batch, places)
        made: Any = places
        return Found(made, _notes(places, starts, shown is not None, options))

    def initialise(
        self, model: nn.Module, places: list[Any], options: dict[str, Any]
    ) -> Callable[[], None]:
        if not options["reinitialise"]:
            return lambda: None
        return redraw(model, places, options["seed"])

    def build(self, model: nn.Module, places: list[Any], options: dict[str, Any]) -> Built:
        return build_scales(model, places)


def _with_factors(places: list[Addition], options: dict[str, Any]) -> list[Addition]:
    """Each stack's lambda and beta, from how many layers or sub-layers it has."""
    factors = {}
    for stack in {place.stack for place in places}:
        own = [place for place in places if place.stack == stack]
        layers = len({place.layer for place in own})
        number = layers if options["count"] == "layers" else len(own)
        factors[stack] = residual_factors(number, options["k"], options["alpha"])
    return [
        replace(place, skip=factors[place.stack][0], branch=factors[place.stack][1])
        for place in places
    ]


def _with_tables(
    subject: Subject, places: list[Addition], found: tuple[Sublayer, ...], seen: Seen
) -> list[Addition]:
    """The first addition of a stack holds what makes its stream, the very first the heads."""
    made, taken = list(places), set()
    for i, (place, one) in enumerate(zip(places, found, strict=True)):
        if place.number:
            continue
        tables = input_tables(subject.model, seen, place, seen.passed[one.addition].before)
        fresh = tuple(table for table in tables if table.parameter not in taken)
        taken |= {table.parameter for table in fresh}
        made[i] = replace(place, tables=fresh)
    tables = [table for place in made for table in place.tables]
    after, heads = output_tables(subject.model, seen, made, tables)
    made[0] = replace(made[0], tables=(*made[0].tables, *after), heads=heads)
    return made


@dataclass(frozen=True, slots=True)
class Start:
    """A stack's token correlation before its dropout, the rate of that, tokens (None: unknown)."""

    r0: float
    dropout: float
    length: int | None


def _starts(
    subject: Subject,
    shown: Batch | None,
    places: list[Addition],
    found: tuple[Sublayer, ...],
    seen: Seen,
    options: dict[str, Any],
) -> dict[str, Start]:
    """r0 of each stack: given, or measured with new tables on the data, or the paper's."""
    measured = {} if shown is None else _measured(subject, shown, places, found, options)
    starts = {}
    for place, one in zip(places, found, strict=True):
        if place.number:
            continue
        rate = stream_dropout(subject.model, seen, seen.passed[one.addition].before)
        r0, length = measured.get(place.stack, (PAPER_R0, None))
        starts[place.stack] = Start(options["r0"] or r0, rate, length)
    return starts


def _measured(
    subject: Subject,
    shown: Batch,
    places: list[Addition],
    found: tuple[Sublayer, ...],
    options: dict[str, Any],
) -> dict[str, tuple[float, int]]:
    """(r0, tokens) of each stack, with the tables that are going to be in the model."""
    measured: dict[str, tuple[float, int]] = {}

    def visit(one: Passing) -> None:
        stack = one.sublayer.site.stack
        if stack not in measured:
            length = max(1, round(float(one.valid.sum(1).double().mean())))
            r = token_correlation(one.before, one.valid)
            measured[stack] = (min(max(r, 0.0), 1.0), length) if r == r else (1.0, 1)

    only = [replace(place, parts=()) for place in places]
    back = redraw(subject.model, only, options["seed"]) if options["reinitialise"] else None
    try:
        watch_sublayers(subject, shown, visit, found=found)
    finally:
        if back is not None:
            back()
    return measured


def _with_variances(
    subject: Subject,
    batch: Batch,
    places: list[Addition],
    found: tuple[Sublayer, ...],
    starts: dict[str, Start],
) -> list[Addition]:
    layout = subject.layout(batch)
    made = list(places)
    for stack, start in starts.items():
        own = [i for i, place in enumerate(places) if place.stack == stack]
        causal = layout.stack(stack).causal
        branches = [
            Branch(
                places[i].kind, places[i].dropout, found[i].activation or "relu",
                found[i].gated, causal, start.length, found[i].matrices[0].inputs,
            )
            for i in own
        ]  # fmt: skip
        first = places[own[0]]
        entering = start.r0 * (1 - start.dropout)
        r = entering_correlations(branches, entering, first.skip, first.branch)
        for i, one, own_r in zip(own, branches, r, strict=False):
            made[i] = replace(places[i], parts=tuple(
                replace(p, variance=weight_variance(p.role, p.inputs, p.outputs, own_r, one))
                for p in places[i].parts
            ))  # fmt: skip
    return made


def _notes(
    places: list[Addition], starts: dict[str, Start], measured: bool, options: dict[str, Any]
) -> list[str]:
    if not options["reinitialise"]:
        return ["the weights are as they were"]
    values = ", ".join(f"{start.r0:.3f} ({stack})" for stack, start in starts.items())
    how = "measured on this data" if measured else "the paper's; give data to measure it"
    how = "given" if options["r0"] is not None else how
    tables = [table.parameter for place in places for table in place.tables]
    drawn = ", ".join(tables) or "none: the input enters the stream as it is"
    return [
        "all weights of the branches were drawn anew, biases set to 0 and norms to gain 1; what "
        "the model had learnt is gone",
        f"token correlation at the start: {values}, {how}",
        f"drawn outside the branches: {drawn}",
    ]
