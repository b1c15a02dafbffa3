"""The way down to the words: rows of attention that show what a head reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attoscope.diagnosis import Closeup
from attoscope.findings import Finding
from attoscope.measuring import Measurement, take
from attoscope.trace import AttentionCall, Batch, Layer, Subject, attention_rows, watch
from attoscope.trace.subject import head_of
from attoscope.words import pieces

TOKENS = 40
SHOWN = 3


@dataclass(slots=True)
class _Candidate:
    site: str
    head: int
    query: int
    chosen: int
    weight: float
    weights: tuple[float, ...]


def closeups(
    subject: Subject, measurement: Measurement, findings: tuple[Finding, ...]
) -> tuple[Closeup, ...]:
    """Up to three rows of the first document in which a head picks a distant word, one a stack
    of layers apart, and one row for the worst finding that names a head. Nothing for images.
    """
    batch = measurement.first
    if batch is None or batch.documents[0] not in measurement.ids or batch.valid is None:
        return ()
    short = head_of(take(batch, [0]), 1, TOKENS)
    best: dict[str, _Candidate] = {}
    wanted = _named(findings)
    named: dict[tuple[str, int], _Candidate] = {}

    def visit(layer: Layer, _: Batch) -> None:
        for call in layer.calls:
            if call.site.call.startswith("cross") or call.shape[2] != call.shape[3]:
                continue
            if layer.stack not in measurement.readers:
                continue
            _look(call, layer, best, wanted, named)

    watch(subject, short, visit)
    ids = measurement.ids[batch.documents[0]][:TOKENS]
    words = pieces(subject.tokenizer, ids)
    chosen = _apart(sorted(best.values(), key=lambda c: -c.weight))
    reading = [
        Closeup(c.site, c.head, 0, words, c.query, c.weights, _why(c, words)) for c in chosen
    ]
    worst = [
        Closeup(c.site, c.head, 0, words, c.query, c.weights,
                f"A head named in a finding: its sharpest row puts {c.weight:.2f} on "
                f"“{words[c.chosen].strip()}”.")
        for c in list(named.values())[:1]
    ]  # fmt: skip
    return tuple(worst + reading)


def _named(findings: tuple[Finding, ...]) -> set[tuple[str, int]]:
    for finding in findings:
        if finding.severity != "note" and finding.heads:
            return {finding.heads[0]}
    return set()


def _look(
    call: AttentionCall,
    layer: Layer,
    best: dict[str, _Candidate],
    wanted: set[tuple[str, int]],
    named: dict[tuple[str, int], _Candidate],
) -> None:
    """Keep the layer's most decided choice of a distant content word."""
    queries = call.shape[2]
    steps = torch.arange(queries, device=layer.valid.device)
    rows = attention_rows(call, steps[None])
    weights = rows.weights[0]
    for head in range(weights.shape[0]):
        if (str(call.site), head) in wanted:
            named[str(call.site), head] = _sharpest(call, head, weights[head])
    distant = (steps[:, None] - steps[None, :]).abs() > 1
    content = layer.valid[0] & ~layer.special[0]
    content[0] = False
    seen = weights * (distant & content[None, :] & content[:, None])
    flat = int(seen.flatten().argmax())
    head, rest = divmod(flat, queries * queries)
    query, key = divmod(rest, queries)
    value = float(seen[head, query, key])
    if value > 0:
        row = tuple(float(w) for w in weights[head, query])
        best[str(call.site)] = _Candidate(str(call.site), head, query, key, value, row)


def _sharpest(call: AttentionCall, head: int, weights: torch.Tensor) -> _Candidate:
    query, key = divmod(int(weights.nan_to_num().flatten().argmax()), weights.shape[1])
    row = tuple(float(w) for w in weights[query].nan_to_num())
    return _Candidate(str(call.site), head, query, key, row[key], row)


def _apart(ranked: list[_Candidate]) -> list[_Candidate]:
    """The best ones whose query and chosen words differ from those already kept."""
    kept: list[_Candidate] = []
    for one in ranked:
        if len(kept) < SHOWN and all(
            (one.query, one.chosen) != (k.query, k.chosen) for k in kept
        ):
            kept.append(one)
    return kept


def _why(candidate: _Candidate, words: tuple[str, ...]) -> str:
    asks = words[candidate.query].strip()
    chosen = words[candidate.chosen].strip()
    distance = candidate.query - candidate.chosen
    where = f"{abs(distance)} tokens {'back' if distance > 0 else 'ahead'}"
    return (
        f"At “{asks}” this head puts {candidate.weight:.2f} of its attention on “{chosen}”, "
        f"{where}."
    )
