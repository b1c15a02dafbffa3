"""Measured moments of the stream: variance and token correlation, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.moments.measured import MomentTally, StreamMoments
from attoscope.trace.branch_types import Passing, Sublayer
from attoscope.trace.subject import Subject
from attoscope.trace.sublayers import watch_sublayers
from attoscope.trace.types import Batch
from attoscope.unchanged import first_output

IGNORED = -100


@dataclass(slots=True)
class SublayerTally:
    """What is added up for one sub-layer; gradients only where a backward pass was made."""

    sublayer: Sublayer
    before: MomentTally = field(default_factory=MomentTally)
    branch: MomentTally = field(default_factory=MomentTally)
    after: MomentTally = field(default_factory=MomentTally)
    gradient: MomentTally = field(default_factory=MomentTally)
    after_gradient: MomentTally = field(default_factory=MomentTally)

    def add(self, passing: Passing) -> None:
        """Take in a sub-layer as it went by."""
        pairs = (
            (self.before, passing.before),
            (self.branch, passing.branch),
            (self.after, passing.after),
            (self.gradient, passing.before_gradient),
            (self.after_gradient, passing.after_gradient),
        )
        for tally, tensor in pairs:
            if tensor is not None:
                tally.add(tensor, passing.valid)


@dataclass(frozen=True, slots=True)
class Measured:
    """A sub-layer's measured moments. `gradient` is that of the stream entering it.

    `before` is the stream as the skip carries it; `after` the sum, before a norm behind it.
    Gradients are of whatever scalar was differentiated, so only their ratios mean something.
    """

    sublayer: Sublayer
    before: StreamMoments
    branch: StreamMoments
    after: StreamMoments
    gradient: StreamMoments
    after_gradient: StreamMoments


def measure(
    subject: Subject,
    batches: Sequence[Batch],
    found: tuple[Sublayer, ...],
    *,
    gradients: bool = True,
    train: bool = False,
    seed: int = 0,
) -> tuple[Measured, ...]:
    """Moments of every sub-layer over batches, with gradients of the loss where there is one.

    The scalar that is differentiated: the model's own loss where the batch has labels, the cross-
    entropy of the next token for a causal model with logits, else the product of the output with
    fixed Gaussian noise of `seed`. The model comes back as it was.
    """
    tallies = {one.addition: SublayerTally(one) for one in found}
    for batch in batches:
        scalar = differentiated(subject, batch, seed) if gradients else None
        watch_sublayers(
            subject, batch, lambda p: tallies[p.sublayer.addition].add(p),
            found=found, train=train, gradient=scalar,
        )  # fmt: skip
    return tuple(
        Measured(t.sublayer, t.before.moments(), t.branch.moments(), t.after.moments(),
                 t.gradient.moments(), t.after_gradient.moments())
        for t in tallies.values()
    )  # fmt: skip


def differentiated(subject: Subject, batch: Batch, seed: int) -> Callable[[Any], Tensor]:
    """The scalar of an output whose gradients are measured; see `measure`."""
    causal = subject.layout(batch).stacks[-1].causal
    ids = batch.inputs.get("input_ids") if isinstance(batch.inputs, dict) else None

    def scalar(output: Any) -> Tensor:
        loss = getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            return loss
        logits = getattr(output, "logits", None)
        if causal and isinstance(logits, Tensor) and isinstance(ids, Tensor):
            if logits.shape[:2] == ids.shape:
                return _next_token(logits, ids.to(logits.device), batch.valid)
        first = _floating(output)
        noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(seed))
        return (first * noise.to(first.device, first.dtype)).sum()

    return scalar


def _next_token(logits: Tensor, ids: Tensor, valid: Tensor | None) -> Tensor:
    wanted = ids if valid is None else ids.masked_fill(~valid.to(ids.device), IGNORED)
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=IGNORED
    )


def _floating(output: Any) -> Tensor:
    first = first_output(output)
    if first is None:
        raise AttoscopeError("the model's output holds no floating tensor to differentiate")
    return first
