"""Heads that are modules of their own, put back together as the heads of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attoscope.trace.types import AttentionCall


def are_heads(modules: Sequence[str], heads: Sequence[int]) -> bool:
    """Whether calls in one layer are single heads that stand in one numbered list."""
    if len(modules) < 2 or any(count != 1 for count in heads):
        return False
    lists = {name.rpartition(".")[0] for name in modules}
    numbers = [name.rpartition(".")[2] for name in modules]
    return len(lists) == 1 and all(n.isdigit() for n in numbers) and len(set(numbers)) > 1


def as_heads(calls: Sequence[AttentionCall]) -> AttentionCall:
    """One call with as many heads as there were calls; masks of their own are kept by head."""
    first = calls[0]

    def joined(name: str, axis: int = 1) -> Tensor | None:
        parts = [getattr(call, name) for call in calls]
        return None if any(part is None for part in parts) else torch.cat(parts, axis)

    same = all(call.mask is first.mask for call in calls)
    return replace(
        first,
        query=joined("query"),
        key=joined("key"),
        value=joined("value"),
        mask=first.mask if same else joined("mask"),
        probabilities=joined("probabilities"),
        raw_scores=joined("raw_scores"),
        output=joined("output", 2),
        output_weight=None,
        module=first.module.rpartition(".")[0],
    )
