"""What came out: the ledger of a paper's claims, printed, and written as evidence.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import attoscope
from attoscope.papers.base import Claim, Control, Evidence, Fails, Paper
from attoscope.report.files import write_whole
from attoscope.report.words import count

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SCHEMA_VERSION = 1
_MOST_ROWS, _MOST_VALUES = 20, 8
_LINE = 72


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one claim came to: its evidence, or the error that kept it from being measured.

    `figure` is where the figure lies, seen from evidence.json, where one was written.
    """

    claim: Claim
    evidence: Evidence | None
    seconds: float
    error: str | None = None
    exception: Exception | None = field(default=None, repr=False)
    figure: str | None = None

    @property
    def name(self) -> str:
        """The claim's name."""
        return self.claim.name

    @property
    def measured(self) -> Mapping[str, Any] | None:
        """What was measured; None after an error."""
        return self.evidence.measured if self.evidence else None

    @property
    def holds(self) -> bool | None:
        """Whether the criterion was met; None after an error."""
        return self.evidence.holds if self.evidence else None

    @property
    def control(self) -> Control | None:
        """What the control measured; None after an error."""
        return self.evidence.control if self.evidence else None

    @property
    def as_expected(self) -> bool:
        """Whether it came out as the claim declares, with a control that failed, and no error."""
        if self.error is not None or self.evidence is None:
            return False
        return self.holds is not isinstance(self.claim.expected, Fails) and (
            self.evidence.control.fails
        )

    @property
    def verdict(self) -> str:
        """What came out, in words."""
        idle = self.control is not None and not self.control.fails
        return f"{_kind(self)}, but its control did not fail" if idle else _kind(self)


def _kind(outcome: Outcome) -> str:
    declared = isinstance(outcome.claim.expected, Fails)
    if outcome.error is not None or outcome.holds is None:
        return "error"
    if outcome.holds:
        return "holds, though declared not to" if declared else "holds"
    return "does not hold, as declared" if declared else "does not hold, a surprise"


@dataclass(frozen=True, slots=True)
class Ledger:
    """A run's outcomes, in the order of the paper; `complete` once all chosen claims have run."""

    paper: Paper
    scale: str
    seed: int
    claims: tuple[Outcome, ...] = ()
    complete: bool = False

    @property
    def as_expected(self) -> bool:
        """Whether everything ran, came out as declared, and every control failed."""
        return self.complete and all(outcome.as_expected for outcome in self.claims)

    def to_dict(self) -> dict[str, Any]:
        """The ledger as plain data: what stands in evidence.json."""
        data = {
            "schema_version": SCHEMA_VERSION,
            "attoscope": attoscope.__version__,
            "paper": self.paper.slug,
            "title": self.paper.title,
            "link": self.paper.link,
            "scale": self.scale,
            "seed": self.seed,
            "complete": self.complete,
            "as_expected": self.as_expected,
            "claims": [_entry(outcome) for outcome in self.claims],
        }
        plain: dict[str, Any] = _plain(data)
        return plain

    def dumps(self) -> str:
        """The text of evidence.json: strict JSON, null for what is not a finite number."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=1) + "\n"

    def to_json(self, path: str | Path) -> Path:
        """Writes evidence.json whole, or not at all; gives the path."""
        return write_whole(path, self.dumps())


def _entry(outcome: Outcome) -> dict[str, Any]:
    claim, evidence = outcome.claim, outcome.evidence
    expected: dict[str, Any] = {"holds": not isinstance(claim.expected, Fails)}
    if isinstance(claim.expected, Fails):
        expected |= {"reason": claim.expected.reason, "where": claim.expected.where}
    control = outcome.control
    return {
        "name": claim.name,
        "statement": claim.statement,
        "source": claim.source,
        "expected": expected,
        "measured": outcome.measured,
        "criterion": claim.criterion,
        "holds": outcome.holds,
        "control": control
        and {"what": control.what, "measured": control.measured, "fails": control.fails},
        "as_expected": outcome.as_expected,
        "error": outcome.error,
        "seconds": round(outcome.seconds, 3),
        "figure": outcome.figure,
        "table": None if evidence is None else evidence.table,
    }


def _plain(value: Any) -> Any:
    """Dicts, lists, numbers and text; None for what is not a finite number."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(
        f"measured: got a {type(value).__name__}; expected numbers, text, lists, dicts and arrays"
    )


def check_evidence(evidence: Any) -> Evidence:
    """The evidence; TypeError where it is none, or holds what evidence.json has no word for."""
    if not isinstance(evidence, Evidence):
        raise TypeError(f"the claim gave a {type(evidence).__name__}; expected its Evidence")
    _plain([evidence.measured, evidence.control.measured, evidence.table])
    return evidence


