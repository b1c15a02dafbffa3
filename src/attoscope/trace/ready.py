"""Ready batches: mappings of keyword arguments, padded on either side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.trace.counts import Counts
from attoscope.trace.subject import Subject
from attoscope.trace.types import Batch


def from_mapping(
    subject: Subject, inputs: Mapping[str, Any], limit: int, size: int, counts: Counts
) -> Iterator[Batch]:
    """A mapping of tensors, cut to `limit` tokens, in batches of at most `size`."""
    tensors = {str(name): _tensor(name, value) for name, value in inputs.items()}
    _with_batch_axis(tensors)
    axes = [v for v in tensors.values() if isinstance(v, Tensor) and v.dim() > 0]
    if not axes or not axes[0].numel():
        raise AttoscopeError(
            f"data: got a mapping of {', '.join(map(str, inputs)) or 'nothing'}; expected at "
            "least one tensor with something in it, such as input_ids or pixel_values"
        )
    documents = axes[0].shape[0]
    ids = tensors.get("input_ids")
    _check_mask(ids, tensors.get("attention_mask"))
    if isinstance(ids, Tensor) and "attention_mask" not in tensors:
        tensors["attention_mask"] = torch.ones_like(ids)
    tensors = _right_padded(tensors)
    dropped = torch.zeros(documents, dtype=torch.long)
    mask = tensors.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        if not bool(mask.sum(1).all()):
            raise AttoscopeError(
                f"data: {int((mask.sum(1) == 0).sum())} of {documents} sequences are padding "
                "only; leave them out"
            )
        dropped, length = mask[:, limit:].sum(1), mask.shape[1]
        tensors = {name: _cut(value, length, limit) for name, value in tensors.items()}
    for start in range(0, documents, size):
        for lost in dropped[start : start + size].tolist():
            counts.cut(int(lost))
        part = {k: _rows(v, documents, start, size) for k, v in tensors.items()}
        yield numbered(subject, with_decoder(subject, part), counts)


def _tensor(name: Any, value: Any) -> Any:
    """Arrays and lists of numbers as tensors; anything else as it is."""
    if not isinstance(value, (np.ndarray, list)):
        return value
    try:
        return torch.tensor(value)
    except (TypeError, ValueError) as error:
        raise AttoscopeError(
            f"data: {name} cannot be made a tensor ({str(error).splitlines()[0]}); expected "
            "numbers, every row as long as the others (pad shorter ones and give attention_mask)"
        ) from error


def _with_batch_axis(tensors: dict[str, Any]) -> None:
    """One sequence given without its batch axis gets one."""
    ids = tensors.get("input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 1:
        for name, value in tensors.items():
            if isinstance(value, Tensor) and value.shape == ids.shape:
                tensors[name] = value[None]


def _check_mask(ids: Any, mask: Any) -> None:
    """A mask over tokens has the shape of the ids; those of pairs of tokens have more axes."""
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.dim() > 2:
        return
    if mask.shape != ids.shape:
        raise AttoscopeError(
            f"data: got an attention_mask of shape {tuple(mask.shape)} beside input_ids of shape "
            f"{tuple(ids.shape)}; expected the same shape, 1 at each token that counts"
        )


def _right_padded(tensors: dict[str, Any]) -> dict[str, Any]:
    """Left-padded rows moved to the left edge, with everything that is per token."""
    mask = tensors.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return tensors
    first = mask.bool().int().argmax(1)
    if not bool(first.any()):
        return tensors
    length = mask.shape[1]
    index = (torch.arange(length) + first[:, None]) % length

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:2] != mask.shape:
            return value
        shape = (*index.shape, *[1] * (value.dim() - 2))
        return value.gather(1, index.reshape(shape).expand(value.shape))

    return {name: moved(value) for name, value in tensors.items()}


def _cut(value: Any, length: int, limit: int) -> Any:
    per_token = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length
    return value[:, :limit] if per_token else value


def _rows(value: Any, documents: int, start: int, size: int) -> Any:
    per_document = isinstance(value, Tensor) and value.dim() > 0
    if per_document and value.shape[0] == documents:
        return value[start : start + size]
    return value


def with_decoder(subject: Subject, inputs: dict[str, Any]) -> dict[str, Any]:
    """For encoder-decoder models: the decoder reads the same text, shifted by one."""
    config = subject.config
    wanted = getattr(config, "is_encoder_decoder", False) and "input_ids" in inputs
    if not wanted or "decoder_input_ids" in inputs:
        return inputs
    start = getattr(config, "decoder_start_token_id", None)
    start = getattr(config, "pad_token_id", 0) if start is None else start
    shifted = inputs["input_ids"].roll(1, 1)
    shifted[:, 0] = start or 0
    return {
        **inputs,
        "decoder_input_ids": shifted,
        "decoder_attention_mask": inputs["attention_mask"].clone(),
    }


def numbered(subject: Subject, inputs: dict[str, Any], counts: Counts) -> Batch:
    """A batch with its masks, its documents numbered on from those before."""
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    valid = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
    special = None
    if isinstance(ids, Tensor) and subject.tokenizer is not None:
        marks = torch.tensor(sorted(subject.special_ids), dtype=ids.dtype)
        special = torch.isin(ids, marks)
    decoder = inputs.get("decoder_attention_mask")
    read = inputs.get("decoder_input_ids")
    if decoder is None and isinstance(read, Tensor):
        decoder = torch.ones_like(read)
    first = next(v for v in inputs.values() if isinstance(v, Tensor) and v.dim() > 0)
    documents = tuple(range(counts.documents, counts.documents + first.shape[0]))
    counts.documents += len(documents)
    counts.tokens += int(valid.sum()) if valid is not None else 0
    return Batch(
        inputs, documents, valid, special, decoder.bool() if decoder is not None else None
    )
