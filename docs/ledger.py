"""Writes docs/papers/SLUG.md from a run: `python docs/ledger.py attoscope-papers/SLUG`.

The run's evidence.json and its figures are copied beside the page.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parent / "papers"
# Vector figures of many points are kept as pictures.
LARGE = 200_000
ROWS = 40


def shown(value: Any) -> str:
    """A number in four digits, or text that fits into a table's cell."""
    if isinstance(value, bool) or value is None:
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return str(value).replace("|", "\\|")


def bullets(values: dict[str, Any], depth: int = 0) -> list[str]:
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{'  ' * depth}- {name}", *bullets(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}- {name}: {shown(value)}")
    return lines


def table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    step = max(1, -(-len(rows) // ROWS))
    for row in rows[::step]:
        lines.append("| " + " | ".join(shown(row.get(name)) for name in names) + " |")
    if step > 1:
        lines.append(f"\nEvery row in {step}; all of them are in evidence.json.")
    return lines


def claim_lines(claim: dict[str, Any], figure: str | None) -> list[str]:
    expected, control = claim["expected"], claim["control"]
    verdict = "holds" if claim["holds"] else "does not hold"
    if not claim["as_expected"]:
        verdict += ": **not as declared**"
    elif not expected["holds"]:
        verdict += f", as declared: {expected['reason']}"
    lines = [
        f"## {claim['name']}", "", claim["statement"], "",
        f"*Source:* {claim['source']}.", "", f"*Criterion:* {claim['criterion']}.", "",
        f"*Verdict:* {verdict}. ({claim['seconds']:.0f} s)", "", "Measured:", "",
        *bullets(claim["measured"]), "",
        f"Control, which has to fail and {'did' if control['fails'] else '**did not**'}: "
        f"{control['what']}.", "", *bullets(control["measured"]), "",
    ]  # fmt: skip
    if figure:
        lines += [f"![{claim['statement']}]({figure})", ""]
    if claim["table"]:
        lines += [*table(claim["table"]), ""]
    return lines


def main(folder: Path) -> None:
    evidence = json.loads((folder / "evidence.json").read_text(encoding="utf-8"))
    slug = evidence["paper"]
    target = PAGES / slug
    target.mkdir(parents=True, exist_ok=True)
    lines = [
        f"# {evidence['title']}: the ledger", "",
        f"[{evidence['link']}]({evidence['link']}), measured by `attoscope reproduce {slug} "
        f"--scale {evidence['scale']} --seed {evidence['seed']}` with attoscope "
        f"{evidence['attoscope']}; columns and lines that begin with *reported* are "
        "published values, or values of an "
        "earlier run of the same experiment. [How to read a ledger](../papers.md).", "",
    ]  # fmt: skip
    for claim in evidence["claims"]:
        figure = None
        if claim["figure"]:
            source = folder / claim["figure"]
            if source.stat().st_size > LARGE:
                source = source.with_suffix(".png")
            shutil.copyfile(source, target / source.name)
            figure = f"{slug}/{source.name}"
        lines += claim_lines(claim, figure)
    shutil.copyfile(folder / "evidence.json", target / "evidence.json")
    text = "\n".join(lines).rstrip() + "\n"
    (PAGES / f"{slug}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
