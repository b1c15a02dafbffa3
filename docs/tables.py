"""Writes the tables of docs/diagnose.md from the code: `python docs/tables.py`.

What stands between the two markers of a table is replaced; a test holds the page to the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from attoscope.measures.base import Spec
from attoscope.measures.rules import Rule
from attoscope.measures.selection import Selection
from attoscope.measures.selection_specs import FINITE_SPECS
from attoscope.measures.selection_specs import SPECS as SELECTION
from attoscope.measures.smoothness import Smoothness
from attoscope.measures.smoothness_specs import SPECS as SMOOTHNESS
from attoscope.measures.stream import Stream
from attoscope.measures.stream_specs import BLOCK_SPECS, POINT_SPECS

PAGE = Path(__file__).parent / "diagnose.md"
MEASURES = (Selection, Smoothness, Stream)
READINGS = {
    "selection": (*SELECTION, *FINITE_SPECS),
    "smoothness": SMOOTHNESS,
    "stream": (*POINT_SPECS, *BLOCK_SPECS),
}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def readings(specs: Iterable[Spec]) -> str:
    """A table of readings: name, unit, how to read it, null, source."""
    rows = [
        f"| `{s.name}` | {s.unit} | {_cell(s.meaning)} | "
        f"{_cell(s.null_meaning or 'the same tokens in random order')} | {_cell(s.source)} |"
        for s in specs
    ]
    head = ["| reading | unit | how to read it | null | source |", "| --- " * 5 + "|"]
    return "\n".join(head + rows)


def findings(rules: Iterable[Rule]) -> str:
    """A table of findings: id, severity, when, paper."""
    rows = [
        f"| `{r.id}` | {r.severity} | {_cell(r.fires.__doc__ or '')} | {_cell(r.paper)} |"
        for r in rules
    ]
    return "\n".join(
        ["| finding | severity | when | source |", "| --- | --- | --- | --- |", *rows]
    )


def filled(page: str) -> str:
    """The page with every table made anew."""
    tables = {name: readings(specs) for name, specs in READINGS.items()}
    tables["findings"] = findings(rule for measure in MEASURES for rule in measure.rules)
    for name, table in tables.items():
        start, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        made = f"{start}\n{table}\n{end}"
        page = pattern.sub(lambda _, made=made: made, page)
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
