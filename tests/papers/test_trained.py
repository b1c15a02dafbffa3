"""Claims on trained models in the papers on spectra and on NeuTRENO, judged on known numbers.

That treated models are trained as they should is in test_suppress.py and tests/remedies.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attoscope.papers import Evidence, Paper, Run, digits_evidence, digits_vit
from attoscope.papers.neutreno import PAPER as NEUTRENO
from attoscope.papers.neutreno import trained as neutreno
from attoscope.papers.oversmoothing_record_straight import PAPER as SPECTRA
from attoscope.papers.oversmoothing_record_straight import trained as spectra

Patch = pytest.MonkeyPatch


def judged(
    monkeypatch: Patch, paper: Paper, module: ModuleType, claim: str, values: dict[str, Any]
) -> Evidence:
    """The claim's evidence where the models of each recipe end at these cosines."""

    def finished(run: Run, items: list[dict[str, Any]], label: str) -> list[dict[str, Any]]:
        left = {name: list(cosines) for name, cosines in values.items()}
        results = []
        for item in items:
            recipe = {k: v for k, v in item.items() if k not in ("seed", "epochs")}
            (name,) = (name for name, one in module.RECIPES.items() if one == recipe)
            profile = np.append(np.zeros(8), left[name].pop(0))
            results.append({key: profile for key in digits_vit.PROFILE} | {"accuracy": 0.9})
        return results

    monkeypatch.setattr(digits_evidence, "finished", finished)
    (one,) = paper.chosen([claim])
    return one.function(Run())


def test_spectra_of_trained_models(monkeypatch: Patch) -> None:
    usual = {spectra.FREE: [0.5, 0.6], spectra.SHARPEN: [0.1, 0.1], spectra.SMOOTH: [0.9, 0.8]}

    def found(**other: list[float]) -> Evidence:
        values = usual | {getattr(spectra, name): v for name, v in other.items()}
        return judged(monkeypatch, SPECTRA, spectra, "trained-spectra", values)

    assert found().holds and found().control.fails and found().figure.to_dict()
    assert not found(SHARPEN=[0.1, 0.45]).holds
    assert not found(SMOOTH=[0.9, 0.65]).holds
    assert not found(FREE=[0.4, 0.65]).control.fails


def test_trained_with_the_term(monkeypatch: Patch) -> None:
    usual = {
        neutreno.PLAIN: [0.5, 0.6], neutreno.FIRST: [0.1, 0.1],
        neutreno.ZERO: [0.1, 0.1], neutreno.MEAN: [0.1, 0.2],
    }  # fmt: skip

    def found(claim: str, **other: list[float]) -> Evidence:
        values = usual | {getattr(neutreno, name): v for name, v in other.items()}
        return judged(monkeypatch, NEUTRENO, neutreno, claim, values)

    falls, anchor = found("trained-cosine-falls"), found("trained-anchor")
    assert falls.holds and falls.control.fails and falls.figure.to_dict()
    assert not found("trained-cosine-falls", FIRST=[0.1, 0.31]).holds
    assert not found("trained-cosine-falls", PLAIN=[0.2, 0.6], FIRST=[0.05, 0.1]).control.fails
    assert not anchor.holds and anchor.control.fails and anchor.figure.to_dict()
    assert anchor.measured["ratio zero"] == pytest.approx([0.2, 1 / 6])
    assert found("trained-anchor", ZERO=[0.4, 0.4]).holds
