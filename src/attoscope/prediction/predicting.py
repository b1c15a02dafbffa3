"""`predict`: what a model's weights and attention maps say of smoothing, beside what it does."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attoscope import __version__
from attoscope.errors import AttoscopeError
from attoscope.measures.base import Reading
from attoscope.prediction import scope
from attoscope.prediction.agreement import Agreement, agreements
from attoscope.prediction.building import build, is_configuration, synthetic_batch
from attoscope.prediction.maps import value_maps
from attoscope.prediction.signal import SignalPrediction, signal_of
from attoscope.prediction.smoothing import Smoothing, cut_all
from attoscope.prediction.verdicts import LayerVerdict, layer_verdicts, stack_verdict
from attoscope.sample import sample_for
from attoscope.trace.batches import batches
from attoscope.trace.counts import Counts
from attoscope.trace.subject import Subject, subject_of
from attoscope.trace.types import Batch
from attoscope.trace.watch import watch
from attoscope.words import many

# Tokens of a document on which the leading eigenvector of a whole layer is found.
DC_TOKENS = 24


@dataclass(frozen=True, eq=False)
class SmoothingPrediction:
    """The part on smoothing: readings, a verdict for each layer and for the whole, agreement.

    `agreement` says how far the spectra foresaw what was measured, beside shuffled measurements;
    `notes` what of the model the theory does not cover.
    """

    readings: tuple[Reading, ...]
    layers: tuple[LayerVerdict, ...]
    verdict: str
    agreement: tuple[Agreement, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        from attoscope.report.json_parts import reading_to_dict

        return {
            "verdict": self.verdict,
            "layers": [layer.to_dict() for layer in self.layers],
            "agreement": [one.to_dict() for one in self.agreement],
            "notes": list(self.notes),
            "readings": {r.name: reading_to_dict(r) for r in self.readings},
        }

    def __str__(self) -> str:
        lines = [self.verdict, "", *table(self.layers), ""]
        if self.agreement:
            lines += ["Prediction and measurement:", *(f"  {one}" for one in self.agreement)]
        if self.notes:
            lines += ["", "Outside the theory:", *(f"  {note}" for note in self.notes)]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Prediction:
    """What `predict` gives: `smoothing` is the part on that; `tokens` the longest document's.

    `signal` is the part on variance and gradients along depth. `smoothing` is None for a
    configuration: attention maps of weights that nobody trained say nothing.
    """

    model: str
    documents: int
    tokens: int
    smoothing: SmoothingPrediction | None
    signal: SignalPrediction | None = None

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The readings of all parts."""
        return self.smoothing.readings if self.smoothing else ()

    @property
    def layers(self) -> tuple[LayerVerdict, ...]:
        """A verdict for each layer."""
        return self.smoothing.layers if self.smoothing else ()

    @property
    def verdict(self) -> str:
        """Two sentences for each stack, on smoothing; of a configuration those on the signal."""
        part = self.smoothing or self.signal
        return part.verdict if part else ""

    @property
    def agreement(self) -> tuple[Agreement, ...]:
        """How far prediction and measurement agree."""
        return self.smoothing.agreement if self.smoothing else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the theory does not cover in this model."""
        return self.smoothing.notes if self.smoothing else ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data; numbers that are not known are None."""
        plain: dict[str, Any] = _plain(
            {
                "attoscope": __version__,
                "model": self.model,
                "documents": self.documents,
                "tokens": self.tokens,
                "smoothing": self.smoothing and self.smoothing.to_dict(),
                "signal": self.signal and self.signal.to_dict(),
            }
        )
        return plain

    def to_json(self, path: str | Path) -> Path:
        """Write everything as JSON; gives the path."""
        from attoscope.report.files import write_whole

        text = json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)
        return write_whole(path, text + "\n")

    def __str__(self) -> str:
        documents = many(self.documents, "document")
        head = f"{self.model}: {documents} of at most {many(self.tokens, 'token')}"
        parts = [str(part) for part in (self.smoothing, self.signal) if part]
        return "\n\n".join([head, *parts])

    def __repr__(self) -> str:
        return (
            f"<Prediction of {self.model}: {len(self.layers)} layers, "
            f"{len(self.readings)} readings>"
        )


