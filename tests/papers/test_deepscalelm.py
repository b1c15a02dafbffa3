"""Claims of DeepScaleLM: each holds in a small run, and not when the code is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from attoscope.moments.components import Moments
from attoscope.papers import Evidence, Fails, Run
from attoscope.papers.deepscalelm import (
    PAPER,
    _simulation,
    _stacks,
    collapse,
    components,
    depth,
    whole,
)
from attoscope.papers.registry import find
from attoscope.prediction.propagation import SublayerPlan
from tests.papers.judging import sound

T = TypeVar("T")
Patch = pytest.MonkeyPatch


def measure(name: str, run: Run | None = None) -> Evidence:
    (claim,) = PAPER.chosen([name])
    return claim.function(Run() if run is None else run)


def held(name: str) -> Evidence:
    return sound(measure(name))


def test_the_registry_finds_the_paper_with_its_claims_in_order() -> None:
    entry = find("deepscalelm")
    assert entry.load() is PAPER and entry.link == PAPER.link
    assert [claim.name for claim in PAPER.claims][:8] == [
        "components", "attention-forward", "attention-gradient", "attention-gradient-corrected",
        "whole-model", "deepscalelm-conserves", "gradients-with-depth", "rank-collapse",
    ]  # fmt: skip


# The simulation.


def test_moments_of_equal_and_of_opposite_tokens() -> None:
    x = torch.randn(3, 1, 50, generator=torch.Generator().manual_seed(0))
    x = x - x.mean()
    variance, r = _simulation.moments(x.expand(3, 4, 50))
    assert variance == pytest.approx(float(x.var(correction=0)), rel=1e-6)
    assert r == pytest.approx(1, abs=1e-6)
    assert _simulation.moments(torch.cat([x, -x], 1))[1] == pytest.approx(-1, abs=1e-6)


def test_alike_tokens_have_the_correlation_asked_for() -> None:
    x = _simulation.Draws(0).alike(500, 8, 64, 0.3)
    assert _simulation.moments(x) == pytest.approx((1, 0.3), abs=0.02)


def test_causal_attention_looks_only_back() -> None:
    weights = dict.fromkeys(("query", "key", "value", "output"), 0.1)
    plan = SublayerPlan("attention", 16, 16, weights, causal=True)
    x = _simulation.Draws(1).normal(1, 6, 16)
    y = x.clone()
    y[:, 4:] += 1
    one, other = (
        _simulation.attend(_simulation.Draws(0), plan, t, heads=4, key_heads=2) for t in (x, y)
    )
    assert torch.equal(one[:, :4], other[:, :4])
    assert not torch.allclose(one[:, 4:], other[:, 4:])


def test_a_draw_depends_on_its_seed_alone() -> None:
    item = {"model": "Xavier Pre-LN", "layers": 2, "width": 64, "length": 8, "rate": 0.1}
    one, same = (_stacks.curves(item | {"seed": 3}) for _ in range(2))
    other = _stacks.curves(item | {"seed": 4})
    assert np.array_equal(one["gradient"], same["gradient"])
    assert not np.array_equal(one["gradient"], other["gradient"])
    assert one["variance"].shape == (5,) and one["sums"].shape == (4,)


# Components and attention.


def test_components() -> None:
    evidence = held("components")
    assert len(evidence.table or ()) == len(components.COMPONENTS)


def test_the_papers_error_measure() -> None:
    assert components._error(2.0, 1.8, 0.0) == pytest.approx(0.1)
    # Of a covariance near 0 the error counts against the variance.
    assert components._error(0.001, 0.002, 0.5) == pytest.approx(0.002)
    assert components._error(0.0, 0.0, 0.0) == 0


def test_a_wrong_formula_of_a_component_is_seen(monkeypatch: Patch) -> None:
    function, theory = components.COMPONENTS["relu"]

    def wrong(x: Moments, d: int) -> tuple[Moments, Moments]:
        forward, backward = theory(x, d)
        return forward, backward.scaled(1.06)

    monkeypatch.setitem(components.COMPONENTS, "relu", (function, wrong))
    assert not measure("components").holds


def test_attention_forward() -> None:
    assert held("attention-forward").measured["settings"] == 6


def test_the_official_gradient_of_attention_fails_and_the_corrected_one_holds() -> None:
    (claim,) = PAPER.chosen(["attention-gradient"])
    assert isinstance(claim.expected, Fails)
    official = measure("attention-gradient")
    assert not official.holds and official.control.fails
    ratios = official.measured["foreseen_over_measured"]
    assert all(0.5 < ratio < 0.75 for ratio in ratios)
    assert official.measured["largest_error_at_small_scores"] < 0.1
    held("attention-gradient-corrected")


# Whole stacks.


class Small(Run):
    """Every claim's smallest number, whatever is counted."""

    def pick(self, *, quick: T, paper: T) -> T:
        return (64, 2) if isinstance(quick, tuple) else min(quick, 2)  # type: ignore


