"""`diagnose`: run the measures on a model and data, read them, and say what they mean."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from attoscope import __version__
from attoscope.closeups import closeups
from attoscope.diagnosis import Diagnosis
from attoscope.errors import AttoscopeError
from attoscope.measures.rules import findings_of
from attoscope.measuring import NULL_EVERY, Measurement, Progress, Span, measure
from attoscope.sample import SAMPLE_TEXTS
from attoscope.trace import Batch, Counts, Layout, Subject, batches, parameter_count, subject_of
from attoscope.unchanged import Unchanged, compare_outputs
from attoscope.words import in_words

DEFAULT_ROWS = 128


def diagnose(
    model: Any,
    data: Any = None,
    *,
    rows: int | None = DEFAULT_ROWS,
    max_tokens: int | None = None,
    batch_size: int = 8,
    layers: Span = None,
    null: bool = True,
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
        dtype, device, trust_remote_code: for models loaded here (see `Subject.load`); a module
            is used as it is.
        sources: where the data came from, in words, for the report.
        keep_finished: an interrupt keeps what was measured so far instead of losing it.
        progress: called with the number of documents after each batch.

    The same seed gives the same report. The model is handed back as it was. Raises
    `AttoscopeError` (one sentence) on bad input, on a model without attention, or when a layer
    cannot be watched.
    """
    _validate(rows, batch_size, layers)
    started = time.perf_counter()
    subject = subject_of(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    loaded = time.perf_counter()
    counts = Counts()
    if data is None:
        data = _sample(subject, counts)
    stream = batches(subject, data, max_tokens=max_tokens, batch_size=batch_size, counts=counts)
    with _Peeked(stream) as peeked:
        unchanged = compare_outputs(subject, peeked.first)
        _check_span(layers, subject.layout(peeked.first))
        found = measure(
            subject, peeked, rows=rows, seed=seed, layers=layers, null=null,
            keep_finished=keep_finished, progress=progress,
        )  # fmt: skip
    measured = time.perf_counter()
    readings = found.readings()
    findings = in_words(findings_of(found.real, readings), found.ids, subject.tokenizer)
    shown = closeups(subject, found, findings)
    ended = time.perf_counter()
    return Diagnosis(
        model=_model_facts(subject, peeked.first, unchanged),
        data=_data_facts(counts, found, rows, max_tokens, sources),
        versions=_versions(),
        reading_list=readings,
        findings=findings,
        closeups=shown,
        timings={
            "load": loaded - started,
            "measure": measured - loaded,
            "read": ended - measured,
            "total": ended - started,
        },
    )


class _Peeked:
    """An iterator whose first item can be looked at before it is consumed."""

    def __init__(self, stream: Iterator[Batch]) -> None:
        self._stream = stream
        self.first = next(stream)
        self._given = False

    def __iter__(self) -> _Peeked:
        return self

    def __next__(self) -> Batch:
        if not self._given:
            self._given = True
            return self.first
        return next(self._stream)

    def __enter__(self) -> _Peeked:
        return self

    def __exit__(self, *_: object) -> None:
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()


def _sample(subject: Subject, counts: Counts) -> list[str]:
    if subject.tokenizer is None:
        raise AttoscopeError(
            f"no data was given and {subject.name} has no tokenizer for the built-in sample; "
            "give texts, images or a ready batch"
        )
    counts.notes.append(
        f"no text was given: read the built-in sample of {len(SAMPLE_TEXTS)} paragraphs"
    )
    return list(SAMPLE_TEXTS)


def _validate(rows: int | None, batch_size: int, layers: Span) -> None:
    if rows is not None and rows < 1:
        raise AttoscopeError(f"rows: got {rows}; expected at least 1, or None for all rows")
    if batch_size < 1:
        raise AttoscopeError(f"batch_size: got {batch_size}; expected at least 1")
    if layers is not None and not 0 <= layers[0] < layers[1]:
        raise AttoscopeError(
            f"layers: got {layers[0]}:{layers[1]}; expected FIRST:END with 0 <= FIRST < END"
        )


def _check_span(layers: Span, layout: Layout) -> None:
    last = max(max(stack.layers) for stack in layout.stacks)
    if layers is not None and layers[0] > last:
        raise AttoscopeError(
            f"layers: got {layers[0]}:{layers[1]}, but the model's layers are 0 to {last}; "
            "choose among those"
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
    plain = [f"{len(layout.plain)} layers have no softmax attention"] if layout.plain else []
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
        "notes": [*subject.notes, *plain],
    }


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
    max_tokens: int | None,
    sources: tuple[str, ...],
) -> dict[str, Any]:
    notes = list(counts.notes)
    if counts.truncated:
        notes.append(
            f"{counts.truncated} of {counts.documents} documents were cut: "
            f"{counts.dropped_tokens:,} tokens were not read"
        )
    if counts.empty:
        notes.append(f"{counts.empty} documents hold no token beside special ones: left out")
    if found.interrupted:
        notes.append("interrupted: the readings are those of the documents finished by then")
    null = "none"
    if found.null_documents:
        null = f"the same tokens in random order, {found.null_documents} documents"
    return {
        "documents": counts.documents,
        "tokens": counts.tokens or None,
        "max_tokens": max_tokens,
        "truncated_documents": counts.truncated,
        "dropped_tokens": counts.dropped_tokens,
        "empty_documents": counts.empty,
        "rows": "all" if rows is None else f"{rows} per sequence",
        "null": null,
        "null_every": NULL_EVERY,
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
