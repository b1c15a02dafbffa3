"""What the model's output costs: its loss on the data, document by document.

With labels in the batch it is the model's own loss; a causal language model is scored on the next
token of what it reads. Which of the two, and whether the output holds logits at all, is found by
what the model gives, not by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attoscope.measures.base import Reading, Spec, with_null
from attoscope.measures.tally import Tally
from attoscope.trace import Batch, Subject

IGNORED = -100
OUTPUT = ("output",)
# Logits turned into float32 at a time: 16 MB.
_CHUNK = 2**22
# To be the model's own loss, a mean has to agree with it so well, relative to max(1, loss).
_AGREES = 1e-2
# What holds one integer per token but no token.
_NO_TOKENS = ("mask", "position", "type", "label", "segment")

_TITLES = {
    "next": "cross-entropy of the next token",
    "tokens": "cross-entropy of the labelled tokens",
    "classes": "cross-entropy of the labels",
    "own": "the model's own loss",
}


@dataclass(frozen=True, slots=True)
class Score:
    """What one batch costs: a number per document, NaN where it has nothing to be scored on.

    `kind` is "next" (token), "tokens" (labels per token), "classes" (a label per document) or
    "own" (the model's loss, one number for the whole batch). `choices` is how many tokens or
    classes there are to choose from; `shuffles` says that the score of shuffled tokens is
    comparable: labels per token would belong to other tokens.
    """

    kind: str
    loss: Float[Tensor, " batch"]
    accuracy: Float[Tensor, " batch"] | None = None
    choices: int | None = None
    shuffles: bool = True


class Loss:
    """Mean loss over documents, with its bootstrap interval.

    A document's loss is the mean over its scored tokens, in nats: -(1/n) sum_t ln p(token t | the
    tokens before t). `why` says why there is none.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.tally = Tally(("loss", "accuracy"), seed=seed)
        self.kind = ""
        self.choices: int | None = None
        self.shuffles = True
        self.why = ""

    def update(self, subject: Subject, batch: Batch, output: Any) -> None:
        """Take in what the model gave for a batch."""
        with torch.no_grad():
            found = score(subject, batch, output)
        if isinstance(found, str):
            self.why = self.why or found
            return
        if not self._same(found.kind, found.choices):
            self.why = self.why or "batches differ in what they can be scored on"
            return
        self.shuffles = self.shuffles and found.shuffles
        nothing = torch.full_like(found.loss, math.nan)
        both = torch.stack([found.loss, nothing if found.accuracy is None else found.accuracy])
        broken = found.loss.isinf().cpu().numpy()
        values = both.T.double().cpu().numpy()
        self.tally.add("output", batch.documents, values, broken=broken)

    def merge(self, other: Loss) -> None:
        """Add what another `Loss` of the same seed took in."""
        self.why = self.why or other.why
        self.shuffles = self.shuffles and other.shuffles
        if not other.kind:
            return
        if self._same(other.kind, other.choices):
            self.tally.merge(other.tally)
        else:
            self.why = self.why or "batches differ in what they can be scored on"

    def _same(self, kind: str, choices: int | None) -> bool:
        if not self.kind:
            self.kind, self.choices = kind, choices
        return (kind, choices) == (self.kind, self.choices)

    @property
    def said(self) -> str:
        """What was scored, or why nothing was, in words."""
        if not self.kind:
            return f"none: {self.why or 'nothing was read'}"
        return _TITLES[self.kind] + (f"; {self.why}" if self.why else "")

    def read(self, null: Loss | None = None, meaning: str = "") -> list[Reading]:
        """Loss, and accuracy where a document has one label: dims ("output",).

        `null` is the same on shuffled tokens and `meaning` says so; without it, or where labels
        belong to single tokens, the null is an even guess: ln(choices), 1 / choices.
        """
        if not self.kind:
            return []
        readings = [self._finished(r) for r in self.tally.readings(self._specs(), OUTPUT)]
        if null is None or not self.shuffles or null.kind != self.kind:
            return [self._even(r) for r in readings]
        nulls = null.tally.readings(self._specs(), OUTPUT)
        guess = "; ".join(filter(None, (meaning, self._guess("loss"))))
        guessed = "; ".join(filter(None, (meaning, self._guess("accuracy"))))
        return [
            with_null([r], nulls, guess if r.name == "loss" else guessed)[0] for r in readings
        ]

    def _specs(self) -> list[Spec]:
        specs = [
            Spec(
                "loss",
                "Loss",
                f"Mean over documents of {_TITLES[self.kind]}"
                + (", each the mean over its tokens" if self.kind in ("next", "tokens") else "")
                + ". Lower is better; compare it before and after a change of the model.",
                "" if self.kind == "own" else "nats",
                (None if self.kind == "own" else 0.0, None),
                "Shannon 1948, cross-entropy; its exponential is the perplexity"
                if self.kind in ("next", "tokens")
                else "",
                missing="nothing in them is predicted (a single token, or no label)",
            )
        ]
        if not np.isfinite(self.tally.mean("accuracy")).any():
            return specs
        accuracy = Spec(
            "accuracy",
            "Accuracy",
            "Share of documents whose label has the largest logit.",
            "share",
            (0.0, 1.0),
            "",
            missing="they have no label",
        )
        return [*specs, accuracy]

    def _finished(self, reading: Reading) -> Reading:
        """One loss for a batch says nothing of its documents: no interval."""
        if self.kind != "own" or reading.name != "loss":
            return reading
        reason = "no interval: the model gives one loss for a whole batch"
        return replace(
            reading,
            low=None,
            high=None,
            reason="; ".join(filter(None, (reading.reason, reason))),
        )

    def _even(self, reading: Reading) -> Reading:
        value = self._chance(reading.name)
        if value is None:
            return replace(reading, null_meaning="none")
        guess = np.full(reading.values.shape, value)
        return replace(reading, null=guess, null_meaning=self._guess(reading.name))

    def _chance(self, name: str) -> float | None:
        if self.choices is None or (self.kind == "own" and name == "loss"):
            return None
        return math.log(self.choices) if name == "loss" else 1 / self.choices

    def _guess(self, name: str) -> str:
        value = self._chance(name)
        if value is None:
            return ""
        noun = "tokens" if self.kind in ("next", "tokens") else "classes"
        unit = " nats" if name == "loss" else ""
        return f"an even guess among {self.choices:,} {noun} gives {value:.3g}{unit}"


