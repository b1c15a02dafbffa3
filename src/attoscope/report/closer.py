"""The way down to the text: rows of attention over their tokens, and evidence of findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup

from attoscope.diagnosis import Closeup, Mark
from attoscope.findings import Evidence, Finding
from attoscope.report.sentence import Around, marked
from attoscope.report.words import count, number, piece, place, quantity, spelt, visible

Anchors = Mapping[tuple[str, int], str]
_LARGE = Around(12, 5)
# Heads up to which so many tokens are shown around query and marks; beyond, only the marks.
_ROOM = ((400, Around(5, 1)), (1_500, Around(2, 0)))
MOST_LINKS = 200
MOST_COMPETITORS = 3
_TOKENS = (
    ("token", "position"), ("chosen", "chosen_position"), ("competitor", "competitor_position"),
)  # fmt: skip


def anchors(closeups: Sequence[Closeup]) -> dict[tuple[str, int], str]:
    """Where in the page each head's own row stands; under head −1, where its layer does."""
    sites: dict[str, int] = {}
    found: dict[tuple[str, int], str] = {}
    for one in _own(closeups):
        number_of = sites.setdefault(one.site, len(sites))
        found[one.site, -1] = f"at{number_of}"
        found[one.site, one.head if one.head is not None else -1] = f"h{number_of}-{one.head}"
    return found


def _own(closeups: Sequence[Closeup]) -> list[Closeup]:
    """The row that each head has."""
    return [c for c in closeups if c.finding is None and not c.why and c.head is not None]


def telling(closeups: Sequence[Closeup]) -> list[Closeup]:
    """The rows to show at large."""
    return [c for c in closeups if c.finding is None and c.why]


def spot(closeup: Closeup) -> str:
    """ "encoder, layer 3, head 4"."""
    track, index = place(closeup.site)
    where = f"{track}, layer {index}" if index.isdigit() else spelt(closeup.site)
    return where if closeup.head is None else f"{where}, head {closeup.head}"


