"""Texts and lists of token ids as padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.trace.counts import Counts
from attoscope.trace.ready import numbered, with_decoder
from attoscope.trace.subject import Subject
from attoscope.trace.types import Batch


@dataclass(frozen=True, slots=True)
class _Encoded:
    """One document as token ids; `types` where the tokenizer gives token types."""

    ids: list[int]
    types: list[int] | None = None
    dropped: int = 0


def from_texts(
    subject: Subject, texts: Iterable[Any], limit: int, size: int, counts: Counts
) -> Iterator[Batch]:
    """Texts, read one batch at a time; those without a word are left out and counted."""
    if subject.tokenizer is None:
        raise AttoscopeError(
            f"{subject.name} has no tokenizer, so texts cannot be fed; give token ids as a ready "
            "batch (a mapping with input_ids, or --batch), or put tokenizer.json beside the model"
        )
    _check_limit(subject.tokenizer, limit)
    return _batched(subject, _encode_all(subject, texts, limit, counts), size, counts)


def from_ids(
    subject: Subject, lists: Iterable[Any], limit: int, size: int, counts: Counts
) -> Iterator[Batch]:
    """Lists of token ids, of any lengths."""
    encoded = (_Encoded(list(ids)[:limit], None, max(0, len(ids) - limit)) for ids in lists)
    return _batched(subject, encoded, size, counts)


def _check_limit(tokenizer: Any, limit: int) -> None:
    added = tokenizer.num_special_tokens_to_add()
    if limit <= added:
        raise AttoscopeError(
            f"max_tokens: got {limit}, but the tokenizer adds {added} special tokens to each text; "
            f"expected at least {added + 1}"
        )


def _encode_all(
    subject: Subject, texts: Iterable[Any], limit: int, counts: Counts
) -> Iterator[_Encoded]:
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise AttoscopeError(
                f"data: text number {number} is a {type(text).__name__}; expected a string"
            )
        encoded = _encode(subject.tokenizer, text, limit)
        if set(encoded.ids) - subject.special_ids:
            yield encoded
        else:
            counts.empty += 1


def _encode(tokenizer: Any, text: str, limit: int) -> _Encoded:
    """Cut to `limit` tokens with the closing special token kept."""
    made = tokenizer(text, verbose=False)
    whole = len(made["input_ids"])
    if whole > limit:
        made = tokenizer(text, truncation=True, max_length=limit)
    ids = list(made["input_ids"])
    types = list(made["token_type_ids"]) if "token_type_ids" in made else None
    return _Encoded(ids, types, whole - len(ids))


def _batched(
    subject: Subject, encoded: Iterable[_Encoded], size: int, counts: Counts
) -> Iterator[Batch]:
    if not subject.takes("attention_mask"):
        size = 1  # nothing would hide the padding of a shorter text from the others' length
    waiting: list[_Encoded] = []
    for one in encoded:
        waiting.append(one)
        if len(waiting) == size:
            yield _padded(subject, waiting, counts)
            waiting = []
    if waiting:
        yield _padded(subject, waiting, counts)


def _padded(subject: Subject, encoded: list[_Encoded], counts: Counts) -> Batch:
    # The value of padding does not matter: the mask hides it. It must be in the vocabulary.
    pad = getattr(subject.tokenizer, "pad_token_id", None) or 0
    shape = len(encoded), max(len(one.ids) for one in encoded)
    ids, mask = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long)
    types = torch.zeros(shape, dtype=torch.long)
    for row, one in enumerate(encoded):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
        mask[row, : len(one.ids)] = 1
        if one.types is not None:
            types[row, : len(one.ids)] = torch.tensor(one.types)
        counts.cut(one.dropped)
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": mask}
    if encoded[0].types is not None:
        inputs["token_type_ids"] = types
    return numbered(subject, with_decoder(subject, inputs), counts)
