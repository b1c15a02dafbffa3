"""`attoscope papers`."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Annotated

import typer


def papers(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> int:
    """List the papers, and how many claims of each can be run.

    In Python: attoscope.papers.ENTRIES.
    """
    from attoscope.papers import ENTRIES

    found = [(e, [c.name for c in e.load().claims] if e.exists else None) for e in ENTRIES]
    if as_json:
        rows = [
            {"slug": e.slug, "title": e.title, "link": e.link, "claims": c} for e, c in found
        ]
        typer.echo(json.dumps(rows, ensure_ascii=False, indent=1))
        return 0
    _print([(e.slug, "not yet" if c is None else str(len(c)), e.title) for e, c in found])
    typer.echo("attoscope reproduce SLUG measures a paper's claims.")
    return 0


def _print(rows: list[tuple[str, str, str]]) -> None:
    """A line for each paper; on a terminal long titles are cut."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    wide = max(len(slug) for slug, _, _ in rows)
    for slug, works, title in [("slug", "claims", "paper"), *rows]:
        line = f"{slug:<{wide}}  {works:<7}  {title}"
        typer.echo(line if len(line) <= width else f"{line[: width - 1]}…")
