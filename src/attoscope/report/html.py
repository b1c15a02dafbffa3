"""The report as one HTML file: no script, no outside resource, every text escaped."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from attoscope.report import closer, colours, figures, since, tables, words
from attoscope.report.choice import in_front
from attoscope.report.summary import data_facts, facts, method_facts

if TYPE_CHECKING:
    from jinja2 import Environment

    from attoscope.diagnosis import Diagnosis

FRAME_HEIGHT = 760


def page(diagnosis: Diagnosis, *, framed: bool = False) -> str:
    """The whole page as text. `framed` makes it fit to stand inside another page."""
    front = in_front(diagnosis.reading_list, diagnosis.findings)
    where = closer.anchors(diagnosis.closeups)
    template = _environment().get_template("report.html.j2")
    return template.render(
        framed=framed,
        css=Markup(_css()),
        title=words.visible(str(diagnosis.model.get("name", "model"))),
        facts=facts(diagnosis),
        verdict=diagnosis.verdict,
        severity=diagnosis.findings[0].severity if diagnosis.findings else "fine",
        findings=[_finding(i, diagnosis, where) for i in range(len(diagnosis.findings))],
        since=_attempt(
            partial(since.view, diagnosis.baseline, diagnosis.reading_list), "comparison"
        ),
        front=front,
        outputs=tables.outputs(diagnosis.reading_list),
        curves=figures.drawn_first(figures.curves(diagnosis.reading_list)),
        maps=figures.drawn_first(figures.maps(diagnosis.reading_list, front, where)),
        closeups=[
            _attempt(partial(closer.view, c, where), "close-up")
            for c in closer.telling(diagnosis.closeups)
        ],
        layers=_layers(diagnosis, where),
        about=closer.about(diagnosis.closeups),
        summary=[tables.summary(r) for r in diagnosis.reading_list],
        tables=[_attempt(partial(tables.full, r), r.title) for r in diagnosis.reading_list],
        data_facts=data_facts(diagnosis),
        method_facts=method_facts(diagnosis),
        versions=diagnosis.versions,
        timings=diagnosis.timings,
    )


def frame(diagnosis: Diagnosis) -> str:
    """The page inside a frame of its own, for notebooks: its names and styles stay inside."""
    inner = escape(page(diagnosis, framed=True))
    label = escape(f"attoscope report: {diagnosis.model.get('name', 'model')}")
    return (
        f'<iframe title="{label}" sandbox="" srcdoc="{inner}" width="100%" '
        f'height="{FRAME_HEIGHT}" style="border:1px solid #8884;border-radius:8px"></iframe>'
    )


def _layers(diagnosis: Diagnosis, where: closer.Anchors) -> list[dict[str, Any]]:
    svm = diagnosis.data.get("svm", {}).get("heads", [])
    found = closer.layers(diagnosis.closeups, where, svm)
    for layer in found:
        closer.attempted(layer["rows"], _attempt)
    return found


def _finding(index: int, diagnosis: Diagnosis, where: closer.Anchors) -> dict[str, Any]:
    from attoscope.report.minimap import minimap

    finding = diagnosis.findings[index]
    seen = closer.of_finding(index, finding, diagnosis.closeups, where)
    closer.attempted(seen["rows"], _attempt)
    interval = words.interval(*finding.interval) if finding.interval else ""
    return {
        "finding": finding,
        "measured": words.quantity(finding.measured, finding.unit),
        "interval": interval,
        "null": "" if finding.null is None else words.quantity(finding.null, finding.unit),
        "where": words.where(finding.sites, finding.heads),
        "minimap": _attempt(partial(minimap, finding, diagnosis.reading_list), "map")["it"],
        "evidence": [closer.evidence(e) for e in finding.evidence],
        "seen": seen,
    }


def _attempt(make: Callable[[], Any], name: str) -> dict[str, Any]:
    """What `make` gives, or why it failed: one part that fails leaves the others standing."""
    try:
        return {"name": name, "it": make(), "failed": ""}
    except Exception as error:  # noqa: BLE001 - whatever it is, the rest of the report survives
        return {"name": name, "it": None, "failed": f"{type(error).__name__}: {error}"}


def _breakable(name: str) -> Markup:
    """A name, escaped, that may break after its separators and not within its words."""
    parts = re.split(r"(?<=[/_.-])", name)
    return Markup("<wbr>").join(escape(part) for part in parts)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("attoscope.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = words.number
    environment.filters["breakable"] = _breakable
    environment.filters["visible"] = lambda text: words.visible(str(text))
    environment.filters["paper"] = linked_paper
    environment.filters["anchor"] = figures.anchor
    return environment


@cache
def _css() -> str:
    text = files("attoscope.report").joinpath("templates/report.css").read_text("utf-8")
    for theme in colours.SCALES:
        text = text.replace(f"/*scale-{theme}*/", colours.variables(theme))
    return text


_ARXIV = re.compile(r"(?:arXiv[: ]\s*)?\b(\d{4}\.\d{4,5})(?:v\d+)?\b", re.IGNORECASE)


def linked_paper(text: str) -> Markup:
    """A citation; arXiv numbers in it become links."""
    link = Markup('<a rel="noreferrer" href="https://arxiv.org/abs/{}">{}</a>')
    parts, end = [], 0
    for found in _ARXIV.finditer(text):
        parts += [
            escape(words.visible(text[end : found.start()])),
            link.format(found[1], found[0]),
        ]
        end = found.end()
    return Markup("").join([*parts, escape(words.visible(text[end:]))])
