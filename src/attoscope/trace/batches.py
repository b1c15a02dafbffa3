"""From texts, token ids, images or ready batches to `Batch`es, one at a time.

Sequences are padded on the right whatever the tokenizer prefers, and ready batches that are
padded on the left are moved: a model with a table of positions then gives each text the
positions that it would have alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.trace.subject import Subject
from attoscope.trace.types import Batch

DEFAULT_TOKENS = 512


@dataclass(slots=True)
class Counts:
    """What was fed: counted while batches are made, for the report."""

    documents: int = 0
    tokens: int = 0
    truncated: int = 0
    dropped_tokens: int = 0
    empty: int = 0
    notes: list[str] = field(default_factory=list)


def batches(
    subject: Subject,
    data: Any,
    *,
    max_tokens: int | None = None,
    batch_size: int = 8,
    counts: Counts | None = None,
) -> Iterator[Batch]:
    """Batches from `data`: a text, an iterable of texts, a ready batch (a mapping of keyword
    arguments, a tuple of positional ones, or one tensor), or images (uint8 arrays, or float
    arrays that are already pixel values).

    Texts are read as they are needed. Texts longer than `max_tokens` (512 unless given) or than
    the model's positions are cut, and `counts` says so. Raises `AttoscopeError` when nothing
    can be fed.
    """
    counts = counts if counts is not None else Counts()
    limit = _limit(subject, max_tokens)
    if isinstance(data, Batch):
        made: Iterable[Batch] = [data]
        counts.documents += len(data)
    elif isinstance(data, tuple) and data and all(isinstance(x, Tensor) for x in data):
        made = [_plain(data, data[0].shape[_axis(subject, data[0])], counts)]
    elif isinstance(data, dict):
        made = _ready(subject, data, limit, batch_size, counts)
    elif isinstance(data, str):
        made = _texts(subject, [data], limit, batch_size, counts)
    elif isinstance(data, (Tensor, np.ndarray)):
        made = _arrays(subject, data, limit, batch_size, counts)
    elif isinstance(data, Iterable):
        made = _iterable(subject, data, limit, batch_size, counts)
    else:
        raise AttoscopeError(
            f"data: got {type(data).__name__}; expected a text, an iterable of texts, a mapping "
            "of tensors, or an array of images"
        )
    any_made = False
    for batch in made:
        any_made = True
        yield batch
    if not any_made:
        raise AttoscopeError(_nothing(counts))


def _nothing(counts: Counts) -> str:
    if counts.empty:
        return (
            f"{counts.empty} text(s) given and none holds a token beside special ones; give at "
            "least one text with words in it"
        )
    return "no text or image was given; give at least one"


def _iterable(
    subject: Subject, data: Iterable[Any], limit: int, size: int, counts: Counts
) -> Iterator[Batch]:
    iterator = iter(data)
    first = next(iterator, None)
    if first is None:
        return
    rest = _chain(first, iterator)
    if isinstance(first, str):
        yield from _texts(subject, rest, limit, size, counts)
    elif isinstance(first, dict):
        for one in rest:
            yield from _ready(subject, one, limit, size, counts)
    elif isinstance(first, Batch):
        for batch in rest:
            counts.documents += len(batch)
            yield batch
    elif isinstance(first, (Tensor, np.ndarray)) or hasattr(first, "convert"):
        while chunk := list(islice(rest, size)):
            yield _images(subject, chunk, counts)
    elif (
        isinstance(first, (tuple, list))
        and first
        and all(isinstance(part, Tensor) for part in first)
    ):
        for parts in rest:
            yield _plain(tuple(parts), parts[0].shape[_axis(subject, parts[0])], counts)
    else:
        raise AttoscopeError(
            f"data: got an iterable of {type(first).__name__}; expected texts, images, or "
            "mappings of tensors"
        )


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


# Texts -------------------------------------------------------------------------------------


def _texts(
    subject: Subject, texts: Iterable[Any], limit: int, size: int, counts: Counts
) -> Iterator[Batch]:
    if subject.tokenizer is None:
        raise AttoscopeError(
            f"{subject.name} has no tokenizer, so texts cannot be fed; give token ids as a ready "
            "batch (a mapping with input_ids, or --batch), or put tokenizer.json beside the model"
        )
    if not subject.takes("attention_mask"):
        size = 1  # nothing would hide the padding of a shorter text from the others' length
    encoded: list[tuple[list[int], dict[str, list[int]]]] = []
    for text in texts:
        if not isinstance(text, str):
            raise AttoscopeError(
                f"data: text number {counts.documents + len(encoded) + counts.empty} is a "
                f"{type(text).__name__}; expected a string"
            )
        ids, extra = _encode(subject.tokenizer, text, limit, counts)
        if not set(ids) - set(subject.tokenizer.all_special_ids or ()):
            counts.empty += 1
            continue
        encoded.append((ids, extra))
        if len(encoded) == size:
            yield _padded(subject, encoded, counts)
            encoded = []
    if encoded:
        yield _padded(subject, encoded, counts)


def _encode(
    tokenizer: Any, text: str, limit: int, counts: Counts
) -> tuple[list[int], dict[str, list[int]]]:
    """Token ids, cut to `limit` with the closing special token kept, and token types."""
    full = tokenizer(text, truncation=False, verbose=False)["input_ids"]
    kept = tokenizer(text, truncation=True, max_length=limit) if len(full) > limit else None
    if kept is not None:
        counts.truncated += 1
        counts.dropped_tokens += len(full) - len(kept["input_ids"])
    else:
        kept = tokenizer(text, verbose=False)
    extra = {k: kept[k] for k in ("token_type_ids",) if k in kept}
    return list(kept["input_ids"]), extra


def _padded(
    subject: Subject, encoded: list[tuple[list[int], dict[str, list[int]]]], counts: Counts
) -> Batch:
    longest = max(len(ids) for ids, _ in encoded)
    # The value does not matter: the mask hides it. It only has to be in the vocabulary.
    pad = getattr(subject.tokenizer, "pad_token_id", None) or 0
    ids = torch.full((len(encoded), longest), pad)
    mask = torch.zeros(len(encoded), longest, dtype=torch.long)
    types = torch.zeros_like(ids)
    for row, (one, extra) in enumerate(encoded):
        ids[row, : len(one)] = torch.tensor(one)
        mask[row, : len(one)] = 1
        if "token_type_ids" in extra:
            types[row, : len(one)] = torch.tensor(extra["token_type_ids"])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in encoded[0][1]:
        inputs["token_type_ids"] = types
    return _numbered(subject, _with_decoder(subject, inputs), counts)


def _with_decoder(subject: Subject, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """For encoder-decoder models: the decoder reads the same text, shifted by one."""
    config = subject.config
    if not getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in inputs:
        return inputs
    if "input_ids" not in inputs:
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


# Ready batches -----------------------------------------------------------------------------


def _ready(
    subject: Subject, inputs: dict[str, Any], limit: int, size: int, counts: Counts
) -> Iterator[Batch]:
    tensors: dict[str, Any] = {
        k: torch.tensor(v) if isinstance(v, (np.ndarray, list)) else v
        for k, v in inputs.items()
    }
    axes = [v for v in tensors.values() if isinstance(v, Tensor) and v.dim() > 0]
    if not axes:
        raise AttoscopeError(
            f"data: got a mapping of {', '.join(inputs) or 'nothing'}; expected at least one "
            "tensor, such as input_ids or pixel_values"
        )
    _one_dimensional(tensors)
    axes = [v for v in tensors.values() if isinstance(v, Tensor) and v.dim() > 0]
    documents = axes[0].shape[0]
    ids = tensors.get("input_ids")
    if isinstance(ids, Tensor) and "attention_mask" not in tensors:
        tensors["attention_mask"] = torch.ones_like(ids)
    tensors = _right_padded(tensors)
    mask = tensors.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape[1] > limit:
        lost = mask[:, limit:].sum(1)
        counts.truncated += int((lost > 0).sum())
        counts.dropped_tokens += int(lost.sum())
        length = mask.shape[1]
        tensors = {k: _cut(v, length, limit) for k, v in tensors.items()}
    if isinstance(mask, Tensor) and not bool(mask.sum(1).all()):
        raise AttoscopeError(
            f"data: {int((mask.sum(1) == 0).sum())} of {documents} sequences are padding only; "
            "leave them out"
        )
    for start in range(0, documents, size):
        part = {
            k: v[start : start + size]
            if isinstance(v, Tensor) and v.dim() > 0 and v.shape[0] == documents
            else v
            for k, v in tensors.items()
        }
        yield _numbered(subject, _with_decoder(subject, part), counts)


def _one_dimensional(tensors: dict[str, Any]) -> None:
    """One sequence given without its batch axis gets one."""
    ids = tensors.get("input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 1:
        for name, value in tensors.items():
            if isinstance(value, Tensor) and value.shape == ids.shape:
                tensors[name] = value[None]


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


def _numbered(subject: Subject, inputs: dict[str, Any], counts: Counts) -> Batch:
    """A batch with its masks, its documents numbered on from those before."""
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    valid = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
    special = None
    if isinstance(ids, Tensor) and subject.tokenizer is not None:
        marks = torch.tensor(sorted(subject.tokenizer.all_special_ids or []), dtype=ids.dtype)
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


# Arrays ------------------------------------------------------------------------------------


def _arrays(
    subject: Subject, data: Any, limit: int, size: int, counts: Counts
) -> Iterator[Batch]:
    """Token ids (integers, two axes), images (uint8), or whatever floats the module takes."""
    # A copy: arrays may be read-only, and a tensor that shares their memory must not be.
    tensor = data if isinstance(data, Tensor) else torch.tensor(data)
    if tensor.dtype == torch.uint8 and tensor.dim() in (3, 4):
        for start in range(0, tensor.shape[0], size):
            yield _images(subject, list(tensor[start : start + size].numpy()), counts)
    elif not tensor.is_floating_point() and tensor.dim() in (1, 2):
        yield from _ready(subject, {"input_ids": tensor}, limit, size, counts)
    elif tensor.dim() == 4 and subject.takes("pixel_values"):
        yield from _ready(subject, {"pixel_values": tensor}, limit, size, counts)
    elif tensor.is_floating_point() and tensor.dim() >= 2:
        axis = _axis(subject, tensor)
        for part in tensor.split(size, axis):
            yield _plain(part, part.shape[axis] if part.dim() > 2 else 1, counts)
    else:
        raise AttoscopeError(
            f"data: got an array of {tensor.dtype} with shape {tuple(tensor.shape)}; expected "
            "token ids (sequence, token), images (image, height, width[, channel]) as uint8, or "
            "floats (sequence, token, width)"
        )


def _images(subject: Subject, images: list[Any], counts: Counts) -> Batch:
    if all(_is_pixels(image) for image in images):
        pixels = torch.stack([torch.tensor(np.asarray(image)) for image in images])
    elif subject.image_processor is None:
        raise AttoscopeError(
            f"{subject.name} has no image processor, so raw images cannot be fed; put "
            "preprocessor_config.json beside the model, or give pixel values as floats "
            "(image, channel, height, width)"
        )
    else:
        try:
            images = [_with_channels(image) for image in images]
            pixels = subject.image_processor(images=images, return_tensors="pt")["pixel_values"]
        except (ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
            raise AttoscopeError(
                f"images cannot be prepared for {subject.name} ({str(error).splitlines()[0]}); "
                "expected images of the kind that its preprocessor_config.json describes"
            ) from error
    return _numbered(subject, {"pixel_values": pixels}, counts)


def _with_channels(image: Any) -> Any:
    """A grey array without a channel axis becomes a grey image, which processors understand."""
    if isinstance(image, (Tensor, np.ndarray)) and image.ndim == 2:
        from PIL import Image

        return Image.fromarray(np.asarray(image))
    return image


def _is_pixels(image: Any) -> bool:
    return isinstance(image, (Tensor, np.ndarray)) and np.asarray(image).dtype.kind == "f"


def _plain(inputs: Any, documents: int, counts: Counts) -> Batch:
    numbers = tuple(range(counts.documents, counts.documents + documents))
    counts.documents += documents
    return Batch(inputs, numbers)


def _axis(subject: Subject, tensor: Tensor) -> int:
    """Which axis counts sequences: the second in a torch module that puts time first."""
    first = any(
        isinstance(m, nn.MultiheadAttention) and not m.batch_first
        for m in subject.model.modules()
    )
    return 1 if first and tensor.dim() == 3 else 0


# Limits ------------------------------------------------------------------------------------


def _limit(subject: Subject, max_tokens: int | None) -> int:
    """The longest sequence to feed: what was asked, the position table, the tokenizer's own."""
    if max_tokens is not None and max_tokens < 1:
        raise AttoscopeError(f"max_tokens: got {max_tokens}; expected at least 1")
    limits = [DEFAULT_TOKENS if max_tokens is None else max_tokens]
    own = getattr(subject.tokenizer, "model_max_length", None)
    if isinstance(own, int) and 0 < own < 10**9:
        limits.append(own)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        table = getattr(subject.config, name, None)
        if isinstance(table, int) and table > 0:
            limits.append(table - _reserved(subject.model, table))
    return min(limits)


def _reserved(model: nn.Module, table: int) -> int:
    """Positions that a table keeps for padding: tables with a padding index start after it."""
    try:
        words = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        words = None
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == table:
            if module is not words:
                return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0
