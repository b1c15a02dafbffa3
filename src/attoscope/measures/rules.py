"""From readings to findings: rules are data, declared beside the measure that they read.

A rule says which cells of a reading are at fault (`fires`), how cells become one finding
(`scope`), and what to say. Cells of neighbouring layers with the same fault become one finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attoscope.findings import Evidence, Finding, Remedy, Severity, rank
from attoscope.measures.base import Array, Measure, Reading, Witness, WitnessKey
from attoscope.measures.places import Place, join, parse, phrase
from attoscope.measures.words import Number, Plural, heads_phrase

# layer: sites at which most heads are at fault; head: single heads, all of a stack together;
# run: neighbouring points; first: the first point only, since all later ones inherit the fault.
Scope = Literal["layer", "head", "run", "first"]
# A layer has a fault when at least this share of its heads has it.
MAJORITY = 0.5
_MOST_EVIDENCE = 3
_MOST_NAMED = 4


@dataclass(frozen=True)
class Book:
    """All readings by name, with the witnesses and module names that go with them."""

    readings: Mapping[str, Reading]
    witnesses: Mapping[WitnessKey, Witness]
    modules: Mapping[str, str]

    def values(self, name: str, like: Reading | None = None) -> Array:
        """Values of a reading; with `like`, at the labels of that reading (NaN where none)."""
        reading = self.readings[name]
        if like is None or reading.coords == like.coords:
            return reading.values
        dim = reading.dims[0]
        index = {label: i for i, label in enumerate(reading.coords[dim])}
        values = np.full((len(like.coords[like.dims[0]]), *reading.values.shape[1:]), np.nan)
        for i, label in enumerate(like.coords[like.dims[0]]):
            if label in index:
                values[i] = reading.values[index[label]]
        return values

    def null(self, name: str) -> Array:
        """The null of a reading, NaN where it has none."""
        reading = self.readings[name]
        return np.full(reading.values.shape, np.nan) if reading.null is None else reading.null


Fires = Callable[[Book], NDArray[np.bool_]]


@dataclass(frozen=True)
class Rule:
    """One rule. `fires` gives a boolean for each cell of `reading`; its docstring says why.

    `sentence` may hold {where}, {heads}, {count}, {measured}, {null}, {low}, {high}, {extra},
    and the witness's {document}, {token}, {channel}; a word pair {n:is|are} follows the
    number of things. `code` is a string.Template: $modules is the list of module names,
    $heads a dict of heads by module, $channel the witness's channel. `shown` names the kind
    of witness; `unless` the rules whose sites this one skips.
    """

    id: str
    title: str
    severity: Severity
    reading: str
    fires: Fires
    scope: Scope
    worst: Literal["largest", "smallest"]
    sentence: str
    paper: str
    remedy: str
    code: str
    shown: str = ""
    unless: tuple[str, ...] = ()
    extra: Callable[[Book, Sequence[int]], str] | None = None


@dataclass(frozen=True)
class _Group:
    """Cells that become one finding: rows of the reading, and its heads when it has any."""

    rows: tuple[int, ...]
    cells: tuple[tuple[int, ...], ...]
    later: int = 0


@dataclass
class _Fired:
    """Which places each rule has already spoken of."""

    places: dict[str, set[str]] = field(default_factory=dict)

    def spoken(self, rules: Sequence[str]) -> set[str]:
        return set().union(*(self.places.get(rule, set()) for rule in rules))


def find(rules: Sequence[Rule], book: Book) -> list[Finding]:
    """All findings, most severe first; rules whose reading is missing are passed over."""
    fired = _Fired()
    findings: list[Finding] = []
    for rule in rules:
        reading = book.readings.get(rule.reading)
        if reading is None or reading.values.size == 0:
            continue
        cells = np.asarray(rule.fires(book), bool)
        skipped = fired.spoken(rule.unless)
        places = [parse(str(label)) for label in reading.coords[reading.dims[0]]]
        for i, place in enumerate(places):
            if place.label in skipped:
                cells[i] = False
        for group in _groups(rule, cells, places, reading):
            finding = _finding(rule, reading, group, places, book)
            fired.places.setdefault(rule.id, set()).update(finding.sites)
            findings.append(finding)
    return sorted(findings, key=lambda f: -rank(f.severity))


def findings_of(measures: Sequence[Measure], readings: Sequence[Reading]) -> list[Finding]:
    """Findings of measures that have been read, with nulls joined to the readings or not."""
    witnesses: dict[WitnessKey, Witness] = {}
    modules: dict[str, str] = {}
    for measure in measures:
        witnesses.update(measure.witnesses)
        modules = {**measure.modules, **modules}
    book = Book({r.name: r for r in readings}, witnesses, modules)
    return find([rule for measure in measures for rule in measure.rules], book)


def _groups(
    rule: Rule, cells: NDArray[np.bool_], places: Sequence[Place], reading: Reading
) -> list[_Group]:
    if rule.scope == "layer":
        present = np.isfinite(reading.values).sum(1)
        rows = np.flatnonzero((cells.sum(1) >= MAJORITY * present) & cells.any(1))
        runs = _runs(rows, places)
        return [_Group(run, _cells(cells, run)) for run in runs]
    if rule.scope == "head":
        tracks: dict[str, list[int]] = {}
        for row in np.flatnonzero(cells.any(1)):
            tracks.setdefault(places[int(row)].track, []).append(int(row))
        return [_Group(tuple(run), _cells(cells, run)) for run in tracks.values()]
    if rule.scope == "run":
        runs = _runs(np.flatnonzero(cells), places)
        return [_Group(run, tuple((i,) for i in run)) for run in runs]
    rows = np.flatnonzero(cells)
    return [_Group((int(i),), ((int(i),),), len(rows) - 1) for i in rows[:1]]


def _cells(cells: NDArray[np.bool_], rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple((int(i), int(h)) for i in rows for h in np.flatnonzero(cells[i]))


def _runs(rows: NDArray[np.intp], places: Sequence[Place]) -> list[tuple[int, ...]]:
    """Rows cut into runs of neighbours: next to each other among the rows of one track."""
    order: dict[str, list[int]] = {}
    for i, place in enumerate(places):
        order.setdefault(place.track, []).append(i)
    runs: list[tuple[int, ...]] = []
    chosen = {int(row) for row in rows}
    for track in order.values():
        run: list[int] = []
        for i in track:
            if i in chosen:
                run.append(i)
            elif run:
                runs.append(tuple(run))
                run = []
        if run:
            runs.append(tuple(run))
    return runs


def _finding(
    rule: Rule, reading: Reading, group: _Group, places: Sequence[Place], book: Book
) -> Finding:
    values = np.array([reading.values[cell] for cell in group.cells])
    which = int(np.nanargmax(values) if rule.worst == "largest" else np.nanargmin(values))
    cell = group.cells[which]
    sites = tuple(places[i].label for i in group.rows)
    heads = tuple((places[c[0]].label, c[1]) for c in group.cells if len(c) > 1)
    interval = None
    if reading.low is not None and reading.high is not None:
        low, high = float(reading.low[cell]), float(reading.high[cell])
        interval = (low, high) if np.isfinite([low, high]).all() else None
    null = None if reading.null is None else float(reading.null[cell])
    null = None if null is None or not np.isfinite(null) else null
    shown = _shown(rule, group, places, book, cell)
    channel = shown[0][1].channel if shown else None
    return Finding(
        id=rule.id,
        severity=rule.severity,
        title=rule.title,
        sentence=_sentence(
            rule, reading, group, places, book, float(values[which]), null, shown
        ),
        sites=sites,
        heads=heads,
        reading=reading.name,
        measured=float(values[which]),
        unit=reading.unit,
        interval=interval,
        null=null,
        null_meaning="" if null is None else reading.null_meaning,
        evidence=tuple(_evidence(key, witness) for key, witness in shown),
        paper=rule.paper,
        remedy=Remedy(rule.remedy, _code(rule, group, places, book, channel)),
    )


def _shown(
    rule: Rule,
    group: _Group,
    places: Sequence[Place],
    book: Book,
    worst: tuple[int, ...],
) -> list[tuple[WitnessKey, Witness]]:
    """Witnesses of the finding's cells, that of the worst one first."""
    found = []
    for cell in (worst, *group.cells):
        key = (rule.shown, places[cell[0]].label, cell[1] if len(cell) > 1 else -1)
        witness = book.witnesses.get(key)
        if witness is not None and (key, witness) not in found:
            found.append((key, witness))
    return found[:_MOST_EVIDENCE]


