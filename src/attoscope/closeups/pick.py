"""The way down to the text: rows of attention that show findings, and one row of every head.

They are picked during one more pass over the first documents, so that memory is that of one
layer; the same run gives the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from attoscope.closeups.places import PLACES, numbers
from attoscope.closeups.rows import (
    DOCUMENTS,
    RIVALS,
    Block,
    Score,
    blocks,
    criterion,
    telling,
)
from attoscope.closeups.texts import Texts
from attoscope.diagnosis import Closeup, Mark, Text
from attoscope.findings import Finding
from attoscope.measures.points import points
from attoscope.measuring import Measurement, take
from attoscope.trace import AttentionCall, Batch, Layer, Subject, watch
from attoscope.trace.subject import head_of

TOKENS = 48
PER_FINDING = 3
TELLING = 3


def closeups(
    subject: Subject, measurement: Measurement, findings: tuple[Finding, ...]
) -> tuple[Closeup, ...]:
    """A few telling rows, the rows and places that show each finding, and one row of each head.

    A head's own row is the one that puts most attention on a distant content token (neither the
    query, a neighbour, the first token nor a special one); whatever the row chooses is shown.
    """
    batch = measurement.first
    if batch is None:
        return ()
    short = _short(subject, batch)
    picker = _Picker(Texts(subject, measurement, short), findings, _measured(measurement))
    watch(subject, short, picker.visit)
    return picker.all()


def _short(subject: Subject, batch: Batch) -> Batch:
    """The first documents, cut. A tuple of inputs stays whole: what counts documents in it is
    not known."""
    inputs = batch.inputs
    if isinstance(inputs, dict | Tensor):
        floats = isinstance(inputs, Tensor) and inputs.dim() == 3
        axis = subject.batch_axis(inputs) if floats and isinstance(inputs, Tensor) else 0
        batch = take(batch, list(range(min(DOCUMENTS, len(batch)))), axis)
    return head_of(batch, DOCUMENTS, TOKENS)


def _measured(measurement: Measurement) -> frozenset[str]:
    """The attention calls that were measured: with a span of layers, not all."""
    return frozenset(site for one in measurement.real for site in one.modules)


@dataclass(slots=True)
class _Best:
    """The best row so far by one criterion; `distant`: it chooses a distant content token."""

    score: float = -math.inf
    closeup: Closeup | None = None
    distant: bool = False

    def mark(self, finding: int, why: str) -> None:
        """Say which finding the row shows, and how."""
        if self.closeup is not None:
            self.closeup = replace(self.closeup, finding=finding, why=why)


@dataclass(slots=True)
class _Picker:
    """Looks at every layer as it goes by, and keeps the rows and places to show."""

    texts: Texts
    findings: tuple[Finding, ...]
    measured: frozenset[str]
    heads: dict[tuple[str, int], _Best] = field(default_factory=dict)
    # By finding, site and head (−1 for a place in the stream), in the order of `_wanted`.
    shown: dict[tuple[int, str, int], _Best] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, finding in enumerate(self.findings):
            for site, head in _wanted(finding):
                self.shown[number, site, head] = _Best()

    def visit(self, layer: Layer, batch: Batch) -> None:
        for call in layer.calls:
            if not self.measured or str(call.site) in self.measured:
                self._rows(call, layer, batch)
        self._places(layer, batch)

    def all(self) -> tuple[Closeup, ...]:
        own = [best for best in self.heads.values() if best.closeup is not None]
        distant = _found(best for best in own if best.distant)
        return (*_telling(list(distant)), *_found(self.shown.values()), *_found(own))

    def _rows(self, call: AttentionCall, layer: Layer, batch: Batch) -> None:
        site, head_count = str(call.site), call.shape[1]
        wanted = [key for key in self.shown if key[1] == site and 0 <= key[2] < head_count]
        for block in blocks(call, layer):
            for head in range(head_count):
                best = self.heads.setdefault((site, head), _Best())
                self._keep(best, telling(block, head), block, head, batch)
            for key in wanted:
                number, _, head = key
                what, score = criterion(self.findings[number].reading)
                if self._keep(self.shown[key], score(block, head), block, head, batch):
                    self.shown[key].mark(number, f"Of the rows looked at, the one {what}.")

    def _keep(self, best: _Best, score: Score, block: Block, head: int, batch: Batch) -> bool:
        """Whether a row of the block is better than the best one; it then takes its place."""
        flat = int(score.flatten().argmax())
        value = float(score.flatten()[flat])
        if not value > best.score:
            return False
        sequence, row = divmod(flat, score.shape[1])
        text, keys = self.texts.of_call(block.call, block.layer, batch, sequence)
        marks, rest = block.marks(sequence, head, row)
        query = int(block.positions[sequence, row])
        best.score = value
        best.distant = bool(marks) and block.is_distant(sequence, query, marks[0].position)
        best.closeup = Closeup(str(block.call.site), head, text, query, marks, rest, keys)
        return True

    def _places(self, layer: Layer, batch: Batch) -> None:
        named = {site for _, site, head in self.shown if head < 0}
        if not any(site.startswith(f"{layer.stack}.") for site in named):
            return
        for point in points(layer, torch.float32):
            for key, best in self.shown.items():
                if key[1:] != (point.name, -1):
                    continue
                reading = self.findings[key[0]].reading
                found = numbers(reading, layer, point)
                if found is not None:
                    best.closeup = self._place(layer, batch, point.name, found)
                    best.mark(key[0], f"The number of a token: {PLACES[reading][0]}.")

    def _place(
        self, layer: Layer, batch: Batch, name: str, found: Float[Tensor, "sequence token"]
    ) -> Closeup:
        """The tokens with the largest numbers, of the document that has the largest."""
        few = found[:DOCUMENTS].double().nan_to_num(nan=-math.inf)
        sequence = int(few.amax(1).argmax())
        order = few[sequence].argsort(descending=True, stable=True)[: RIVALS + 1]
        marks = tuple(
            Mark(int(i), float(few[sequence, i])) for i in order if few[sequence, i] > -math.inf
        )
        text = self.texts.of(layer.stack, batch, sequence, *found.shape)
        return Closeup(name, None, text, None, marks)


def _wanted(finding: Finding) -> list[tuple[str, int]]:
    """Heads to show of a finding, those of its evidence first; else places (head −1)."""
    named = [(e.site, e.head) for e in finding.evidence]
    if finding.heads:
        heads = [(s, h) for s, h in named if h is not None] + list(finding.heads)
        return list(dict.fromkeys(heads))[:PER_FINDING]
    ends = [*(s for s, _ in named), *finding.sites[:1], *finding.sites[-1:]]
    return [(site, -1) for site in dict.fromkeys(ends)][:PER_FINDING]


def _found(best: Iterable[_Best]) -> Iterator[Closeup]:
    return (one.closeup for one in best if one.closeup is not None)


def _telling(distant: list[Closeup]) -> Iterator[Closeup]:
    """The most decided choices of a distant token, each of another query or chosen token."""
    kept: set[tuple[Text, int | None, int]] = set()
    for one in sorted(distant, key=lambda c: -c.marks[0].value):
        spot = (one.text, one.query, one.marks[0].position)
        if len(kept) < TELLING and spot not in kept:
            kept.add(spot)
            yield replace(one, why=_why(one))


def _why(one: Closeup) -> str:
    assert one.query is not None
    chosen = one.marks[0]
    asks, token = (one.text.tokens[i].strip() for i in (one.query, chosen.position))
    distance = one.query - chosen.position
    where = f"{abs(distance)} tokens {'back' if distance > 0 else 'ahead'}"
    where = "" if one.text.kind == "patches" else f", {where}"
    return (
        f"At “{asks}” this head puts {chosen.value:.2f} of its attention on “{token}”{where}."
    )