def draw(outcome_name: str, title: str, chart: Any, folder: Path) -> str:
    """Writes an Altair chart as SVG and PNG; gives the SVG's path below `folder`.

    A chart without a title is given the claim's sentence.
    """
    import altair as alt
    import vl_convert

    with alt.data_transformers.enable("default", max_rows=None):
        specification = chart.to_dict()
    specification.setdefault("title", {"text": _folded(title), "anchor": "start"})
    specification.setdefault("background", "white")
    specification.setdefault("padding", 10)
    path = Path("figures") / f"{outcome_name}.svg"
    write_whole(folder / path, vl_convert.vegalite_to_svg(specification))
    png = vl_convert.vegalite_to_png(specification, scale=2)
    write_whole((folder / path).with_suffix(".png"), png)
    return path.as_posix()


def _folded(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, _LINE)


def show(ledger: Ledger, console: Console | None = None) -> None:
    """Print the ledger: every claim with its evidence, then one sentence about all."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    console.print(Text(ledger.paper.title, style="bold"))
    about = (ledger.paper.authors, str(ledger.paper.year), ledger.paper.link)
    console.print(Text(" · ".join(about), style="dim"))
    console.print(Text(f"scale {ledger.scale}, seed {ledger.seed}\n", style="dim"))
    for outcome in ledger.claims:
        for part in _parts(outcome):
            console.print(part)
    console.print(Text(summary(ledger), style="bold"))


def summary(ledger: Ledger) -> str:
    """How many claims came out how, in one sentence or two."""
    outcomes = ledger.claims
    kinds = [_kind(outcome) for outcome in outcomes]
    told = [f"{kinds.count(kind)} {_WORDS[kind]}" for kind in _WORDS if kind in kinds]
    said = f"{count(len(outcomes), 'claim')}: {', '.join(told) or 'none was run'}."
    passed = [o.name for o in outcomes if o.control and not o.control.fails]
    if passed:
        said += f" Controls that should have failed and did not: {', '.join(passed)}."
    elif any(o.control for o in outcomes):
        said += " Every control failed, as it must."
    return said if ledger.complete else f"{said} Not all claims have run."


_WORDS = {
    "holds": "held, as expected",
    "does not hold, as declared": "did not hold, as declared",
    "does not hold, a surprise": "did not hold, a surprise",
    "holds, though declared not to": "held, though declared not to",
    "error": "ended in an error",
}


def _parts(outcome: Outcome) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    good = outcome.as_expected
    head = Text()
    head.append(outcome.name, style="bold")
    head.append(f"  {outcome.verdict}", style="green" if good else "bold red")
    yield head
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for key, words in _lines(outcome):
        grid.add_row(f"  {key}", Text(words))
    yield grid
    if outcome.evidence and outcome.evidence.table:
        yield _rows(outcome.evidence.table)
    yield Text("")


def _lines(outcome: Outcome) -> Iterator[tuple[str, str]]:
    claim, control = outcome.claim, outcome.control
    yield "statement", claim.statement
    yield "source", claim.source
    yield "expected", _expectation(claim)
    if outcome.measured is not None:
        yield "measured", _shown(outcome.measured)
    yield "criterion", claim.criterion
    yield "verdict", outcome.verdict
    if outcome.error is not None:
        yield "error", outcome.error
    if control is not None:
        said = "fails, as it must" if control.fails else "does not fail: nothing is shown"
        yield "control", f"{control.what}: {_shown(control.measured)}; {said}"
    yield "seconds", f"{outcome.seconds:.1f}"
    if outcome.figure:
        yield "figure", outcome.figure


def _expectation(claim: Claim) -> str:
    if not isinstance(claim.expected, Fails):
        return "holds"
    where = f" ({claim.expected.where})" if claim.expected.where else ""
    return f"does not hold: {claim.expected.reason}{where}"


def _shown(value: Any) -> str:
    """Measured values in words; numbers with six digits."""
    plain = _plain(value)
    if isinstance(plain, dict):
        return " · ".join(f"{k.replace('_', ' ')} = {_shown(v)}" for k, v in plain.items())
    if isinstance(plain, list):
        rest = f", … {len(plain)} values" if len(plain) > _MOST_VALUES else ""
        return f"[{', '.join(map(_shown, plain[:_MOST_VALUES]))}{rest}]"
    if plain is None:
        return "not computed"
    if isinstance(plain, bool):
        return "yes" if plain else "no"
    return f"{plain:.6g}" if isinstance(plain, float) else str(plain)


def _rows(table: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    columns = list(dict.fromkeys(name for row in table for name in row))
    more = len(table) - _MOST_ROWS
    caption = f"{count(more, 'further row')} in evidence.json" if more > 0 else None
    shown = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for name in columns:
        right = all(not isinstance(row.get(name), str) for row in table)
        shown.add_column(Text(name.replace("_", " ")), justify="right" if right else "left")
    for row in table[:_MOST_ROWS]:
        shown.add_row(*(Text(_shown(row[name]) if name in row else "") for name in columns))
    return Padding(shown, (0, 0, 0, 1))