def _evidence(key: WitnessKey, witness: Witness) -> Evidence:
    return Evidence(
        site=key[1],
        value=witness.value if np.isfinite(witness.value) else None,
        head=key[2] if key[2] >= 0 else None,
        document=witness.document,
        position=witness.position,
        token=witness.token,
        chosen_position=witness.chosen,
        chosen_token=witness.chosen_token,
    )


def _sentence(
    rule: Rule,
    reading: Reading,
    group: _Group,
    places: Sequence[Place],
    book: Book,
    measured: float,
    null: float | None,
    shown: Sequence[tuple[WitnessKey, Witness]],
) -> str:
    one_track = len({place.track for place in places}) == 1
    here = [places[i] for i in group.rows]
    present = int(np.isfinite(reading.values[list(group.rows)]).sum())
    witness = shown[0][1] if shown else None
    number = len(group.cells) if reading.values.ndim > 1 else len(group.rows)
    text = rule.sentence.format(
        where=phrase(here, one_track),
        heads=heads_phrase(len(group.cells), present),
        named=_named(group, places) if reading.values.ndim > 1 else "",
        count=len(group.rows),
        n=Plural(number),
        later=_later(group.later),
        measured=Number(measured),
        null=Number(float("nan") if null is None else null),
        channel="" if witness is None else witness.channel,
        token=_token(witness),
        extra="" if rule.extra is None else rule.extra(book, group.rows),
    )
    return text[:1].upper() + text[1:]


def _named(group: _Group, places: Sequence[Place]) -> str:
    """ "layer 3 head 5 and layer 4 head 0", the first few when there are many."""
    names = [f"{places[c[0]].words} head {c[1]}" for c in group.cells]
    if len(names) <= _MOST_NAMED:
        return join(names)
    return f"{', '.join(names[:_MOST_NAMED])} and {len(names) - _MOST_NAMED} more"


def _later(count: int) -> str:
    """How many later points inherit the fault."""
    if count == 0:
        return ""
    return f", and all {count} points after it" if count > 1 else ", and the point after it"


def _token(witness: Witness | None) -> str:
    if witness is None:
        return "one token"
    where = "the first token" if witness.first else f"the token at position {witness.position}"
    return where if witness.token is None else f"{where}, “{witness.token.strip() or ' '}”,"


def _code(
    rule: Rule, group: _Group, places: Sequence[Place], book: Book, channel: int | None
) -> str:
    """The rule's code with the names of the model's own modules put in."""
    modules: list[str] = []
    heads: dict[str, list[int]] = {}
    for cell in group.cells:
        module = book.modules.get(places[cell[0]].label, "")
        if module and module not in modules:
            modules.append(module)
        if len(cell) > 1:
            heads.setdefault(module, []).append(cell[1])
    names = {"modules": repr(modules), "heads": repr(heads), "channel": repr(channel)}
    return Template(rule.code).safe_substitute(names)
