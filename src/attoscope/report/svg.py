"""Make the SVG that Vega draws fit for a page: small, themed by CSS variables, accessible.

Charts are drawn with placeholder colours, since Vega cannot write `var(--ink)`; here they are
replaced. Texts of marks travel as numbers and are put in escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup, escape

# No chart holds these by chance: they are nearly black, and the theme has no black.
_NAMED = {
    "#010101": "ink",
    "#010102": "soft",
    "#010103": "line",
    "#010104": "accent",
    "#010105": "null",
    "#010106": "before",
}
PLACEHOLDER = {name: code for code, name in _NAMED.items()}

_NOISE = re.compile(
    r" (?:xmlns(?::xlink)?|version|role|aria-roledescription|aria-hidden|pointer-events|"
    r'font-family|opacity|stroke-miterlimit|class)="[^"]*"'
)
_EMPTY = re.compile(
    r'<path d="M[\d.,-]+h0v0h0Z"/>|<path(?: [a-z-]+="[^"]*")*? display="none"/>'
)
_MARK = re.compile(r'<(path|circle) aria-label="(\d+)"([^>]*)/>')
# Points of a curve come as paths.
_DOT = re.compile(
    r'<path( aria-label="\d+")? transform="translate\(([-\d.]+),([-\d.]+)\)" '
    r'd="M([\d.]+),0A[^"]*"( fill="[^"]*") stroke-width="2"/>'
)
_CELL = re.compile(r'<path aria-label="\d+" d="([^"]*)" fill="(var\([^"]*\))"/>')
_OTHER_LABEL = re.compile(r'(<(?:svg|g|path|text)[^>]*?) aria-label="[^"]*"')
_COLOUR = re.compile(r"#0101[0-9a-f]{2}|#02([01])0([0-9a-f]{2})", re.IGNORECASE)
_LONG = re.compile(r"-?\d+\.\d{3,}")
# What report.css says of all text and all lines of a chart.
_PLAIN = re.compile(
    f' (?:font-size="12px"|font-weight="normal"|fill="{PLACEHOLDER["soft"]}"|'
    f'stroke="{PLACEHOLDER["line"]}" stroke-width="1")'
)
_GROUP = re.compile(r"<g>((?:(?!</?g[ >]).)*)</g>")


def scale_colour(scale: str, step: int) -> str:
    """The placeholder of one step of a scale ("s" sequential, "d" diverging)."""
    return f"#02{'sd'.index(scale)}0{step:02x}"


def finish(
    raw: str,
    label: str,
    texts: Sequence[str] = (),
    css: str = "",
    links: Sequence[str] = (),
) -> Markup:
    """The SVG for inlining: `label` names it, `texts` are what marks say when pointed at, and
    `links` the anchors that they lead to ("" for none).

    Without texts, cells of one colour become one path. Links are for pointing only: the tab key
    passes over them, and the list of layers leads to the same rows.
    """
    body = _NOISE.sub("", raw)
    body = _LONG.sub(lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), body)
    body = _EMPTY.sub("", body)
    body = _PLAIN.sub("", body)
    body = _DOT.sub(r'<circle\1 cx="\2" cy="\3" r="\4"\5/>', body)
    body = _COLOUR.sub(_variable, body)
    before = None
    while before != body:
        before, body = body, _GROUP.sub(r"\1", body)
    # The texts come last: they are the readers' own words, and nothing may be done to them.
    body = _MARK.sub(lambda m: _titled(m, texts, links), body) if texts else _merged(body)
    body = _OTHER_LABEL.sub(r"\1", body)
    head = f'<svg role="img" aria-label="{escape(label)}" class="chart {css}" '
    return Markup(body.replace("<svg ", head, 1))


def _titled(found: re.Match[str], texts: Sequence[str], links: Sequence[str]) -> str:
    tag, index, rest = found.groups()
    mark = f"<{tag}{rest}><title>{escape(texts[int(index)])}</title></{tag}>"
    link = links[int(index)] if links else ""
    return f'<a href="#{escape(link)}" tabindex="-1">{mark}</a>' if link else mark


def _merged(body: str) -> str:
    """The marks, joined by colour, at the place of the first."""
    shapes: dict[str, list[str]] = {}
    for found in _CELL.finditer(body):
        shapes.setdefault(found[2], []).append(found[1])
    paths = "".join(f'<path d="{"".join(d)}" fill="{c}"/>' for c, d in shapes.items())
    first = True

    def once(_: re.Match[str]) -> str:
        nonlocal first
        text, first = (paths if first else ""), False
        return text

    return _CELL.sub(once, body)


def _variable(found: re.Match[str]) -> str:
    code = found[0].lower()
    if code in _NAMED:
        return f"var(--{_NAMED[code]})"
    if found[2] is None:
        return found[0]
    return f"var(--{'sd'[int(found[1])]}{int(found[2], 16)})"
