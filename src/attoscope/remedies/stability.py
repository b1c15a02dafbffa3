"""How strong a pull towards the first values a running model's attention bears."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attoscope.remedies.functional import stability_limit
from attoscope.trace import AttentionCall, Batch, Layer, Subject, attention_rows, batches, watch
from attoscope.trace.subject import head_of, subject_of

TOKENS = 128


def stability(model: Any, data: Any) -> dict[str, Float[Tensor, " head"]]:
    """Per site, for each head, the strength of NeuTRENO below which such layers settle.

    `stability_limit` of the head's attention, the least over up to two documents (the longest of
    the first batch; their first 128 tokens at most, padding cut off): `1 + lambda_min` where the
    eigenvalues are real. From 0 to 2, in float64; a strength above it lets differences between
    tokens grow from layer to layer, in a stack without residual stream or MLP. Cross-attention is
    left out.

    Args:
        model: a live model or a `Subject`.
        data: what it reads, as for `attoscope.diagnose`.

    Source: the stacked layer of arXiv 2312.00751; the limit is derived here.
    """
    subject = subject_of(model)
    batch = next(iter(batches(subject, data, max_tokens=TOKENS, batch_size=2)))
    return limits(subject, head_of(batch, tokens=TOKENS))


def limits(subject: Subject, batch: Batch) -> dict[str, Float[Tensor, " head"]]:
    """`stability` on a ready batch."""
    found: dict[str, Tensor] = {}

    def visit(layer: Layer, _: Batch) -> None:
        for call in layer.calls:
            if not call.site.call.startswith("cross"):
                found[str(call.site)] = _least(call, layer.valid)

    watch(subject, batch, visit)
    return found


def _least(call: AttentionCall, valid: Tensor) -> Tensor:
    size, _, tokens, _ = call.shape
    tokens = min(tokens, TOKENS)
    rows = attention_rows(call, torch.arange(tokens, device=valid.device).expand(size, -1))
    each = []
    for weights, mine in zip(rows.weights, valid[:, :tokens], strict=True):
        kept = mine.nonzero()[:, 0]
        part = weights[:, kept][:, :, kept]
        # A longer image or document is cut: what is left of a row sums to one again.
        each.append(stability_limit(part / part.sum(-1, keepdim=True).clamp(min=1e-12)))
    return torch.stack(each).amin(0)


def above(found: dict[str, Tensor], strength: float, inputs: str) -> str | None:
    """A sentence where a strength is above the limit of some head, or None."""
    over = {site: int((limit < strength).sum()) for site, limit in found.items()}
    heads = sum(len(limit) for limit in found.values())
    count = sum(over.values())
    if not count:
        return None
    site = min(found, key=lambda name: float(found[name].min()))
    return (
        f"strength {strength:g} is above the stability limit of {count} of {heads} heads on "
        f"{inputs} (least: {float(found[site].min()):.2f} in {site}): layers of that kind "
        "alone would let differences between tokens grow"
    )
