"""`diagnose`: run the measures on a model and data, read them, and say what they mean."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from attoscope import __version__
from attoscope.closeups import closeups
from attoscope.diagnosis import Diagnosis
from attoscope.errors import AttoscopeError
from attoscope.measures.base import Reading
from attoscope.measures.rules import findings_of
from attoscope.measuring import (
    NULL_EVERY,
    SHUFFLED,
    Measurement,
    Progress,
    Span,
    check_span,
    measure,
)
from attoscope.prediction.scope import treated
from attoscope.prediction.signal_readings import DOCUMENTS as SIGNAL_DOCUMENTS
from attoscope.prediction.signal_readings import signal_readings
from attoscope.prediction.smoothing import DOCUMENTS as SMOOTHING_DOCUMENTS
from attoscope.prediction.smoothing import smoothing_readings
from attoscope.sample import sample_for
from attoscope.trace import Batch, Counts, Layout, Subject, batches, parameter_count, subject_of
from attoscope.unchanged import Unchanged, compare_outputs
from attoscope.words import in_words, many

DEFAULT_ROWS = 128
# So many documents, in whole batches, are read once more for the max-margin readings.
SVM_DOCUMENTS = 8


def diagnose(
    model: Any,
    data: Any = None,
    *,
    rows: int | None = DEFAULT_ROWS,
    max_tokens: int | None = None,
    batch_size: int = 8,
    layers: Span = None,
    null: bool = True,
    svm: bool = False,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    sources: tuple[str, ...] = (),
    keep_finished: bool = False,
    progress: Progress | None = None,
) -> Diagnosis:
    """What is wrong with a transformer, where, compared with a null, and what to do about it.

    Args:
        model: a directory, hub id or GGUF file, a `Subject`, or any `nn.Module`.
        data: a text, an iterable of texts, images, or a ready batch (as for
            `attoscope.trace.batches`). Without data, a built-in sample of English paragraphs.
        rows: query rows sampled per sequence and layer; None takes all of them.
        max_tokens: cut documents to this many tokens (512 unless given).
        layers: (first, end) to measure only some layers of each stack.
        null: also run one document in four with its tokens shuffled, as the null of the readings.
        svm: also set every head beside the max-margin weight of its choices, on a sample of the
            queries of the first documents (docs/heads.md).
        dtype, device, trust_remote_code: for models loaded here (see `Subject.load`); a module
            is used as it is.
        sources: where the data came from, in words, for the report.
        keep_finished: an interrupt keeps what was measured so far instead of losing it.
        progress: called with the number of documents after each batch.

    The same seed gives the same report. The model is handed back as it was. Raises
    `AttoscopeError` (one sentence) on bad input, on a model without attention, or when a layer
    cannot be watched.
    """
    _validate(rows, batch_size, layers, seed)
    started = time.perf_counter()
    subject = subject_of(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    loaded = time.perf_counter()
    counts = Counts()
    if data is None:
        data = sample_for(subject, counts)
    stream = batches(subject, data, max_tokens=max_tokens, batch_size=batch_size, counts=counts)
    with _Peeked(stream, SVM_DOCUMENTS if svm else SMOOTHING_DOCUMENTS) as peeked:
        unchanged = compare_outputs(subject, peeked.first)
        check_span(layers, subject.layout(peeked.first))
        finished = replace(counts)

        def advance(documents: int) -> None:
            nonlocal finished
            finished = replace(counts)
            if progress is not None:
                progress(documents)

        found = measure(
            subject, peeked, rows=rows, seed=seed, layers=layers, null=null,
            keep_finished=keep_finished, progress=advance,
        )  # fmt: skip
    measured = time.perf_counter()
    readings = found.readings()
    smoothing, signal = _foreseen(
        subject, found, peeked.kept, finished.documents, layers, seed, keep_finished
    )
    selectors, more = _selectors(subject, peeked.kept, readings, seed) if svm else ((), {})
    findings = in_words(
        findings_of(found.real, (*readings, *smoothing)),
        found.ids,
        subject.tokenizer,
        found.readers,
    )
    shown = closeups(subject, found, findings)
    ended = time.perf_counter()
    return Diagnosis(
        model=_model_facts(subject, peeked.first, unchanged),
        data=_data_facts(finished, found, rows, sources) | more,
        versions=_versions(),
        reading_list=(*readings, *smoothing, *signal, *selectors),
        findings=findings,
        closeups=shown,
        timings={
            "load": loaded - started,
            "measure": measured - loaded,
            "read": ended - measured,
            "total": ended - started,
        },
    )


def _foreseen(
    subject: Subject,
    found: Measurement,
    kept: list[Batch],
    documents: int,
    layers: Span,
    seed: int,
    keep_finished: bool,
) -> tuple[tuple[Reading, ...], tuple[Reading, ...]]:
    """What weights foretell of smoothing and of the signal; with `keep_finished` an interrupt
    here leaves these readings out and loses nothing that was measured."""
    smoothing: tuple[Reading, ...] = ()
    try:
        smoothing = smoothing_readings(
            subject, kept, seed=seed, layers=layers,
            documents=min(SMOOTHING_DOCUMENTS, documents),
        )  # fmt: skip
        signal = signal_readings(
            subject, kept, layers=layers, documents=min(SIGNAL_DOCUMENTS, documents)
        )
    except KeyboardInterrupt:
        if not keep_finished:
            raise
        found.interrupted = True
        return smoothing, ()
    return smoothing, signal


def _selectors(
    subject: Subject, read: list[Batch], readings: tuple[Reading, ...], seed: int
) -> tuple[tuple[Reading, ...], dict[str, Any]]:
    """Every measured head beside its SVM, on the batches kept for that, and what competes."""
    from attoscope.maxmargin import max_margin

    sites = next(r.coords["site"] for r in readings if r.dims == ("site", "head"))
    try:
        found = max_margin(subject, read, sites=tuple(map(str, sites)), seed=seed)
    except AttoscopeError as error:
        return (), {"svm": {"heads": [], "reason": str(error)}}
    documents = sum(len(batch) for batch in read)
    return found.readings, {"svm": {"heads": list(found.heads), "documents": documents}}


class _Peeked:
    """An iterator whose first item can be looked at before it is consumed.

    `kept` holds the batches of the first `keep` documents, whole batches.
    """

    def __init__(self, stream: Iterator[Batch], keep: int = 0) -> None:
        self._stream = stream
        self.first = next(stream)
        self._given = False
        self._keep = keep
        self.kept: list[Batch] = []

    def __iter__(self) -> _Peeked:
        return self

    def __next__(self) -> Batch:
        batch = next(self._stream) if self._given else self.first
        self._given = True
        if sum(map(len, self.kept)) < self._keep:
            self.kept.append(batch)
        return batch

    def __enter__(self) -> _Peeked:
        return self

    def __exit__(self, *_: object) -> None:
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()


def _validate(rows: Any, batch_size: Any, layers: Span, seed: Any) -> None:
    if rows is not None and (not isinstance(rows, int) or rows < 1):
        raise AttoscopeError(
            f"rows: got {rows!r}; expected a whole number from 1 on, or None for all rows"
        )
    if not isinstance(batch_size, int) or batch_size < 1:
        raise AttoscopeError(
            f"batch_size: got {batch_size!r}; expected a whole number from 1 on"
        )
    if not isinstance(seed, int) or seed < 0:
        raise AttoscopeError(f"seed: got {seed!r}; expected a whole number from 0 on")
    if layers is not None and not 0 <= layers[0] < layers[1]:
        raise AttoscopeError(
            f"layers: got {layers[0]}:{layers[1]}; expected FIRST:END with 0 <= FIRST < END"
        )


def _model_facts(subject: Subject, batch: Batch, unchanged: Unchanged) -> dict[str, Any]:
    layout = subject.layout(batch)
    stacks = [
        {
            "name": s.name, "layers": len(s.layers), "heads": s.heads, "key_heads": s.key_heads,
            "width": s.width, "causal": s.causal, "module": s.path,
        }
        for s in layout.stacks
    ]  # fmt: skip
    routes: Counter[str] = Counter()
    for stack in layout.stacks:
        routes.update(dict(stack.routes))
    plain = (
        [
            f"{many(len(layout.plain), 'layer')} made no softmax attention call: "
            + ", ".join(layout.plain[:4])
        ]
        if layout.plain
        else []
    )
    return {
        "name": subject.name,
        "architecture": type(subject.model).__name__,
        "kind": _kind(layout, batch),
        "parameters": parameter_count(subject.model),
        "layers": sum(len(s.layers) for s in layout.stacks),
        "heads": max(s.heads for s in layout.stacks),
        "key_heads": max(s.key_heads for s in layout.stacks),
        "width": max((s.width or 0 for s in layout.stacks), default=0) or None,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "device": str(subject.device),
        "tied": _tied(subject.model),
        "routes": dict(routes),
        "stacks": stacks,
        "unchanged": {
            "equal": unchanged.equal,
            "max_difference": unchanged.max_difference,
            "sentence": unchanged.sentence,
        },
        "notes": [*subject.notes, *_remedies(subject), *plain],
    }


def _remedies(subject: Subject) -> list[str]:
    """The remedies in a model, unless a note of its directory names them."""
    if any(note.startswith("treated with ") for note in subject.notes):
        return []
    return [one.said for one in treated(subject.model)]


def _kind(layout: Layout, batch: Batch) -> str:
    if isinstance(batch.inputs, dict) and "pixel_values" in batch.inputs:
        return "vision"
    names = {stack.name for stack in layout.stacks}
    if {"encoder", "decoder"} <= names:
        return "encoder-decoder"
    return "decoder" if any(stack.causal for stack in layout.stacks) else "encoder"


def _tied(model: nn.Module) -> bool:
    """Whether the output head and the input embedding are one tensor."""
    try:
        first = model.get_input_embeddings().weight  # type: ignore[operator]
        last = model.get_output_embeddings().weight  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return False
    return bool(first.data_ptr() == last.data_ptr())


def _data_facts(
    counts: Counts,
    found: Measurement,
    rows: int | None,
    sources: tuple[str, ...],
) -> dict[str, Any]:
    notes = list(counts.notes)
    if counts.truncated:
        notes.append(
            f"{counts.truncated} of {many(counts.documents, 'document')} were cut: "
            f"{counts.dropped_tokens:,} tokens were not read"
        )
    if counts.empty:
        notes.append(
            f"{many(counts.empty, 'document')} without a token beside special ones: left out"
        )
    if found.interrupted:
        notes.append("interrupted: the readings are those of the documents finished by then")
    null = "none"
    if found.null_documents:
        null = f"{SHUFFLED}, {many(found.null_documents, 'document')}"
    return {
        "documents": counts.documents,
        "tokens": counts.tokens or None,
        "max_tokens": counts.limit if counts.tokens else None,
        "truncated_documents": counts.truncated,
        "dropped_tokens": counts.dropped_tokens,
        "empty_documents": counts.empty,
        "rows": "all" if rows is None else f"{rows} per sequence",
        "null": null,
        "null_every": NULL_EVERY,
        "loss": found.loss.said,
        "interrupted": found.interrupted,
        "sources": list(sources),
        "notes": notes,
    }


def _versions() -> dict[str, str]:
    import sys

    transformers = sys.modules.get("transformers")
    return {
        "attoscope": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        **({"transformers": str(transformers.__version__)} if transformers else {}),
    }
