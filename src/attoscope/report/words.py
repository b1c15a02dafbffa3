"""Numbers, places and tokens in words: one manner for the terminal and the page."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

MISSING = "not computed"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def missing(value: Any) -> bool:
    """True for None, NaN and infinity."""
    return value is None or not math.isfinite(value)


def number(value: float | int | None) -> str:
    """Three significant digits, thousands apart, a true minus; "not computed" for NaN."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        mantissa, exponent = f"{size:.1e}".split("e")
        text = f"{mantissa} × 10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    elif size >= 99.95 or float(size).is_integer():
        text = f"{size:,.0f}"
    elif size >= 9.995:
        text = f"{size:.1f}"
    elif size >= 0.9995:
        text = f"{size:.2f}"
    else:
        places = 3 if size >= 0.00995 else 4 if size >= 0.000995 else 5
        text = f"{size:.{places}f}"
    return f"−{text}" if value < 0 else text


def quantity(value: float | int | None, unit: str) -> str:
    """A number with its unit: "164×", "3.20 nats", "0.573"."""
    text = number(value)
    if missing(value) or unit in ("", "share"):
        return text
    if unit in ("ratio", "times", "×"):
        return f"{text}×"
    if unit in ("%", "percent"):
        return f"{text} %"
    return f"{text} {unit}"


def interval(low: float | int | None, high: float | int | None) -> str:
    """ "159–169"; "−0.10 to 0.20" where a sign would be misread as a dash; "" without one."""
    if missing(low) or missing(high):
        return ""
    assert low is not None and high is not None
    if low < 0 or high < 0 or "×" in number(low) + number(high):
        return f"{number(low)} to {number(high)}"
    return f"{number(low)}–{number(high)}"


def count(amount: int, noun: str, many: str = "") -> str:
    """ "1 head", "1,200 heads"."""
    return f"{amount:,} {noun if amount == 1 else many or noun + 's'}"


def in_words(amount: int) -> str:
    """ "two" … "nine", then digits."""
    names = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return names[amount] if amount < len(names) else f"{amount:,}"


def size_of(parameters: float | int | None) -> str:
    """Parameters with a prefix: "134.5 M"."""
    if missing(parameters):
        return ""
    assert parameters is not None
    for limit, prefix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= limit:
            return f"{parameters / limit:.1f} {prefix}"
    return f"{parameters:.0f}"


_PLACE = re.compile(r"^(?P<stack>.+?)\.(?P<index>\d+|in|final)(?:\.(?P<call>.+))?$")


def place(site: str) -> tuple[str, str]:
    """Track and position of a site or point: "decoder.3.cross" is ("decoder cross", "3")."""
    found = _PLACE.match(site)
    if not found:
        return site, ""
    call = found["call"]
    return found["stack"] if call in (None, "self") else f"{found['stack']} {call}", found[
        "index"
    ]


def spelt(site: str) -> str:
    """A site or point in words: "decoder cross 3"."""
    return " ".join(place(site)).strip()


def tracks(sites: Iterable[str]) -> dict[str, list[int]]:
    """Which entries of `sites` belong to each stack and call, in order."""
    found: dict[str, list[int]] = {}
    for i, site in enumerate(sites):
        found.setdefault(place(site)[0], []).append(i)
    return found


def where(sites: Sequence[str], heads: Sequence[tuple[str, int]] = (), most: int = 6) -> str:
    """Sites and heads in short: "encoder layers 0–3 · 98 heads"; few heads by name."""
    if heads and len(heads) <= most:
        by_site: dict[str, list[str]] = {}
        for site, head in heads:
            by_site.setdefault(site, []).append(str(head))
        return "; ".join(
            f"{_layers(*place(site))}, head{'s' if len(each) > 1 else ''} {', '.join(each)}"
            for site, each in by_site.items()
        )
    parts = []
    for track, members in tracks(sites).items():
        parts.append(_layers(track, *(place(sites[i])[1] for i in members)))
    text = "; ".join(parts) or "the whole model"
    return f"{text} · {count(len(heads), 'head')}" if heads else text


def _layers(track: str, *labels: str) -> str:
    """ "decoder layers 0–3, 5, final" from layer labels."""
    amount = sum(label.isdigit() for label in set(labels))
    noun = f" layer{'s' if amount > 1 else ''}" if amount else ""
    return f"{track}{noun} {_ranges(list(labels))}".strip()


def _ranges(labels: list[str]) -> str:
    """ "0–3, 5, final" from layer labels."""
    layers = sorted({int(label) for label in labels if label.isdigit()})
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    named = [label for label in dict.fromkeys(labels) if label and not label.isdigit()]
    return ", ".join(
        [
            *("in" for name in named if name == "in"),
            *parts,
            *(name for name in named if name != "in"),
        ]
    )


_SHOWN = {"\n": "↵", "\r": "␍", "\t": "⇥", " ": "␣", "\u00a0": "⍽"}


def visible(text: str) -> str:
    """Text with control characters made visible, so that it can neither hide nor steer."""
    return "".join(_visible(c) for c in text)


def _visible(character: str) -> str:
    kind = unicodedata.category(character)
    if character in _SHOWN and character != " ":
        return _SHOWN[character]
    if kind == "Cc":
        code = ord(character)
        return chr(0x2400 + code) if code < 32 else "␡" if code == 127 else f"\\x{code:02x}"
    if kind == "Cs" or (kind == "Cf" and character not in "\u200c\u200d"):
        return f"\\u{ord(character):04x}"
    return character


def piece(token: str) -> str:
    """A token as given, with white space and control characters made visible."""
    if token == "":
        return "∅"
    if not token.strip():
        return "".join(_SHOWN.get(c, _visible(c)) for c in token)
    return visible(token.strip(" "))