def view(closeup: Closeup, where: Anchors) -> dict[str, Any]:
    """What the template shows of a row at large: its words, and a table of its marks."""
    keys = closeup.keys or closeup.text
    return {
        "closeup": closeup,
        "title": spot(closeup),
        "link": where.get((closeup.site, closeup.head if closeup.head is not None else -1)),
        "words": marked(closeup, _LARGE),
        "rows": [
            {
                "token": piece(keys.tokens[mark.position]),
                "position": mark.position,
                "weight": number(mark.value),
                "percent": f"{100 * min(max(_finite(mark.value), 0.0), 1.0):.1f}%",
                "margin": "" if mark.margin is None else number(mark.margin),
                "chosen": i == 0,
            }
            for i, mark in enumerate(closeup.marks)
        ],
        "query": piece(closeup.text.tokens[closeup.query or 0]),
        "scored": any(mark.margin is not None for mark in closeup.marks),
        "rest": number(closeup.rest),
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def compact(closeup: Closeup, around: Around | None, unit: str = "") -> Markup:
    """A row in two lines: the sentence (None leaves it out), and what was chosen over what."""
    keys = closeup.keys or closeup.text
    said = [
        _said(mark, keys.tokens[mark.position], i, unit) for i, mark in enumerate(closeup.marks)
    ]
    if closeup.query is None:
        line = Markup(", ").join(said) or Markup("no token has a number")
    else:
        asks = Markup("<b>{}</b>").format(piece(closeup.text.tokens[closeup.query]))
        line = Markup("{}: no weight is a number").format(asks)
        if said:
            others = Markup(" over ") + Markup(", ").join(said[1:]) if said[1:] else ""
            line = Markup("{} picks {}{}").format(asks, said[0], others)
    if around is None and closeup.text.kind != "patches":
        return Markup("<p>{}</p>").format(line)
    words = marked(closeup, around or _LARGE)
    return Markup('<p class="t" dir="auto">{}</p><p>{}</p>').format(words, line)


def _said(mark: Mark, token: str, index: int, unit: str) -> Markup:
    tag = Markup("<mark>{}</mark> {}") if index == 0 else Markup("<u>{}</u> {}")
    text = tag.format(piece(token), quantity(mark.value, unit) if unit else number(mark.value))
    if index and mark.margin is not None:
        text += Markup(" (by {})").format(number(mark.margin))
    return text


def layers(
    closeups: Sequence[Closeup], where: Anchors, svm: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """All heads' own rows, layer by layer; `svm` says what competes by the attention SVM."""
    facts = {(one["site"], one["head"]): one for one in svm}
    own = _own(closeups)
    around = _around(len(own))
    found: dict[str, dict[str, Any]] = {}
    for one in own:
        track, index = place(one.site)
        layer = found.setdefault(
            one.site,
            {
                "title": f"{track}, layer {index}" if index else one.site,
                "anchor": where[one.site, -1],
                "rows": [],
            },
        )
        layer["rows"].append(
            {
                "head": one.head,
                "anchor": where[one.site, one.head if one.head is not None else -1],
                "make": partial(_row, one, around, facts.get((one.site, one.head or 0))),
            }
        )
    return list(found.values())


def _row(closeup: Closeup, around: Around | None, facts: Mapping[str, Any] | None) -> Markup:
    row = compact(closeup, around)
    return row if facts is None else row + max_margin(facts)


def max_margin(facts: Mapping[str, Any]) -> Markup:
    """What holds the max-margin weight of a head in place, the strongest first."""
    said = [
        Markup("at <b>{}</b>, <mark>{}</mark> over <u>{}</u> {}").format(
            *(
                piece(one[name]) if one[name] is not None else f"position {one[position]}"
                for name, position in _TOKENS
            ),
            number(one["multiplier"]),
        )
        for one in facts["competitors"][:MOST_COMPETITORS]
    ]
    label = (facts["fingerprint"] or {}).get("label")
    end = Markup("; fingerprint: {}").format(label) if label else Markup("")
    line = Markup(", ").join(said) or Markup("nothing competes")
    return Markup("<p>SVM, share of the multipliers: {}{}</p>").format(line, end)


def _around(heads: int) -> Around | None:
    return next((around for most, around in _ROOM if heads <= most), None)


def about(closeups: Sequence[Closeup]) -> str:
    """How the rows were picked, and what is left out."""
    own = _own(closeups)
    if not own:
        return ""
    texts = {one.text for one in own if one.keys is None}
    documents = len({text.document for text in texts}) or 1
    longest = max((len(text.tokens) for text in texts), default=0)
    noun = "image" if any(text.kind == "patches" for text in texts) else "document"
    said = (
        f"One row of each head ({len(own):,}), from the first {count(documents, noun)} read "
        f"(at most {count(longest, 'token')} of each): the one that puts most attention on a "
        "token other than itself, its neighbours, the first and special ones. It is the row "
        "where the head is most decided, not a typical one: the maps above say what is typical."
    )
    around = _around(len(own))
    if around is None:
        said += " With so many heads only the marked tokens are shown, and no sentence."
    elif noun == "document":
        said += f" Shown are {around.query} tokens on each side of the query"
        said += ", and one beside each marked token." if around.marks else "."
    if any(text.kind == "positions" for text in texts):
        said += " Where it is not known what a token is, its position stands for it."
    if not any(mark.margin is not None for one in own for mark in one.marks):
        said += " This model gives weights but no scores, so there are no margins."
    return said + " The whole text is in report.json."


def of_finding(
    index: int, finding: Finding, closeups: Sequence[Closeup], where: Anchors
) -> dict[str, Any]:
    """The rows that show a finding, and links to the rows of the heads and layers it names."""
    shown = [one for one in closeups if one.finding == index]
    return {
        "rows": [
            {
                "title": spot(one),
                "link": where.get((one.site, one.head if one.head is not None else -1)),
                "why": one.why,
                "make": partial(
                    compact, one, _LARGE, "" if one.head is not None else finding.unit
                ),
            }
            for one in shown
        ],
        "links": _links(finding, where),
        "more": max(0, len(finding.heads) - MOST_LINKS),
    }


def _links(finding: Finding, where: Anchors) -> list[tuple[str, list[tuple[str, str]]]]:
    """By stack, text and anchor of named heads ("3.0": layer 3, head 0), else of layers. A point
    stands in the layer that it is in."""
    named: dict[str, list[tuple[str, str]]] = {}
    if finding.heads:
        for site, head in finding.heads[:MOST_LINKS]:
            if anchor := where.get((site, head)):
                track, index = place(site)
                named.setdefault(track, []).append((f"{index}.{head}", anchor))
    else:
        for site in finding.sites[:MOST_LINKS]:
            if anchor := _layer(site, where):
                track, index = place(site)
                named.setdefault(track, []).append((index, anchor))
    return list(named.items())


def _layer(point: str, where: Anchors) -> str:
    stack, _, index = point.rpartition(".")
    sites = [site for site, head in where if head == -1 and site.startswith(f"{stack}.")]
    if index in ("in", "final") and sites:
        return where[sites[0 if index == "in" else -1], -1]
    return where.get((point, -1), "")


def attempted(rows: list[dict[str, Any]], attempt: Callable[..., dict[str, Any]]) -> None:
    """Make each row; one that fails says so and leaves the others."""
    for row in rows:
        row["part"] = attempt(row.pop("make"), "row")


def evidence(each: Evidence) -> dict[str, str]:
    """One input that triggered a finding, in words."""
    where = spelt(each.site)
    if each.head is not None:
        where += f", head {each.head}"
    if each.document is not None:
        where += f", document {each.document}"
    return {
        "where": where,
        "token": "" if each.token is None else piece(each.token),
        "position": "" if each.position is None else str(each.position),
        "chosen": "" if each.chosen_token is None else piece(each.chosen_token),
        "chosen_position": "" if each.chosen_position is None else str(each.chosen_position),
        "value": "" if each.value is None else number(each.value),
        "text": "" if each.text is None else visible(each.text),
    }
