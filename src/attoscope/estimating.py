"""What a diagnosis would take, estimated from short runs on the model itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.measuring import Span, measure
from attoscope.sample import SAMPLE_TEXTS
from attoscope.trace import Batch, Counts, PeakBytes, Subject, batches, subject_of
from attoscope.trace.subject import head_of

# Long enough that the sample of rows is full and what is left grows as it will go on growing.
_LENGTHS = (128, 192, 256)
_NULL_SHARE = 0.25


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
            f"{_size(self.layer_bytes)} a layer; {self.documents} documents, "
            f"{self.tokens:,} tokens; expected peak of tensors beside the weights "
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
) -> Estimate:
    """Expected memory and time of `diagnose` with the same arguments.

    Runs the model on short pieces of the widest batch, fits constant, linear and quadratic
    growth in their length, and extrapolates. Reads all the data once, to count it.
    """
    subject = subject_of(model, dtype=dtype, device=device)
    counts = Counts()
    widest, volumes = None, []
    given = list(SAMPLE_TEXTS) if data is None else data
    for batch in batches(
        subject, given, max_tokens=max_tokens, batch_size=batch_size, counts=counts
    ):
        volumes.append(_volume(batch))
        if widest is None or _volume(batch) > _volume(widest):
            widest = batch
    if widest is None:
        raise AttoscopeError("no text or image was given; give at least one")
    peak, seconds = _extrapolate(subject, widest, rows, layers, seed)
    volume = max(_volume(widest), 1)
    whole = sum(seconds * v / volume for v in volumes) * (1 + _NULL_SHARE)
    layout = subject.layout(widest)
    sizes = [_bytes(subject.model.get_submodule(name)) for name in layout.blocks]
    return Estimate(
        parameters=sum({p.data_ptr(): p.numel() for p in subject.model.parameters()}.values()),
        parameter_bytes=_bytes(subject.model),
        layer_bytes=max(sizes, default=0),
        documents=counts.documents,
        tokens=counts.tokens,
        peak_bytes=int(peak),
        seconds=float(whole),
    )


def _extrapolate(
    subject: Subject, batch: Batch, rows: int | None, layers: Span, seed: int
) -> tuple[float, float]:
    """Peak bytes and seconds of one pass over `batch`."""
    length = None if batch.valid is None else batch.valid.shape[1]
    if length is None or length <= _LENGTHS[-1]:
        return _one(subject, batch, rows, layers, seed)
    points = [_one(subject, head_of(batch, len(batch), n), rows, layers, seed) for n in _LENGTHS]
    peak, seconds = (_grown(values, length) for values in zip(*points, strict=True))
    return peak, seconds


def _grown(values: tuple[float, ...], length: int) -> float:
    """The best sum of a constant, a linear and a quadratic part, none negative, at `length`."""
    powers = np.power.outer(np.array(_LENGTHS, float), np.arange(3))
    scale = powers.max(0)
    parts, _ = nnls(powers / scale, np.array(values))
    return float((parts / scale) @ np.power(float(length), np.arange(3)))


def _one(
    subject: Subject, batch: Batch, rows: int | None, layers: Span, seed: int
) -> tuple[float, float]:
    started = time.perf_counter()
    measure(subject, [batch], rows=rows, layers=layers, seed=seed, null=False)
    seconds = time.perf_counter() - started
    with PeakBytes() as counter:
        measure(subject, [batch], rows=rows, layers=layers, seed=seed, null=False)
    return float(counter.peak), seconds


def _volume(batch: Batch) -> int:
    if batch.valid is not None:
        return int(batch.valid.numel())
    values = batch.inputs.values() if isinstance(batch.inputs, dict) else [batch.inputs]
    return max((v.numel() for v in values if isinstance(v, Tensor)), default=1)


def _bytes(module: torch.nn.Module) -> int:
    return sum({p.data_ptr(): p.nbytes for p in module.parameters()}.values())


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return ""
