"""A text with its marked tokens, as HTML: words, or patches in their grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup, escape

from attoscope.diagnosis import Closeup, Text
from attoscope.report.words import piece

# Leaving out fewer tokens than this takes more room than they do.
_WORTH = 3


@dataclass(frozen=True, slots=True)
class Around:
    """How many tokens to show on each side of the query, and of the other marked ones."""

    query: int
    marks: int


@dataclass(frozen=True, slots=True)
class _Roles:
    """Which positions of one text are marked, and as what."""

    query: int | None
    chosen: int | None
    rivals: frozenset[int]

    @property
    def all(self) -> set[int]:
        return {p for p in (self.query, self.chosen, *self.rivals) if p is not None}

    def mark(self, position: int, text: Markup) -> Markup:
        """Query: b; chosen: mark; competitor: u. One token can be both."""
        if position == self.chosen:
            text = Markup("<mark>{}</mark>").format(text)
        elif position in self.rivals:
            text = Markup("<u>{}</u>").format(text)
        return Markup("<b>{}</b>").format(text) if position == self.query else text


def marked(closeup: Closeup, around: Around) -> Markup:
    """The text of a close-up; that of the keys stands after it where it is another."""
    positions = [mark.position for mark in closeup.marks]
    chosen = positions[0] if positions else None
    rivals = frozenset(positions[1:])
    if closeup.keys is None:
        return _one(closeup.text, _Roles(closeup.query, chosen, rivals), around)
    asks = _one(closeup.text, _Roles(closeup.query, None, frozenset()), around)
    keys = _one(closeup.keys, _Roles(None, chosen, rivals), around)
    return Markup('{} <i class="reads">reads</i> {}').format(asks, keys)


def _one(text: Text, roles: _Roles, around: Around) -> Markup:
    if text.kind == "patches" and text.grid is not None:
        return _grid(text, text.grid, roles)
    return Markup("").join(_words(text, roles, around))


def _words(text: Text, roles: _Roles, around: Around) -> Iterator[Markup]:
    tokens, amount = text.tokens, len(text.tokens)
    for position in roles.all:
        tokens[position]  # noqa: B018 - a mark outside its text is an error, not a gap
    # Where tokens bring their own space, those without one continue a word.
    spaced = any(len(token) > 1 and token[0] == " " for token in tokens)
    before = -1
    for i in _shown(amount, roles, around):
        gap = i - before - 1
        if gap:
            yield Markup("… ") if before < 0 else Markup(" … ")
        elif before >= 0:
            white = tokens[i][:1].isspace() or tokens[i - 1].isspace()
            piece_of_word = tokens[i].startswith("##") if not spaced else not white
            yield Markup("" if piece_of_word else " ")
        shown = tokens[i]
        if not spaced and shown.startswith("##") and len(shown) > 2 and not gap and before >= 0:
            shown = shown[2:]
        yield roles.mark(i, escape(piece(shown)))
        before = i
    if before < amount - 1:
        yield Markup(" …")


def _shown(amount: int, roles: _Roles, around: Around) -> list[int]:
    """The positions near a marked one, and short gaps between them."""
    near: set[int] = set()
    for position in roles.all:
        reach = around.query if position == roles.query else around.marks
        near.update(range(max(0, position - reach), min(amount, position + reach + 1)))
    found: list[int] = []
    for i in sorted(near):
        last = found[-1] if found else -1
        found += range(last + 1, i) if i - last <= _WORTH else ()
        found.append(i)
    return found


def _grid(text: Text, grid: tuple[int, int], roles: _Roles) -> Markup:
    """The image as a grid with its marked patches; what stands before the patches is no place."""
    rows, columns = grid
    before = len(text.tokens) - rows * columns

    def cells(*positions: int | None) -> str:
        spots = [
            divmod(p - before, columns) for p in positions if p is not None and p >= before
        ]
        return "".join(f"M{c},{r}h1v1h-1z" for r, c in spots)

    parts = [
        ("r", cells(*sorted(roles.rivals))),
        ("c", cells(roles.chosen)),
        ("q", cells(roles.query)),
    ]
    paths = Markup("").join(
        Markup('<path class="{}" d="{}"/>').format(css, d) for css, d in parts if d
    )
    return Markup(
        '<svg class="patches" role="img" aria-label="where they lie in {} rows and {} columns" '
        'viewBox="0 0 {} {}" width="{}">{}</svg>'
    ).format(rows, columns, columns, rows, round(64 * columns / max(rows, columns)), paths)
