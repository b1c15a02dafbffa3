"""From texts, token ids, images or ready batches to `Batch`es, one at a time.

Sequences are padded on the right whatever the tokenizer prefers, and ready batches that are
padded on the left are moved: a model with a table of positions then gives each text the
positions that it would have alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.trace.arrays import from_array, from_floats, from_images, positional
from attoscope.trace.counts import Counts
from attoscope.trace.ready import from_mapping
from attoscope.trace.subject import Subject
from attoscope.trace.texts import from_ids, from_texts
from attoscope.trace.types import Batch

DEFAULT_TOKENS = 512


def batches(
    subject: Subject,
    data: Any,
    *,
    max_tokens: int | None = None,
    batch_size: int = 8,
    counts: Counts | None = None,
) -> Iterator[Batch]:
    """Batches from `data`: a text, an iterable of texts or of lists of token ids, a ready batch
    (a mapping of keyword arguments, a tuple of positional ones, or one tensor), or images (uint8
    arrays, or float arrays that are already pixel values).

    Data are read as they are needed. Sequences of tokens longer than `max_tokens` (512 unless
    given) or than the model's positions are cut, and `counts` says so; positional inputs are fed
    as they are. Raises `AttoscopeError` when nothing can be fed.
    """
    counts = counts if counts is not None else Counts()
    limit = counts.limit = _limit(subject, max_tokens)
    if isinstance(data, Batch):
        made: Iterable[Batch] = _given(counts, [data])
    elif isinstance(data, tuple) and data and all(isinstance(x, Tensor) for x in data):
        made = [positional(subject, data, counts)]
    elif isinstance(data, Mapping):
        made = from_mapping(subject, data, limit, batch_size, counts)
    elif isinstance(data, str):
        made = from_texts(subject, [data], limit, batch_size, counts)
    elif isinstance(data, np.ndarray) and data.dtype.kind in "USO":
        made = _iterable(subject, data.tolist(), limit, batch_size, counts)
    elif isinstance(data, (Tensor, np.ndarray)):
        made = from_array(subject, data, limit, batch_size, counts)
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
) -> Iterable[Batch]:
    """By what the first item is; the others must be of its kind."""
    iterator = iter(data)
    first = next(iterator, None)
    if first is None:
        return []
    rest = chain([first], iterator)
    if isinstance(first, str):
        return from_texts(subject, rest, limit, size, counts)
    if isinstance(first, Mapping):
        return chain.from_iterable(
            from_mapping(subject, one, limit, size, counts) for one in rest
        )
    if isinstance(first, Batch):
        return _given(counts, rest)
    if _is_image(subject, first):
        return from_images(subject, rest, size, counts)
    if isinstance(first, (Tensor, np.ndarray)):
        return from_floats(subject, rest, counts)
    if isinstance(first, (tuple, list)) and first:
        if all(isinstance(part, Tensor) for part in first):
            return (positional(subject, tuple(parts), counts) for parts in rest)
        if all(isinstance(part, int) for part in first):
            return from_ids(subject, rest, limit, size, counts)
    raise AttoscopeError(
        f"data: got an iterable of {type(first).__name__}; expected texts, lists of token ids, "
        "images, or mappings of tensors"
    )


def _is_image(subject: Subject, item: Any) -> bool:
    """A picture object, or an array where the model takes pixels."""
    if isinstance(item, (Tensor, np.ndarray)):
        byte = str(item.dtype).endswith("uint8")
        return byte or (item.ndim in (3, 4) and subject.takes("pixel_values", exactly=True))
    return hasattr(item, "convert")


def _given(counts: Counts, made: Iterable[Batch]) -> Iterator[Batch]:
    for batch in made:
        counts.documents += len(batch)
        yield batch


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