def predict(
    model: Any,
    data: Any = None,
    *,
    max_tokens: int = 128,
    documents: int = 4,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    init: str | None = None,
) -> Prediction:
    """Whether a model's attention smooths, from its weights and attention maps, and if it does.

    And what its weights do to variance and gradients along depth, beside what was measured. For a
    configuration (an object, a config.json, or a directory without weights) that is predicted
    for fresh weights: of its own initialiser, or of `init`.

    Per head the eigenvalues of the value-output map and of the attention map say which of them
    wins when the layer is repeated; per layer all heads at once; for the stack the stream is
    carried forward by attention alone. Beside each stands what the model did on the same data.

    Args:
        model, data: as for `attoscope.diagnose`; without data the built-in sample is read.
        max_tokens: documents are cut to so many tokens (images are read whole).
        documents: so many are read.
        seed: of bootstrap, shuffles and random maps; the same seed gives the same numbers.
        init: an initialiser by name ("xavier", "deepscalelm", "admin", "deepnet"), whose variances
            are predicted in place of the weights'; nothing of it is measured.
        dtype, device, trust_remote_code: for models loaded here (see `Subject.load`).

    The model is handed back as it was. Raises `AttoscopeError` (one sentence) on bad input, and
    for a model none of whose attention has a value-output map. Source: arXiv 2401.04301; what
    of it is ours, and what it cannot say: docs/predict.md.
    """
    _validate(max_tokens=max_tokens, documents=documents)
    if not isinstance(seed, int) or seed < 0:
        raise AttoscopeError(f"seed: got {seed!r}; expected a whole number from 0 on")
    if is_configuration(model):
        return _untrained(model, data, max_tokens, documents, seed, init)
    subject = subject_of(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    scope.check_finite(subject)
    data = sample_for(subject, Counts()) if data is None else data
    read = _read(subject, data, max_tokens, documents)
    smoothing, tokens = smoothing_of(subject, read, seed)
    try:
        signal = signal_of(subject, read, init=init, seed=seed)
    except AttoscopeError as error:
        if init is not None:
            raise
        signal = SignalPrediction((), (f"variance and gradients: {error}",))
    return Prediction(subject.name, sum(map(len, read)), tokens, smoothing, signal)


def _untrained(
    model: Any, data: Any, max_tokens: int, documents: int, seed: int, init: str | None
) -> Prediction:
    """The part on the signal, for a model that is built from its configuration."""
    built = build(model, seed=seed)
    subject = built.subject
    if data is None and subject.tokenizer is not None:
        data = sample_for(subject, Counts())
    if data is None:
        read = [synthetic_batch(built, documents, max_tokens, seed)]
        source = (
            "no data was given: read random tokens with Zipf frequencies (or random pixels)"
        )
    else:
        read = _read(subject, data, max_tokens, documents)
        source = "token correlation at the input was measured on the data"
    signal = signal_of(
        subject, read, layers=None if built.whole else built.layers, init=init, seed=seed
    )
    notes = (source, built.sentence, *signal.notes)
    longest = max(_tokens(subject, batch) for batch in read)
    signal = SignalPrediction(signal.stacks, notes)
    return Prediction(subject.name, sum(map(len, read)), longest, None, signal)


def _tokens(subject: Subject, batch: Batch) -> int:
    if batch.valid is not None:
        return int(batch.valid.sum(1).max())
    return subject.layout(batch).stacks[0].length


def smoothing_of(
    subject: Subject, read: Sequence[Batch], seed: int
) -> tuple[SmoothingPrediction, int]:
    """The part on smoothing, from batches that are read as they are; and the longest document."""
    seen = Smoothing(value_maps(subject, read[0]), seed=seed, dc_tokens=DC_TOKENS, carried=True)
    for batch in read:
        watch(subject, batch, seen.visit)
    if not seen.used:
        why = "; ".join(dict.fromkeys(seen.reasons.values()))
        raise AttoscopeError(
            f"{subject.name}: no attention of it can be predicted ({why}); expected self-attention "
            "whose values are a linear map of the stream or of a norm of it"
        )
    readings = seen.readings()
    remedies = scope.treated(subject.model)
    outside = scope.outside(seen, remedies)
    layers = layer_verdicts(seen, readings, outside)
    agreement = agreements(readings, seed)
    made = SmoothingPrediction(
        readings=readings,
        layers=layers,
        verdict=stack_verdict(layers, readings, agreement) + scope.warning(remedies),
        agreement=agreement,
        notes=(*(f"{one.said}." for one in remedies), *scope.summary(outside, seen)),
    )
    return made, seen.longest


def table(layers: Sequence[LayerVerdict]) -> list[str]:
    """A line for each layer, for the terminal."""
    wide = max([len("layer"), *(len(one.layer) for one in layers)])
    lines = [
        f"{'layer':<{wide}}  {'by its spectra':<14}  heads +/-  margin  constant share  "
        "attention step            rest"
    ]
    for one in layers:
        heads = f"{one.heads.get('smooths', 0)}/{one.heads.get('sharpens', 0)}"
        step = _signed(one.attention_step)
        if math.isfinite(one.low):
            step += f" ({_signed(one.low)} to {_signed(one.high)})"
        lines.append(
            f"{one.layer:<{wide}}  {one.kind:<14}  {heads:>9}  {_signed(one.margin):>6}  "
            f"{_share(one.dc_share):>14}  {step:<24}  {_signed(one.rest_step)}"
        )
    return lines


def _signed(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else "-"


def _share(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _read(subject: Subject, data: Any, max_tokens: int, documents: int) -> list[Batch]:
    """The first documents, each in a batch of its own size."""
    stream = batches(subject, data, max_tokens=max_tokens, batch_size=documents)
    kept: list[Batch] = []
    for batch in stream:
        kept.append(batch)
        if sum(map(len, kept)) >= documents:
            break
    close = getattr(stream, "close", None)
    if close is not None:
        close()
    return cut_all(subject, kept, documents, max_tokens)


def _validate(**counts: Any) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise AttoscopeError(f"{name}: got {value!r}; expected a whole number from 1 on")
    if counts["max_tokens"] < 2:
        raise AttoscopeError("max_tokens: got 1; expected at least 2 tokens to compare")


def _plain(value: Any) -> Any:
    """The same as JSON knows it."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (np.floating, float)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (np.bool_, np.integer)):
        return value.item()
    return value
