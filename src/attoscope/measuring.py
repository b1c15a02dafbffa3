"""Run measures over batches, and the same measures over the null: shuffled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.loss import Loss
from attoscope.measures import first_measures
from attoscope.measures.base import Measure, Reading, with_null
from attoscope.trace import Batch, Layer, Layout, Subject, shuffled, watch

Progress = Callable[[int], None]
Span = tuple[int, int] | None
SHUFFLED = "the same tokens in random order"
# One document in four also runs shuffled: a null needs less precision than the reading.
NULL_EVERY = 4
_REMEMBERED = 4096


@dataclass(slots=True)
class Measurement:
    """Measures after a run: `real` on the data, `null` on the shuffled part of it.

    `loss` and `null_loss` are the same for what came out of the model. `ids` keeps the token ids
    of the first documents, so that evidence can be put in words, and `readers` names the stacks
    whose tokens these are.
    """

    real: tuple[Measure, ...]
    null: tuple[Measure, ...]
    loss: Loss = field(default_factory=Loss)
    null_loss: Loss = field(default_factory=Loss)
    null_documents: int = 0
    interrupted: bool = False
    first: Batch | None = None
    ids: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    readers: frozenset[str] = frozenset()

    def add(self, other: Measurement) -> None:
        """Take in what another measurement of the same measures has seen."""
        for mine, theirs in zip(
            (*self.real, *self.null), (*other.real, *other.null), strict=True
        ):
            mine.merge(theirs)
        self.loss.merge(other.loss)
        self.null_loss.merge(other.null_loss)
        self.null_documents += other.null_documents

    def readings(self) -> tuple[Reading, ...]:
        """All readings, each with its null where there is one."""
        real = [reading for measure in self.real for reading in measure.read()]
        if not self.null_documents:
            return (*real, *self.loss.read())
        nulls = [reading for measure in self.null for reading in measure.read()]
        return (
            *with_null(real, nulls, SHUFFLED),
            *self.loss.read(self.null_loss, SHUFFLED),
        )


def measure(
    subject: Subject,
    batches: Iterable[Batch],
    *,
    rows: int | None = 128,
    seed: int = 0,
    layers: Span = None,
    null: bool = True,
    keep_finished: bool = False,
    progress: Progress | None = None,
) -> Measurement:
    """Run every batch once, and one document in four once more with its tokens shuffled.

    `layers` = (first, end) measures only these layers of each stack. With `keep_finished` an
    interrupt after the first batch ends the run and keeps what was measured.
    """

    def empty() -> Measurement:
        real, mixed = (tuple(first_measures(rows=rows, seed=seed)) for _ in range(2))
        return Measurement(real, mixed, Loss(seed=seed), Loss(seed=seed))

    found = empty()
    try:
        for batch in batches:
            # On its own first: a batch that is interrupted half-way must leave no trace.
            part = empty()
            output = watch(subject, batch, _visitor(part.real, layers))
            part.loss.update(subject, batch, output)
            # Logits are large; the null has its own.
            del output
            if null:
                _null_pass(subject, batch, part, seed, layers)
            found.add(part)
            _remember(subject, found, batch)
            if progress is not None:
                progress(len(batch))
    except KeyboardInterrupt:
        if not keep_finished or found.first is None:
            raise
        found.interrupted = True
    return found


def check_span(layers: Span, layout: Layout) -> None:
    """An error when none of the layers asked for is there."""
    last = max(max(stack.layers) for stack in layout.stacks)
    if layers is not None and layers[0] > last:
        raise AttoscopeError(
            f"layers: got {layers[0]}:{layers[1]}, but the model's layers are 0 to {last}; "
            "choose among those"
        )


def _visitor(measures: tuple[Measure, ...], span: Span) -> Callable[[Layer, Batch], None]:
    def visit(layer: Layer, batch: Batch) -> None:
        if span is None or span[0] <= layer.index < span[1]:
            for one in measures:
                one.update(layer, batch)

    return visit


def _null_pass(
    subject: Subject, batch: Batch, found: Measurement, seed: int, layers: Span
) -> None:
    chosen = [
        row for row, doc in enumerate(batch.documents) if doc < 2 or doc % NULL_EVERY == 0
    ]
    floats = isinstance(batch.inputs, Tensor) and batch.inputs.dim() == 3
    axis = subject.batch_axis(batch.inputs) if floats else 0
    part = take(batch, chosen, axis) if chosen else None
    mixed = shuffled(subject, part, seed) if part is not None else None
    if mixed is None:
        return
    output = watch(subject, mixed, _visitor(found.null, layers))
    found.null_loss.update(subject, mixed, output)
    found.null_documents += len(mixed)


def take(batch: Batch, rows: list[int], axis: int = 0) -> Batch:
    """Some documents of a batch, cut to the longest of them; `axis` counts them in a tensor."""
    index = torch.tensor(rows)
    size = len(batch)
    length = None if batch.valid is None else batch.valid.shape[1]
    longest = None if batch.valid is None else int(batch.valid[index].sum(1).max())

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != size:
            return value
        value = value[index.to(value.device)]
        return value[:, :longest] if value.dim() > 1 and value.shape[1] == length else value

    inputs = batch.inputs
    if isinstance(inputs, dict):
        inputs = {k: part(v) for k, v in inputs.items()}
    elif isinstance(inputs, Tensor):
        inputs = inputs.index_select(axis, index.to(inputs.device))
    return replace(
        batch,
        inputs=inputs,
        documents=tuple(batch.documents[row] for row in rows),
        valid=part(batch.valid),
        special=part(batch.special),
        decoder_valid=part(batch.decoder_valid),
        tokens=None if batch.tokens is None else tuple(batch.tokens[row] for row in rows),
    )


def _remember(subject: Subject, found: Measurement, batch: Batch) -> None:
    if found.first is None:
        found.first = batch
        found.readers = subject.layout(batch).readers
    ids = batch.inputs.get("input_ids") if isinstance(batch.inputs, dict) else None
    if not isinstance(ids, Tensor) or len(found.ids) >= _REMEMBERED:
        return
    for row, document in enumerate(batch.documents):
        kept = ids[row] if batch.valid is None else ids[row][batch.valid[row]]
        found.ids[document] = kept.cpu().numpy().astype(np.int32)
