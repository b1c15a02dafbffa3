"""Token ids and patches in words, for evidence and close-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attoscope.findings import Evidence, Finding

_CONTEXT = 6


def many(count: int, thing: str) -> str:
    """A count with its thing: 1 document, 2 documents, 1,024 documents."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def piece(tokenizer: Any, token: int) -> str:
    """One token as a person reads it; the tokenizer's own piece where it does not decode."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if not text or "\ufffd" in text:
        text = str(tokenizer.convert_ids_to_tokens(token))
    return str(text)


def pieces(tokenizer: Any, ids: Any) -> tuple[str, ...]:
    """All tokens of a document, or numbers when there is no tokenizer."""
    if tokenizer is None:
        return tuple(f"[{int(i)}]" for i in ids)
    return tuple(piece(tokenizer, int(i)) for i in ids)


def in_words(
    findings: Sequence[Finding],
    ids: dict[int, NDArray[np.int32]],
    tokenizer: Any,
    readers: frozenset[str],
) -> tuple[Finding, ...]:
    """The findings with the tokens of their evidence filled in, and some text around them.

    Only at sites of `readers`: other stacks (a vision tower, a decoder) have other tokens.
    """

    def worded(evidence: Evidence) -> Evidence:
        reads = any(evidence.site.startswith(f"{stack}.") for stack in readers)
        return _with_words(evidence, ids, tokenizer) if reads else evidence

    return tuple(replace(f, evidence=tuple(map(worded, f.evidence))) for f in findings)


def _with_words(
    evidence: Evidence, ids: dict[int, NDArray[np.int32]], tokenizer: Any
) -> Evidence:
    document = ids.get(evidence.document) if evidence.document is not None else None
    if document is None or evidence.position is None or evidence.position >= len(document):
        return evidence
    chosen = evidence.chosen_position
    start = max(0, evidence.position - _CONTEXT)
    around = document[start : evidence.position + _CONTEXT + 1]
    return replace(
        evidence,
        token=pieces(tokenizer, document[evidence.position : evidence.position + 1])[0],
        chosen_token=pieces(tokenizer, document[chosen : chosen + 1])[0]
        if chosen is not None and chosen < len(document)
        else None,
        text=_joined(tokenizer, around),
    )


def _joined(tokenizer: Any, ids: Any) -> str:
    if tokenizer is None:
        return " ".join(f"[{int(i)}]" for i in ids)
    return str(tokenizer.decode([int(i) for i in ids], clean_up_tokenization_spaces=False))