@pytest.fixture
def narrow(monkeypatch: Patch) -> None:
    """Stacks of a quarter of the width, with draws that are cheap."""
    small = _stacks.Size
    for module in (whole, depth, collapse):
        monkeypatch.setattr(
            module, "Size",
            lambda layers, width, length, rate=0.1: small(layers // 4, 64, 32, rate),
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["whole-model", "deepscalelm-conserves", "gradients-with-depth", "rank-collapse"]
)
def test_stacks(name: str) -> None:
    held(name)


@pytest.mark.parametrize(
    "name", ["whole-model", "deepscalelm-conserves", "gradients-with-depth", "rank-collapse"]
)
def test_small_stacks_give_evidence(name: str, narrow: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(collapse, "LAYERS", np.array([1, 4, 12]))
    evidence = measure(name, Small())
    assert evidence.control.fails, evidence.control.measured
    assert evidence.table and evidence.figure.to_dict()


def test_each_control_is_the_theory_that_it_names() -> None:
    size = _stacks.Size(24, 256, 128)
    wanted = [1.39, 3.71, 6.02, 8.34, 10.3]
    ends = np.array([1, 7, 13, 19, 24])
    assert whole._independent(size)[2 * ends - 1] == pytest.approx(wanted, rel=2e-2)
    post = collapse._blunt(_stacks.XAVIER_POST, _stacks.Size(48, 128, 64, 0.0))
    deep = collapse._blunt(_stacks.DEEP_PRE, _stacks.Size(48, 128, 64, 0.1))
    at = 2 * np.array([1, 4, 12, 24, 48])
    assert post[at] == pytest.approx([0.516, 0.958, 1, 1, 1], abs=2e-2)
    assert deep[at] == pytest.approx([0.256, 0.408, 0.660, 0.814, 0.888], abs=2e-2)


def theory_of(curves: Callable[[_stacks.Size], dict[str, Any]]) -> Any:
    """What `draws` would give if the stacks did exactly what is foreseen, changed by `curves`."""

    def measured(_: Run, models: Any, size: _stacks.Size, __: int) -> Any:
        found = {}
        for model in models:
            profile = _stacks.theory(model, size)
            exact = {
                name: np.array(getattr(profile, name))
                for name in ("sums", "gradient", "correlation")
            }
            made = exact if model == _stacks.UNSCALED else exact | curves(size)
            found[model] = {key: curve[None] for key, curve in made.items()}
        return found

    return measured


@pytest.mark.parametrize(
    ("name", "curves"),
    [
        ("whole-model", lambda size: {"sums": np.linspace(1, 3, 2 * size.layers)}),
        ("whole-model", lambda size: {"gradient": np.linspace(3, 1, 2 * size.layers + 1)}),
        ("deepscalelm-conserves", lambda size: {"sums": np.full(2 * size.layers, 1.2)}),
        ("deepscalelm-conserves", lambda size: {"gradient": np.full(2 * size.layers + 1, 0.3)}),
        ("gradients-with-depth", lambda size: {"gradient": np.ones(2 * size.layers + 1)}),
        ("rank-collapse", lambda size: {"correlation": np.full(2 * size.layers + 1, 0.5)}),
    ],
)
def test_other_curves_miss_the_criterion(
    name: str, curves: Callable[[_stacks.Size], dict[str, Any]], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(_stacks, "draws", theory_of(lambda _: {}))
    exact = measure(name)
    assert exact.holds and exact.control.fails
    monkeypatch.setattr(_stacks, "draws", theory_of(curves))
    assert not measure(name).holds


def test_the_unscaled_model_has_skip_and_branch_1() -> None:
    size = _stacks.Size(6, 64, 16)
    scaled, bare = (
        _stacks.plans(_stacks.DEEP_PRE, size),
        _stacks.plans(_stacks.UNSCALED, size),
    )
    assert bare == tuple(replace(plan, skip=1.0, branch=1.0) for plan in scaled)
    assert scaled[0].branch ** 2 == pytest.approx(2 / 6)
    assert size.r0 == pytest.approx(0.1989)
