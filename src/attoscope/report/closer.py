"""The way down to the words: one row of attention over its tokens, and evidence of findings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attoscope.diagnosis import Closeup
from attoscope.findings import Evidence
from attoscope.report.words import number, piece, place, spelt, visible

_RIVALS = 4
_ROUND = 9
_WHOLE = 90


@dataclass(frozen=True, slots=True)
class Word:
    """One token as shown, and how it is marked.

    `gap` counts tokens left out before it; `joined` ones continue the word before.
    """

    text: str
    css: str
    hint: str
    gap: int = 0
    joined: bool = False


def view(closeup: Closeup) -> dict[str, Any]:
    """What the template shows: the words with their marks, and those most looked at."""
    weights = [0.0 if not math.isfinite(w) else w for w in closeup.weights]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: _RIVALS + 1]
    top = [i for i in order if weights[i] > 0]
    track, index = place(closeup.site)
    return {
        "closeup": closeup,
        "title": f"{track}, layer {index}, head {closeup.head}" if index else closeup.site,
        "words": _words(closeup, weights, top),
        "rows": [
            {
                "token": piece(closeup.tokens[i]),
                "position": i,
                "weight": number(weights[i]),
                "percent": f"{100 * min(max(weights[i], 0.0), 1.0):.1f}%",
                "chosen": i == top[0],
            }
            for i in top
        ],
        "query": piece(closeup.tokens[closeup.query]),
        "rest": number(max(0.0, 1 - sum(weights[i] for i in top))),
    }


def _words(closeup: Closeup, weights: list[float], top: list[int]) -> list[Word]:
    amount = len(closeup.tokens)
    marked = {closeup.query, *top}
    near = [any(abs(i - m) <= _ROUND for m in marked) for i in range(amount)]
    # Leaving out four words takes more room than they do.
    shown = [i for i in range(amount) if amount <= _WHOLE or any(near[max(0, i - 2) : i + 3])]
    # Where tokens bring their own space, those without one continue a word.
    spaced = any(len(token) > 1 and token[0] == " " for token in closeup.tokens)
    found, before = [], -1
    for i in shown:
        css = ["token"]
        if i == closeup.query:
            css.append("query")
        if top and i == top[0]:
            css.append("chosen")
        elif i in top:
            css.append("rival")
        hint = f"position {i}: {number(weights[i]) if i < len(weights) else 'no weight'}"
        joined = spaced and i > 0 and not closeup.tokens[i][:1].isspace()
        joined = joined and not closeup.tokens[i - 1].isspace() and i == before + 1
        word = Word(piece(closeup.tokens[i]), " ".join(css), hint, i - before - 1, joined)
        found.append(word)
        before = i
    if shown and shown[-1] < amount - 1:
        found.append(Word("", "", "", amount - 1 - shown[-1]))
    return found


def evidence(each: Evidence) -> dict[str, str]:
    """One input that triggered a finding, in words."""
    spot = spelt(each.site)
    if each.head is not None:
        spot += f", head {each.head}"
    if each.document is not None:
        spot += f", document {each.document}"
    return {
        "where": spot,
        "token": "" if each.token is None else piece(each.token),
        "position": "" if each.position is None else str(each.position),
        "chosen": "" if each.chosen_token is None else piece(each.chosen_token),
        "chosen_position": "" if each.chosen_position is None else str(each.chosen_position),
        "value": "" if each.value is None else number(each.value),
        "text": "" if each.text is None else visible(each.text),
    }