def score(subject: Subject, batch: Batch, output: Any) -> Score | str:
    """What a batch costs, or in words why that cannot be said."""
    logits, own = part_of(output, "logits"), part_of(output, "loss")
    labels = batch.inputs.get("labels") if isinstance(batch.inputs, dict) else None
    if isinstance(labels, Tensor) and own is not None and own.numel() == 1:
        return _labelled(batch, labels.to(own.device), logits, own)
    found = _next_token(
        subject, batch, output if logits is None else logits, logits is not None
    )
    if isinstance(found, str) and isinstance(labels, Tensor):
        return f"the batch holds labels, but the model's output has no loss; {found}"
    return found


def part_of(output: Any, name: str) -> Tensor | None:
    """A floating tensor of that name in what a model returned."""
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def _next_token(subject: Subject, batch: Batch, output: Any, named: bool) -> Score | str:
    logits = output[0] if isinstance(output, tuple | list) and output else output
    layout = subject.layout(batch)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.is_floating_point():
        return "the model gives no logits of tokens, and the batch holds no labels"
    if not any(stack.causal for stack in layout.stacks):
        return "its attention is not causal, so that there is no next token to predict"
    size = logits.shape[2]
    if not _is_vocabulary(subject, size) or (
        not named and size in {stack.width for stack in layout.stacks}
    ):
        return f"its output, of size {size:,}, is not over the vocabulary"
    if layout.time_first or len(batch) != logits.shape[0]:
        return "the first axis of its output is not the document"
    ids, valid = _read_tokens(batch, logits)
    if ids is None or int(ids.max()) >= size:
        return "it is not known which input holds the tokens"
    counted = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid.to(ids.device)
    targets = _shifted(ids.masked_fill(~counted, IGNORED))
    targets[~counted] = IGNORED
    return Score("next", _mean(entropies(logits, targets)), choices=size)


def _is_vocabulary(subject: Subject, size: int) -> bool:
    """Whether the model has a table of so many embeddings."""
    named = getattr(subject.config, "vocab_size", None)
    tables = (m.num_embeddings for m in subject.model.modules() if isinstance(m, nn.Embedding))
    return size == named or size in set(tables)


