"""`check`: the promises of the trace, tried on a user's own model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.measures.base import Reading
from attoscope.measuring import measure, take
from attoscope.sample import SAMPLE_TEXTS
from attoscope.trace import Batch, Layer, Subject, attention_rows, batches, subject_of, watch
from attoscope.trace.frames import undisturbed
from attoscope.unchanged import compare_outputs
from attoscope.words import many

TOKENS = 48
ROW_SUM = 1e-3
# Padded and unpadded runs of a model in float32 differ in rounding only; in half precision by it.
PADDING = {torch.float32: 1e-5, torch.float64: 1e-9}
HALF_PADDING = 5e-2
OUTPUT = 1e-4
_PAD = 5


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise on one model: `held` is None where it does not apply, `sentence` says why."""

    name: str
    held: bool | None
    sentence: str
    measured: float | None = None


def check(
    model: Any,
    data: Any = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    seed: int = 0,
) -> tuple[Promise, ...]:
    """Try the promises of the trace on a model, on a few documents cut to 48 tokens.

    Outputs unchanged, all layers caught, rows that sum to one, the same numbers alone and in a
    padded batch (either side), the same numbers twice, and the model handed back as it was.
    Takes what `diagnose` takes; raises `AttoscopeError` when no layer can be watched at all.
    """
    subject = subject_of(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    given = _default_data(subject) if data is None else data
    batch = next(batches(subject, given, max_tokens=TOKENS, batch_size=4))
    with undisturbed(subject.model):
        subject.run(batch)  # some models rebuild themselves on their first input
    before = _state(subject.model)
    promises = (
        _layers(subject, batch),
        _outputs(subject, batch),
        _row_sums(subject, batch),
        _padding(subject, batch, seed, "right"),
        _padding(subject, batch, seed, "left"),
        _repeat(subject, batch, seed),
    )
    return (*promises, _handed_back(before, _state(subject.model)))


def _default_data(subject: Subject) -> Any:
    if subject.tokenizer is not None:
        return list(SAMPLE_TEXTS[:4])
    config = subject.config
    generator = torch.Generator().manual_seed(0)
    side, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if isinstance(side, int):
        pixels = torch.randn(4, channels, side, side, generator=generator)
        return {"pixel_values": pixels}
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int):
        ids = torch.randint(0, vocabulary, (4, 32), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    raise AttoscopeError(
        f"no data was given and it is not known what {subject.name} reads; give texts, images or "
        "a ready batch"
    )


def _layers(subject: Subject, batch: Batch) -> Promise:
    layout = subject.layout(batch)
    parts = []
    for stack in layout.stacks:
        route = ", ".join(f"{n} by {name}" for name, n in stack.routes)
        heads = many(stack.heads, "head")
        if stack.key_heads != stack.heads:
            heads += f" on {many(stack.key_heads, 'key head')}"
        parts.append(f"{stack.name}: {many(len(stack.layers), 'layer')}, {heads} ({route})")
    if layout.plain:
        parts.append(f"{many(len(layout.plain), 'layer')} without softmax attention")
    return Promise("layers caught", True, "; ".join(parts))


def _outputs(subject: Subject, batch: Batch) -> Promise:
    unchanged = compare_outputs(subject, batch)
    largest = unchanged.max_difference
    held = None if largest is None else largest <= OUTPUT
    return Promise("outputs unchanged", held, unchanged.sentence, largest)


def _row_sums(subject: Subject, batch: Batch) -> Promise:
    worst, sink, rows_seen = 0.0, 0.0, 0

    def visit(layer: Layer, _: Batch) -> None:
        nonlocal worst, sink, rows_seen
        for call in layer.calls:
            positions = torch.arange(call.shape[2], device=layer.valid.device)
            rows = attention_rows(call, positions.expand(call.shape[0], -1))
            total = rows.weights.sum(-1)
            reachable = rows.allowed.any(-1) & layer.valid[:, None, :]
            reachable = reachable.expand(total.shape) & total.isfinite()
            expected = torch.ones_like(total)
            if call.sinks is not None:
                expected = 1 - rows.sink_mass
                sink = max(sink, _largest(rows.sink_mass[reachable]))
            worst = max(worst, _largest((total - expected).abs()[reachable]))
            rows_seen += int(reachable.sum())

    watch(subject, batch, visit)
    if rows_seen == 0:
        return Promise("rows sum to one", None, "no finite row of attention was seen")
    sentence = f"largest deviation {worst:.1e} over {rows_seen:,} rows"
    if sink:
        sentence += f"; the kernel has a sink that takes up to {sink:.2f} of a row"
    return Promise("rows sum to one", worst <= ROW_SUM, sentence, worst)


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _padding(subject: Subject, batch: Batch, seed: int, side: str) -> Promise:
    """Each document alone, and all together in a batch with padding to spare."""
    name = f"padding on the {side}"
    inputs = batch.inputs
    if batch.valid is None or not isinstance(inputs, dict) or "attention_mask" not in inputs:
        return Promise(name, None, "does not apply: the inputs have no padding mask")
    alone = [take(batch, [row]) for row in range(len(batch))]
    padded = next(batches(subject, _pad(inputs, batch.valid, side), max_tokens=10**9,
                          batch_size=len(batch)))  # fmt: skip
    padded = replace(padded, documents=batch.documents)
    first = measure(subject, alone, seed=seed, rows=None, null=False).readings()
    second = measure(subject, [padded], seed=seed, rows=None, null=False).readings()
    worst, where = _difference(first, second)
    allowed = PADDING.get(subject.dtype or torch.float32, HALF_PADDING)
    sentence = f"readings alone and in a padded batch differ by at most {worst:.1e} ({where})"
    return Promise(name, worst <= allowed, sentence, worst)


def _pad(inputs: dict[str, Any], valid: Tensor, side: str) -> dict[str, Any]:
    """Some more columns of padding; rows moved to the right edge when padded on the left."""
    length = valid.shape[1]
    shift = (
        (length - valid.sum(1)) if side == "left" else torch.zeros(len(valid), dtype=torch.int)
    )

    def padded(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:2] != valid.shape:
            return value
        rows = [row.roll(int(by), 0) for row, by in zip(value, shift, strict=True)]
        extra = value.new_zeros(len(value), _PAD, *value.shape[2:])
        whole = torch.stack(rows)
        return torch.cat([extra, whole] if side == "left" else [whole, extra], 1)

    return {name: padded(value) for name, value in inputs.items()}


def _difference(first: tuple[Reading, ...], second: tuple[Reading, ...]) -> tuple[float, str]:
    """The largest difference relative to max(1, size), and the reading where it is."""
    worst, where = 0.0, "none"
    others = {reading.name: reading for reading in second}
    for one in first:
        other = others[one.name]
        if one.values.shape != other.values.shape:
            return float("inf"), one.name
        if (np.isnan(one.values) != np.isnan(other.values)).any():
            return float("inf"), one.name
        size = np.maximum(1.0, np.abs(one.values))
        gap = float(np.nanmax(np.abs(one.values - other.values) / size, initial=0.0))
        if gap > worst:
            worst, where = gap, one.name
    return worst, where


def _repeat(subject: Subject, batch: Batch, seed: int) -> Promise:
    first = measure(subject, [batch], seed=seed, null=False).readings()
    second = measure(subject, [batch], seed=seed, null=False).readings()
    worst, where = _difference(first, second)
    sentence = "two runs give the same numbers, bit for bit"
    if worst:
        sentence = f"two runs differ by {worst:.1e} ({where})"
    return Promise("repeatable", worst == 0.0, sentence, worst)


def _state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that measuring could disturb."""
    return {
        "parameters": [p.data_ptr() for p in model.parameters()],
        "versions of parameters": [p._version for p in model.parameters()],
        "gradients": [p.grad is None for p in model.parameters()],
        "gradient flags": [p.requires_grad for p in model.parameters()],
        "training flags": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "attention implementation": getattr(
            getattr(model, "config", None), "_attn_implementation", None
        ),
        "random state": torch.get_rng_state().tolist(),
    }


def _handed_back(before: dict[str, Any], after: dict[str, Any]) -> Promise:
    changed = [name for name in before if before[name] != after[name]]
    sentence = f"compared {', '.join(before)}"
    if changed:
        sentence = f"changed: {', '.join(changed)}"
    return Promise("model as it was", not changed, sentence)


def lines(promises: tuple[Promise, ...]) -> Iterator[str]:
    """One line for each promise, for the terminal."""
    width = max(len(p.name) for p in promises)
    mark = {True: "holds", False: "FAILS", None: "  -  "}
    for promise in promises:
        yield f"{mark[promise.held]}  {promise.name:<{width}}  {promise.sentence}"
