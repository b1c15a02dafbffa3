"""Claims about NeuTRENO: each holds in a small run, and not when it is broken."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attoscope.measures.smoothness import family
from attoscope.papers import Evidence, Run
from attoscope.papers.base import Fails
from attoscope.papers.neutreno import PAPER, fixed, flow, untrained
from attoscope.papers.neutreno._draws import frequency_ratio
from attoscope.papers.registry import find
from attoscope.prediction.stacks import untrained_stack
from attoscope.remedies.functional import flow_limit, stacked_limit
from tests.papers.judging import sound

T = TypeVar("T")
Patch = pytest.MonkeyPatch
OURS = [
    "attention-is-an-euler-step", "flow-limits", "anchored-fixed-point", "stability-limit",
    "cosine-falls-with-strength", "anchor-keeps-rank", "anchor-lowers-cosine",
]  # fmt: skip


class Few(Run):
    """A quick run with at most five of whatever is drawn."""

    most = 5

    def pick(self, *, quick: T, paper: T) -> T:
        return min(quick, self.most)  # type: ignore[type-var]


class Two(Few):
    most = 2


class One(Few):
    most = 1


def measure(name: str, run: Run | None = None) -> Evidence:
    (claim,) = PAPER.chosen([name])
    return claim.function(Two() if run is None else run)


def held(name: str, run: Run | None = None) -> Evidence:
    return sound(measure(name, run))


def test_the_registry_finds_the_paper_with_its_claims_in_order() -> None:
    entry = find("neutreno")
    assert entry.load() is PAPER and entry.link == PAPER.link and entry.title == PAPER.title
    names = [claim.name for claim in PAPER.claims]
    assert [name for name in names if name in OURS] == OURS


def test_the_ratio_is_that_of_the_measures_and_exact_near_collapse() -> None:
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    everyone = torch.ones(3, 6, dtype=torch.bool)
    assert torch.allclose(frequency_ratio(x), family(x, everyone)[1], atol=1e-12)
    nearly = torch.tensor([[1.0 + 1e-13], [1.0 - 1e-13]], dtype=torch.float64)
    assert float(frequency_ratio(nearly)) == pytest.approx(1e-13, rel=0.01)


# The functional.


def test_euler_step(monkeypatch: Patch) -> None:
    found = held("attention-is-an-euler-step")
    assert found.measured["largest_difference"] > 0
    monkeypatch.setattr(
        flow,
        "scaled_dot_product_attention",
        lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=1.0),
    )
    assert not measure("attention-is-an-euler-step").holds


def test_flow_limits(monkeypatch: Patch) -> None:
    held("flow-limits", One())
    constant = {"strength": 0.6, "seed": 1, "constant": True}
    assert flow.descend(constant)["ratio"][-1] < 1e-9
    monkeypatch.setattr(
        flow, "flow_limit", lambda kernel, f, lam: flow_limit(kernel, f, lam / 2)
    )
    assert not measure("flow-limits", One()).holds


def test_a_limit_that_is_wrong_without_strength_alone_is_not_overlooked(
    monkeypatch: Patch,
) -> None:
    def wrong_at_0(kernel: Any, anchor: Any, strength: float) -> Any:
        limit = flow_limit(kernel, anchor, strength)
        return limit if strength else limit - anchor.mean(0)

    monkeypatch.setattr(flow, "flow_limit", wrong_at_0)
    assert not measure("flow-limits", One()).holds


def test_the_flow_of_a_kernel_with_one_heavy_token_ends_at_the_token_mean() -> None:
    # Of these keys one has a large weight on itself, and the ties between tokens are weak.
    seeds = Run(scale="paper").rng("draws").integers(2**31, size=100).tolist()
    weak = []
    for seed in seeds:
        keys, anchor = np.random.default_rng(seed).standard_normal((2, flow.TOKENS, flow.WIDTH))
        kernel = torch.from_numpy(np.exp(keys @ keys.T / flow.WIDTH**0.5))
        kernel /= kernel.sum(1).mean()
        signal = torch.from_numpy(anchor)
        weak.append(float((flow_limit(kernel, signal, 0.0) - signal.mean(0)).abs().max()))
    assert max(weak) < 1e-12


# Layers that share one attention.


def test_anchored_fixed_point(monkeypatch: Patch) -> None:
    found = held("anchored-fixed-point", Few())
    assert found.control.measured["median_norm_zero_anchor_60_layers"] < 1e-2
    monkeypatch.setattr(
        fixed, "stacked_limit", lambda a, x, lam: stacked_limit(a, x, 1.01 * lam)
    )
    assert not measure("anchored-fixed-point").holds


def test_without_the_term_the_tokens_of_a_shared_attention_collapse(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fixed, "neutreno_attention", lambda a, x, *_: a @ x)
    broken = measure("anchored-fixed-point")
    assert not broken.holds and broken.measured["median_ratio_at_0.6"] < 1e-12


def test_attention_is_drawn_until_it_settles_in_time() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        attention, drawn = fixed.settling_attention(rng)
        values = torch.linalg.eigvals(attention)
        moving = values[(values - 1).abs() > 1e-9]
        assert drawn >= 1 and len(moving) == fixed.TOKENS - 1
        assert float((moving - 0.6).abs().max()) < fixed.SLOWEST


def test_stability_limit(monkeypatch: Patch) -> None:
    # Further from the limit, where a sixth of the layers show it.
    monkeypatch.setattr(fixed, "OFFSETS", (-0.06, 0.06))
    monkeypatch.setattr(fixed, "MANY", 500)
    held("stability-limit", One())
    monkeypatch.setattr(fixed, "stability_limit", lambda a: a.new_full((len(a),), 0.7))
    broken = measure("stability-limit", One())
    assert not broken.holds and broken.measured["surprises, any scores"] > 0
    assert broken.measured["surprises, causal"] == 0


def test_a_draw_that_does_neither_is_a_surprise() -> None:
    grown = np.array([[1e-9, 1e-9, 1e-3, np.nan], [1e9, 1.0, 1e9, 1e9]])
    assert fixed.surprises(grown) == 3


# Untrained stacks.


def test_cosine_falls_with_strength(monkeypatch: Patch) -> None:
    held("cosine-falls-with-strength", Few())
    monkeypatch.setattr(
        untrained,
        "untrained_stack",
        lambda rng, *, strength, **options: untrained_stack(rng, strength=-strength, **options),
    )
    broken = measure("cosine-falls-with-strength")
    assert not broken.holds and not broken.control.fails


def test_anchor_keeps_rank(monkeypatch: Patch) -> None:
    found = held("anchor-keeps-rank", Few())
    assert found.control.measured["cosine"] < untrained.DIVERSE  # as low as with the anchor
    monkeypatch.setattr(
        untrained,
        "untrained_stack",
        lambda rng, *, anchor, **options: untrained_stack(rng, anchor="zero", **options),
    )
    assert not measure("anchor-keeps-rank", Few()).holds


def test_anchor_lowers_cosine_is_declared_not_to_hold_and_could(monkeypatch: Patch) -> None:
    (claim,) = PAPER.chosen(["anchor-lowers-cosine"])
    assert isinstance(claim.expected, Fails)
    found = measure("anchor-lowers-cosine", Few())
    assert not found.holds and found.control.fails and found.figure.to_dict()
    assert found.measured["share_of_the_fall_with_zero"] > 0.9

    def needs_an_anchor(rng: Any, *, anchor: str, **options: Any) -> Any:
        return untrained_stack(rng, anchor=None if anchor == "zero" else anchor, **options)

    monkeypatch.setattr(untrained, "untrained_stack", needs_an_anchor)
    possible = measure("anchor-lowers-cosine", Few())
    assert possible.holds and not possible.control.fails


def test_seeds_share_their_weights_between_cases() -> None:
    found = untrained.stacks(Two(), (untrained.NONE, untrained.FULL))
    none, full = (found[case]["cosine"] for case in (untrained.NONE, untrained.FULL))
    assert none.shape == (2, 49)
    # The first layer is plain in both.
    assert np.array_equal(none[:, :2], full[:, :2]) and (none[:, 2] != full[:, 2]).all()
