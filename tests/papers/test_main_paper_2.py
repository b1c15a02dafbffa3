"""Claims of the main paper: several tokens, paths, certificates, cones, every position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attoscope.dynamics import Normalised, Trajectory
from attoscope.papers import Evidence, Run
from attoscope.papers.transformers_as_svms import (
    _predictions,
    causal,
    certificate,
    cone,
    nonlinear,
    paths,
    sparsemax,
)
from attoscope.papers.transformers_as_svms._paper import PAPER
from attoscope.svm import Selection, finite_part

Change = Callable[[pytest.MonkeyPatch], None]


def claim(name: str, change: Change | None = None) -> Evidence:
    """The evidence of a tiny run, with something changed first."""
    with pytest.MonkeyPatch.context() as patch:
        tiny(patch)
        if change is not None:
            change(patch)
        (found,) = PAPER.chosen([name])
        return found.function(Run())


def tiny(patch: pytest.MonkeyPatch) -> None:
    """A few trials of few steps; what is measured and how it is judged stay as they are."""
    patch.setattr(nonlinear, "WIDTHS", (4, 6))
    for module, count in (
        (nonlinear, 40), (sparsemax, 4), (certificate, 4), (cone, 3), (causal, 4),
    ):  # fmt: skip
        patch.setattr(module, "instance_seeds", lambda run, _, count=count: list(range(count)))
    patch.setattr(sparsemax, "SWEEPS", {(1, 4, 4): (0.2, 0.8)})
    patch.setattr(sparsemax, "STEPS", 1500)
    patch.setattr(paths, "RADII", (30, 100))
    patch.setattr(paths, "JUDGED", 1)
    patch.setattr(certificate, "LAST", 4000)
    patch.setattr(certificate, "JUDGED", 4000)
    patch.setattr(certificate, "SHOWN", (100, 1000, 4000))
    patch.setattr(certificate, "FACTORED", 300)
    patch.setattr(cone, "STEPS", 400)


def swap(module: Any, name: str, value: Any) -> Change:
    return lambda patch: patch.setattr(module, name, value)


NAMES = (
    "nonlinear-head",
    "several-tokens-exactly",
    "regularisation-paths",
    "certificate-without-solver",
    "local-cone",
    "every-position",
)


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_and_its_control_fails(name: str) -> None:
    evidence = claim(name)
    assert evidence.holds and evidence.control.fails
    assert evidence.figure.to_dict()["$schema"]


def moved_shares(selection: Selection, probabilities: Any) -> Any:
    """The finite part of shares that belong to the next token: wrong."""
    moved = probabilities.copy()
    for row, kept in zip(moved, selection.selected, strict=True):
        row[kept] = np.roll(row[kept], 1)
    return finite_part(selection, moved)


def uncut(run: Run, samples: int, solutions: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Both paths held against the other's solution: wrong."""
    return measure(run, samples, solutions[::-1])


measure, seen, honest = paths.measure, cone.Gradient, Trajectory.certificate


def boastful(run: Trajectory, *arguments: Any, **options: Any) -> Any:
    """A lower bound that is two hundredths above what is proved: wrong."""
    lower, upper = honest(run, *arguments, **options)
    return 1.02 * lower, upper


class Uphill(seen):
    """A gradient of the wrong sign."""

    def at(self, weight: Any) -> Any:
        super().at(weight)
        self.direction = -self.direction
        return self


BROKEN = {
    "nonlinear-head": swap(_predictions, "finite_part", moved_shares),
    "several-tokens-exactly": swap(sparsemax, "LR", 50.0),
    "regularisation-paths": swap(paths, "measure", uncut),
    "certificate-without-solver": swap(Trajectory, "certificate", boastful),
    "local-cone": swap(cone, "Gradient", Uphill),
    "every-position": swap(causal, "Normalised", lambda lr: Normalised(lr, log_domain=False)),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_variant_does_not_hold(name: str) -> None:
    assert not claim(name, BROKEN[name]).holds