def _read_tokens(batch: Batch, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The ids that the logits stand at, and which of them are no padding."""
    inputs, shape = batch.inputs, tuple(logits.shape[:2])
    if isinstance(inputs, Tensor):
        found = {"": inputs}
    elif isinstance(inputs, dict):
        found = {k: v for k, v in inputs.items() if isinstance(v, Tensor)}
    else:
        found = {str(i): v for i, v in enumerate(inputs) if isinstance(v, Tensor)}
    found = {
        name: value
        for name, value in found.items()
        if tuple(value.shape) == shape
        and value.dtype in (torch.int64, torch.int32)
        and not any(part in name for part in _NO_TOKENS)
    }
    # The decoder of a pair is the one that predicts.
    names = [name for name in ("decoder_input_ids", "input_ids") if name in found]
    if not names and len(found) != 1:
        return None, None
    name = names[0] if names else next(iter(found))
    valid = batch.decoder_valid if name.startswith("decoder") else batch.valid
    if valid is not None and tuple(valid.shape) != shape:
        return None, None
    return found[name].to(logits.device, torch.int64), valid


def _labelled(batch: Batch, labels: Tensor, logits: Tensor | None, own: Tensor) -> Score:
    """The loss against labels, per document where its mean is the model's own loss."""
    whole = labels.dtype in (torch.int64, torch.int32, torch.uint8, torch.int16)
    if logits is not None and whole and logits.dim() == 2 and logits.shape[0] == labels.numel():
        return _classes(labels.reshape(-1).long(), logits, own)
    if logits is not None and whole and tuple(logits.shape[:2]) == tuple(labels.shape):
        given = labels.long()
        counted = torch.ones_like(given, dtype=torch.bool)
        for mask in (batch.valid, batch.decoder_valid):
            if mask is not None and mask.shape == given.shape:
                counted = mask.to(given.device)
        for targets, scored in ((_shifted(given), _shifted_mask(counted)), (given, counted)):
            if logits.dim() != 3 or not _possible(targets, logits.shape[2]):
                continue
            each = entropies(logits, targets)
            if _agrees(each, own):
                each = each.masked_fill(~scored, math.nan)
                return Score("tokens", _mean(each), None, logits.shape[2], shuffles=False)
    return Score("own", _repeated(own, len(batch)), shuffles=labels.numel() == len(batch))


def _classes(
    labels: Int[Tensor, " batch"], logits: Float[Tensor, "batch choice"], own: Tensor
) -> Score:
    choices, there = logits.shape[1], labels != IGNORED
    if choices < 2 or not _possible(labels, choices):
        return Score("own", _repeated(own, len(labels)))
    right = (logits.argmax(1) == labels).float().masked_fill(~there, math.nan)
    each = cross_entropy(logits.float(), labels, reduction="none", ignore_index=IGNORED)
    each = _finite_or_infinite(each).masked_fill(~there, math.nan)
    if _agrees(each, own):
        return Score("classes", each, right, choices)
    return Score("own", _repeated(own, len(labels)), right, choices)


def _possible(targets: Tensor, choices: int) -> bool:
    """Whether every target is a choice, or left out."""
    left_out = targets == IGNORED
    return bool((left_out | ((targets >= 0) & (targets < choices))).all())


def _repeated(own: Tensor, documents: int) -> Float[Tensor, " batch"]:
    return _finite_or_infinite(own.float().reshape(1)).expand(documents)


def _finite_or_infinite(values: Float[Tensor, " any"]) -> Float[Tensor, " any"]:
    """NaN stands for "not scored": what came out as no number becomes infinity."""
    return torch.where(values.isfinite(), values, math.inf)


def _agrees(each: Tensor, own: Tensor) -> bool:
    """Whether the mean over what is scored is the model's own loss (or both are no number)."""
    mean, given = float(each.nanmean()), float(own)
    if not math.isfinite(given) or not math.isfinite(mean):
        return math.isfinite(given) == math.isfinite(mean)
    return abs(mean - given) <= _AGREES * max(1.0, abs(given))


def _shifted(ids: Int[Tensor, "batch token"]) -> Int[Tensor, "batch token"]:
    """What stands after each token; nothing after the last."""
    last = ids.new_full((len(ids), 1), IGNORED)
    return torch.cat([ids[:, 1:], last], 1)


def _shifted_mask(counted: Shaped[Tensor, "batch token"]) -> Shaped[Tensor, "batch token"]:
    """Which tokens are counted and have a counted one after them."""
    last = torch.zeros_like(counted[:, :1])
    return counted & torch.cat([counted[:, 1:], last], 1)


def entropies(
    logits: Float[Tensor, "batch token choice"], targets: Int[Tensor, "batch token"]
) -> Float[Tensor, "batch token"]:
    """-ln softmax(logits)[target] in nats, NaN where the target is -100; infinity where the
    logits are no numbers. In float32, a part of a document at a time."""
    found = torch.full(targets.shape, math.nan, device=logits.device)
    step = max(1, _CHUNK // logits.shape[2])
    for row, wanted in enumerate(targets):
        for places in (wanted != IGNORED).nonzero()[:, 0].split(step):
            part = cross_entropy(logits[row, places].float(), wanted[places], reduction="none")
            found[row, places] = _finite_or_infinite(part)
    return found


def _mean(each: Float[Tensor, "batch token"]) -> Float[Tensor, " batch"]:
    return each.nanmean(1)
