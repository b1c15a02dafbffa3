"""What a diagnosis would take, estimated from short runs on the model itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.measures.selection import BLOCK_BYTES
from attoscope.measuring import Span, check_span, measure
from attoscope.sample import sample_for
from attoscope.trace import Batch, Counts, PeakBytes, Subject, batches, subject_of
from attoscope.trace.frames import undisturbed
from attoscope.trace.memory import parameter_bytes, parameter_count
from attoscope.trace.subject import head_of
from attoscope.words import many

_NULL_SHARE = 0.25
_WHOLE = 10**9


@dataclass(frozen=True, slots=True)
class Estimate:
    """Size of the model, and expected peak bytes of tensors and seconds of the whole run."""

    parameters: int
    parameter_bytes: int
    layer_bytes: int
    documents: int
    tokens: int
    peak_bytes: int
    seconds: float

    @property
    def sentence(self) -> str:
        """The estimate in words."""
        return (
            f"{self.parameters / 1e6:,.1f} M parameters ({_size(self.parameter_bytes)}), "
            f"{_size(self.layer_bytes)} a layer; {many(self.documents, 'document')}, "
            f"{many(self.tokens, 'token')}; expected peak of tensors beside the weights "
            f"{_size(self.peak_bytes)}; expected time {self.seconds:.1f} s"
        )


def estimate(
    model: Any,
    data: Any = None,
    *,
    rows: int | None = 128,
    max_tokens: int | None = None,
    batch_size: int = 8,
    layers: Span = None,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Estimate:
    """Expected memory and time of `diagnose` with the same arguments.

    Runs the model on one and on two documents of the widest batch, at their full length, and
    extrapolates to the whole batch. Reads all the data once, to count it.
    """
    subject = subject_of(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    counts = Counts()
    widest, volumes = None, []
    given = sample_for(subject, counts) if data is None else data
    for batch in batches(
        subject, given, max_tokens=max_tokens, batch_size=batch_size, counts=counts
    ):
        volumes.append(_volume(batch))
        if widest is None or _volume(batch) > _volume(widest):
            widest = batch
    if widest is None:
        raise AttoscopeError("no text or image was given; give at least one")
    check_span(layers, subject.layout(widest))
    peak, seconds = _extrapolate(subject, widest, rows, layers, seed)
    volume = max(_volume(widest), 1)
    whole = sum(seconds * v / volume for v in volumes) * (1 + _NULL_SHARE)
    layout = subject.layout(widest)
    sizes = [parameter_bytes(subject.model.get_submodule(name)) for name in layout.blocks]
    return Estimate(
        parameters=parameter_count(subject.model),
        parameter_bytes=parameter_bytes(subject.model),
        layer_bytes=max(sizes, default=0),
        documents=counts.documents,
        tokens=counts.tokens,
        peak_bytes=int(peak),
        seconds=float(whole),
    )


def _extrapolate(
    subject: Subject, batch: Batch, rows: int | None, layers: Span, seed: int
) -> tuple[float, float]:
    """Peak bytes and seconds of one pass over `batch`, from its one and two longest documents."""
    documents = len(batch)
    if documents <= 2 or not isinstance(batch.inputs, dict):
        peak, _, seconds = _one(subject, batch, rows, layers, seed)
        return peak, seconds
    one = _one(subject, head_of(batch, 1, _WHOLE), rows, layers, seed)
    two = _one(subject, head_of(batch, 2, _WHOLE), rows, layers, seed)
    peak, plain, seconds = (
        first + (second - first) * (documents - 1)
        for first, second in zip(one, two, strict=True)
    )
    # What measuring adds stops growing with the batch once a block of rows is full: the block
    # itself and as much again for what is computed from it.
    return min(peak, plain + 2 * BLOCK_BYTES), max(seconds, one[2])


def _one(
    subject: Subject, batch: Batch, rows: int | None, layers: Span, seed: int
) -> tuple[float, float, float]:
    """Peak bytes of a measured pass and of a plain one, and seconds of a measured pass."""
    started = time.perf_counter()
    measure(subject, [batch], rows=rows, layers=layers, seed=seed, null=False)
    seconds = time.perf_counter() - started
    with PeakBytes() as measured:
        measure(subject, [batch], rows=rows, layers=layers, seed=seed, null=False)
    with PeakBytes() as plain, undisturbed(subject.model):
        subject.run(batch)
    return float(measured.peak), float(plain.peak), seconds


def _volume(batch: Batch) -> int:
    if batch.valid is not None:
        return int(batch.valid.numel())
    values = batch.inputs.values() if isinstance(batch.inputs, dict) else [batch.inputs]
    return max((v.numel() for v in values if isinstance(v, Tensor)), default=1)


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return ""
