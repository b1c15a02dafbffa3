"""The verdict in words: what someone who reads one sentence should know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attoscope.findings import Finding
from attoscope.report.words import count, in_words, number, where

_TOLD = 3
# Fused kernels round differently; more than this is no rounding.
TOLERANCE = 1e-3


def verdict(findings: Sequence[Finding], model: Mapping[str, Any]) -> str:
    """One or two sentences made from the findings (most severe first) and the model."""
    severe = [f for f in findings if f.severity == "severe"]
    warnings = [f for f in findings if f.severity == "warning"]
    if severe:
        start = f"Something is wrong: {_listed(severe)}."
        rest = len(findings) - len(severe)
        end = f" {count(rest, 'further finding')} below." if rest else ""
    elif warnings:
        things = "thing needs" if len(warnings) == 1 else "things need"
        start = f"Nothing is broken, but {in_words(len(warnings))} {things} a look: "
        start += f"{_listed(warnings)}."
        notes = len(findings) - len(warnings)
        end = f" {count(notes, 'note')} below." if notes else ""
    elif findings:
        things = "thing" if len(findings) == 1 else "things"
        start = "Nothing is broken. "
        start += (
            f"{in_words(len(findings)).capitalize()} {things} to know: {_listed(findings)}."
        )
        end = ""
    else:
        start = f"Nothing stands out{_extent(model)}: no rule found anything to report."
        end = " The readings below are what was measured."
    return start + end + _changed(model)


def _listed(findings: Sequence[Finding]) -> str:
    told = [f"{_inside(f.title)}{_spot(f)}" for f in findings[:_TOLD]]
    if len(findings) > _TOLD:
        told.append(f"{len(findings) - _TOLD} more")
    return told[0] if len(told) == 1 else f"{'; '.join(told[:-1])}; and {told[-1]}"


def _spot(finding: Finding) -> str:
    """Where it lies, in few words; nothing where the title says so already."""
    if re.search(r"\d", finding.title):
        return ""
    if finding.heads:
        return f" ({count(len(finding.heads), 'head')})"
    if finding.sites:
        return f" ({where(finding.sites)})"
    return ""


def _inside(title: str) -> str:
    """A title as part of a sentence: a lower-case start, unless the first word is a name."""
    title = title.strip().rstrip(".")
    first = title.split(" ", 1)[0]
    if first == "A" or (first[:1].isupper() and first[1:].islower()):
        return title[0].lower() + title[1:]
    return title


def _extent(model: Mapping[str, Any]) -> str:
    layers, heads = model.get("layers"), model.get("heads")
    if isinstance(layers, int) and isinstance(heads, int):
        return f" in {count(layers, 'layer')} × {count(heads, 'head')}"
    return ""


def _changed(model: Mapping[str, Any]) -> str:
    gap = (model.get("unchanged") or {}).get("max_difference")
    if gap is None or gap <= TOLERANCE:
        return ""
    return (
        f" Being watched changed the model's output by up to {number(gap)}: read every number "
        "with care."
    )
