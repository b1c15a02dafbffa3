"""Run a paper's claims one by one; whatever happens in one, the others are kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from attoscope.errors import AttoscopeError
from attoscope.papers.base import Claim, Paper, Run
from attoscope.papers.ledger import Ledger, Outcome, check_evidence, draw
from attoscope.papers.registry import find
from attoscope.papers.running import SCALES, Scale, Watcher, Workers, workers
from attoscope.papers.trials import Trials


@runtime_checkable
class Progress(Protocol):
    """Is told how far a run is: a claim starts, is at so many items, is finished."""

    def started(self, claim: Claim, number: int, total: int) -> None: ...

    def items(self, label: str, done: int, total: int, kept: int) -> None: ...

    def finished(self, outcome: Outcome, number: int, total: int) -> None: ...


def reproduce(
    paper: str | Paper,
    *,
    scale: str = "quick",
    seed: int = 0,
    claims: Sequence[str] | None = None,
    jobs: int | None = None,
    out: str | Path | None = None,
    scheduler: str | None = None,
    fresh: bool = False,
    keep_finished: bool = False,
    progress: Progress | None = None,
) -> Ledger:
    """Measures a paper's claims, each against its control; gives the ledger.

    `paper` is a slug of `attoscope papers`, or a `Paper` of your own; `claims` names some of its
    claims. Sweeps run in `jobs` processes (all cores by default) or on the Dask cluster at the
    address `scheduler`; the evidence is the same. With `out`, evidence.json and the figures are
    written there, and finished items are kept in `out`/.trials, so that an interrupted run goes
    on from there; `fresh` forgets them first. An error in one claim stands in the ledger. An
    interrupt goes through, or, with `keep_finished`, gives the ledger of what was finished.

    Raises AttoscopeError for an unknown paper, claim or scale, a paper without claims yet, a
    folder that cannot be written, and a cluster that cannot be reached.
    """
    paper = find(paper).load() if isinstance(paper, str) else paper
    chosen = paper.chosen(claims)
    if not chosen:
        raise AttoscopeError(f"{paper.slug}: no claim was chosen, or the paper has none")
    plan = _Plan(paper, _scale(scale), _seed(seed), None if out is None else Path(out))
    ledger = Ledger(paper, plan.scale, plan.seed)
    with workers(jobs, scheduler) as where:
        try:
            for number, claim in enumerate(chosen, start=1):
                if progress is not None:
                    progress.started(claim, number, len(chosen))
                watcher = None if progress is None else progress.items
                run = plan.run(claim, where, fresh, watcher)
                outcome = _measure(claim, run, plan.out)
                complete = number == len(chosen)
                ledger = replace(ledger, claims=(*ledger.claims, outcome), complete=complete)
                if plan.out is not None:
                    ledger.to_json(plan.out / "evidence.json")
                if progress is not None:
                    progress.finished(outcome, number, len(chosen))
        except KeyboardInterrupt:
            if not keep_finished:
                raise
    return ledger


@dataclass(frozen=True, slots=True)
class _Plan:
    paper: Paper
    scale: Scale
    seed: int
    out: Path | None

    def run(self, claim: Claim, where: Workers, fresh: bool, watcher: Watcher | None) -> Run:
        """This claim's run, with the folder of its finished items."""
        trials = None
        if self.out is not None:
            setting = f"{self.scale}-{self.seed}"
            trials = Trials(self.out / ".trials" / self.paper.slug / claim.name / setting)
            if fresh:
                trials.clear()
        return Run(self.scale, self.seed, where, trials, watcher)


def _measure(claim: Claim, run: Run, out: Path | None) -> Outcome:
    """One claim's outcome; an exception becomes a sentence in it."""
    start = time.perf_counter()
    evidence = figure = error = caught = None
    try:
        evidence = check_evidence(claim.function(run))
        if out is not None and evidence.figure is not None:
            figure = draw(claim.name, claim.statement, evidence.figure, out)
    except Exception as exception:
        error, caught = _sentence(exception), exception
    seconds = time.perf_counter() - start
    return Outcome(claim, evidence, seconds, error, caught, figure)


def _sentence(exception: Exception) -> str:
    said = " ".join(str(exception).split())
    if isinstance(exception, AttoscopeError):
        return said
    return f"{type(exception).__name__}: {said}" if said else type(exception).__name__


def _scale(scale: str) -> Scale:
    for known in SCALES:
        if scale == known:
            return known
    raise AttoscopeError(f"scale: got {scale!r}; expected {' or '.join(SCALES)}")


def _seed(seed: int) -> int:
    if seed < 0:
        raise AttoscopeError(f"seed: got {seed}; expected a whole number from 0 on")
    return seed
