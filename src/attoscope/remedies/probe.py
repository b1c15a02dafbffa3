"""What a model is run on to find its places: the data given, or made up from its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.trace import Batch, Subject, batches
from attoscope.trace.subject import head_of

TOKENS, PADDED = 12, 4


def probe_batch(subject: Subject, data: Any) -> Batch:
    """A small batch from `data`, or random ids or pixels where it is None."""
    if data is None:
        data = made_up(subject)
    return head_of(next(iter(batches(subject, data, batch_size=2))))


def made_up(subject: Subject) -> dict[str, Tensor]:
    """Two random inputs of the kind that a Hugging Face configuration describes.

    Raises `AttoscopeError` for a module without one.
    """
    config, kind = subject.config, getattr(subject.model, "main_input_name", None)
    generator = torch.Generator().manual_seed(0)
    if kind == "pixel_values" and hasattr(config, "image_size"):
        side, channels = config.image_size, getattr(config, "num_channels", 3)
        height, width = (side, side) if isinstance(side, int) else side
        return {"pixel_values": torch.randn(2, channels, height, width, generator=generator)}
    words = getattr(config, "vocab_size", None)
    if kind != "input_ids" or not isinstance(words, int):
        if config is not None and kind is not None:
            raise AttoscopeError(
                f"data: none was given, and inputs are made up only for models that read token ids "
                f"or pixels and nothing else, which is not known of {subject.name}; give a batch "
                "that it reads, as data"
            )
        raise AttoscopeError(
            f"data: none was given and {subject.name} has no configuration to make inputs up from; "
            "give a batch that it reads, as data"
        )
    ids = torch.randint(min(5, words - 1), words, (2, TOKENS), generator=generator)
    return {"input_ids": ids}


def with_padding(subject: Subject, batch: Batch) -> Batch:
    """The batch with the end of its second sequence padded, where the model takes such a mask.

    A batch that has padding already, or whose model takes none, is given back as it is.
    """
    if batch.valid is not None and not bool(batch.valid.all()):
        return batch
    inputs = batch.inputs
    known = isinstance(inputs, dict) and isinstance(inputs.get("input_ids"), Tensor)
    if not known or not subject.takes("attention_mask", exactly=True) or len(batch) < 2:
        return batch
    valid = torch.ones_like(inputs["input_ids"])
    if valid.shape[1] <= PADDED:
        return batch
    valid[1, -PADDED:] = 0
    return replace(batch, inputs={**inputs, "attention_mask": valid}, valid=valid.bool())
