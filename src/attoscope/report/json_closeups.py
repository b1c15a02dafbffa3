"""Close-ups as plain data: each text once, rows refer to it by its number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from attoscope.diagnosis import Closeup, Mark, Text


def to_dict(closeups: Sequence[Closeup]) -> dict[str, Any]:
    """The keys `texts` and `closeups` of a report."""
    numbers: dict[Text, int] = {}
    for one in closeups:
        for text in (one.text, one.keys):
            if text is not None:
                numbers.setdefault(text, len(numbers))
    return {
        "texts": [asdict(text) for text in numbers],
        "closeups": [
            {
                "site": one.site,
                "head": one.head,
                "text": numbers[one.text],
                "query": one.query,
                "marks": [asdict(mark) for mark in one.marks],
                "rest": one.rest,
                "keys": None if one.keys is None else numbers[one.keys],
                "finding": one.finding,
                "why": one.why,
            }
            for one in closeups
        ],
    }


def back(data: Mapping[str, Any]) -> tuple[Closeup, ...]:
    """The close-ups of a report's plain data."""
    if data.get("schema_version") == 1:
        return tuple(_first_version(each) for each in data.get("closeups", ()))
    texts = [_text(each) for each in data.get("texts", ())]
    return tuple(
        Closeup(
            **{
                **each,
                "text": texts[each["text"]],
                "keys": None if each["keys"] is None else texts[each["keys"]],
                "marks": tuple(_mark_back(mark) for mark in each["marks"]),
            }
        )
        for each in data.get("closeups", ())
    )


def _text(each: Mapping[str, Any]) -> Text:
    grid = each["grid"]
    return Text(
        **{
            **each,
            "tokens": tuple(each["tokens"]),
            "grid": None if grid is None else (grid[0], grid[1]),
        }
    )


def _mark_back(mark: Mapping[str, Any]) -> Mark:
    return Mark(**{**mark, "value": math.nan if mark["value"] is None else mark["value"]})


def _first_version(each: Mapping[str, Any]) -> Closeup:
    """A close-up that holds the weights of all tokens and no scores."""
    weights = [0.0 if w is None else float(w) for w in each["weights"]]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[:4]
    marks = tuple(Mark(i, weights[i]) for i in order if weights[i] > 0)
    text = Text(each["document"], "words", tuple(each["tokens"]))
    rest = max(0.0, 1.0 - sum(mark.value for mark in marks))
    return Closeup(
        each["site"], each["head"], text, each["query"], marks, rest, why=each["why"]
    )
