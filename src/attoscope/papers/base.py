"""What a paper, a claim and its evidence are. A paper's module needs nothing else of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from attoscope.errors import AttoscopeError
from attoscope.papers.running import Run as Run

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Holds:
    """The claim is expected to hold; `HOLDS` is the one instance that is needed."""


HOLDS = Holds()


@dataclass(frozen=True, slots=True)
class Fails:
    """The claim is known not to hold: why, and where that was found."""

    reason: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """The same measurement where the claim must not hold, so that it is seen to be able to fail.

    `what` names what was changed, `fails` says whether the criterion was missed, as it must be.
    """

    what: str
    measured: Mapping[str, Any]
    fails: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "fails", bool(self.fails))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a claim measured, whether the criterion is met, and what its control measured.

    `measured` names plain values and arrays; a value that could not be computed is None or NaN.
    `figure` is an Altair chart, `table` are rows of named values.
    """

    measured: Mapping[str, Any]
    holds: bool
    control: Control
    figure: Any = None
    table: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", bool(self.holds))


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of a paper that can be measured, with its criterion in words and numbers."""

    name: str
    statement: str
    source: str
    criterion: str
    expected: Holds | Fails
    function: Callable[[Run], Evidence]


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper and its claims, which register themselves with `claim`."""

    slug: str
    title: str
    authors: str
    year: int
    link: str
    _claims: dict[str, Claim] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("slug", self.slug)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """All claims, in the order in which they were registered."""
        return tuple(self._claims.values())

    def claim(
        self,
        *,
        name: str,
        statement: str,
        source: str,
        criterion: str,
        expected: Holds | Fails = HOLDS,
    ) -> Callable[[Callable[[Run], Evidence]], Callable[[Run], Evidence]]:
        """Registers the decorated function, which measures this claim in a `Run`.

        Raises AttoscopeError where the paper has a claim of that name already, or the name is
        not made of lower-case words, digits and hyphens (files are named after it).
        """
        _check_name("name", name)
        if name in self._claims:
            raise AttoscopeError(
                f"name: the paper {self.slug} has two claims named {name!r}; expected a name for "
                "each: rename one"
            )

        def register(function: Callable[[Run], Evidence]) -> Callable[[Run], Evidence]:
            self._claims[name] = Claim(name, statement, source, criterion, expected, function)
            return function

        return register

    def chosen(self, names: Sequence[str] | None) -> tuple[Claim, ...]:
        """The claims with these names, in the paper's own order; all of them for None."""
        if names is None:
            return self.claims
        for name in names:
            if name not in self._claims:
                raise AttoscopeError(
                    f"claim: {self.slug} has no claim {name!r} (did you mean "
                    f"{nearest(name, self._claims)}?); expected one of {', '.join(self._claims)}"
                )
        return tuple(claim for claim in self.claims if claim.name in names)


def nearest(name: str, names: Iterable[str]) -> str:
    """Which of the names is most like this one: the first that holds it, else by its letters."""
    known = list(names)
    holding = (each for each in known if name and name.lower() in each)
    return next(holding, None) or get_close_matches(name.lower(), known, n=1, cutoff=0)[0]


def _check_name(argument: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise AttoscopeError(
            f"{argument}: got {name!r}; expected lower-case words and digits joined by hyphens"
        )
