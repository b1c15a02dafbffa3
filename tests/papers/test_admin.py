"""Claims about Admin: each holds in a small run, and not when it is broken."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import attoscope.remedies.skips as skips
from attoscope.papers import Evidence, Run
from attoscope.papers.admin_init import PAPER, change, closed_forms, dependency
from attoscope.papers.admin_init._stacks import NAMED, stack
from attoscope.papers.registry import find
from tests.papers.judging import sound

T = TypeVar("T")
Patch = pytest.MonkeyPatch
OURS = [
    "closed-form-shares", "change-is-the-sum-of-own-shares", "growth-with-depth",
    "admin-starts-like-pre-norm", "own-share-along-depth", "factors-fold-away",
]  # fmt: skip


class Few(Run):
    """A quick run with at most two of whatever is drawn, and at most five depths."""

    def pick(self, *, quick: T, paper: T) -> T:
        return quick if isinstance(quick, tuple) else min(quick, 2)  # type: ignore[type-var]


def measure(name: str) -> Evidence:
    (claim,) = PAPER.chosen([name])
    return claim.function(Few())


def held(name: str) -> Evidence:
    return sound(measure(name))


def test_the_registry_finds_the_paper_with_its_claims_in_order() -> None:
    entry = find("admin-init")
    assert entry.load() is PAPER and entry.link == PAPER.link and entry.title == PAPER.title
    names = [claim.name for claim in PAPER.claims]
    assert [name for name in names if name in OURS] == OURS


def test_stacks_share_their_weights_and_are_initialised_as_in_fairseq() -> None:
    weights = {}
    for name in NAMED:
        subject, x = stack(name, 4, seed=3)
        assert x.dtype == torch.float64 and x.shape == (4, 16, 64)
        assert float(x.mean(-1).abs().max()) < 1e-12
        model: Any = subject.model
        weights[name] = model.layers[1].linear1.weight
        attention = model.layers[1].self_attn
        assert float(attention.out_proj.bias.detach().abs().max()) == 0.0
        if name in ("Post-LN", "Pre-LN"):
            largest = float(attention.in_proj_weight.detach().abs().max())
            assert 0.99 * (6 / 256) ** 0.5 < largest <= (6 / 256) ** 0.5
    assert all(torch.equal(w, weights["Post-LN"]) for w in weights.values())


def test_closed_form_shares(monkeypatch: Patch) -> None:
    evidence = held("closed-form-shares")
    sums = {(row["depth"], row["model"]): row["closed_form"] for row in evidence.table or ()}
    assert sums[2, "Pre-LN"] == pytest.approx(1 / 2 + 1 / 3)
    assert sums[24, "Post-LN"] == 12.0 and sums[24, "O(1)"] == pytest.approx(24 / 25)
    monkeypatch.setattr(closed_forms, "closed_form", lambda depth, scale: 1.0)
    assert not measure("closed-form-shares").holds


Sweep = tuple[tuple[int, ...], dict[str, dict[str, np.ndarray]]]


def test_a_sweep_measures_every_variant(monkeypatch: Patch) -> None:
    """Small but real: the theorem holds in shallow stacks, and the last row's shares do not do."""
    monkeypatch.setattr(change, "QUICK_DEPTHS", (2, 12))
    depths, found = change.measured(Few())
    assert depths == (2, 12) and set(found) == set(NAMED)
    for each in found.values():
        assert change.LOW < float((each["change"] / each["own"])[0]) < change.HIGH
        assert (each["last"] < 1.2).all()
    np.testing.assert_allclose(found["O(n)"]["own"], found["Post-LN"]["own"], rtol=1e-9)
    assert found["Admin, profiled"]["own"] == pytest.approx(found["Pre-LN"]["own"], rel=0.06)
    assert found["Post-LN"]["own"][1] > 1.4 * found["Pre-LN"]["own"][1]


def in_theory() -> Sweep:
    """What the theorem gives for branches as large as the stream."""
    depths = (2, 16, 64)
    found = {}
    for name, variant in NAMED.items():
        key = {"profile": "Admin", "O(logn)": "O(log n)", "O(1)": "O(1)", "O(n)": "Post-LN"}
        model = name if variant.scale is None else key[variant.scale]
        own = np.array([closed_forms.expected(n)[model] for n in depths])
        found[name] = {
            "own": own, "change": 2 * own, "change_sd": 0 * own, "last": 1 - 1 / (1.0 + own),
        }  # fmt: skip
    return depths, found


@pytest.mark.parametrize(
    ("name", "model", "key", "factor"),
    [
        ("change-is-the-sum-of-own-shares", "Pre-LN", "own", [1.0, 1.0, 2.0]),
        ("change-is-the-sum-of-own-shares", "O(1)", "change", [0.5, 1.0, 1.0]),
        ("growth-with-depth", "Admin, profiled", "change", [1.0, 1.0, 2.0]),
        ("growth-with-depth", "Post-LN", "change", [1.0, 1.0, 0.5]),
        ("growth-with-depth", "O(1)", "change", [1.0, 1.0, 0.8]),
        ("admin-starts-like-pre-norm", "Admin, profiled", "change", [1.0, 1.2, 1.0]),
        ("admin-starts-like-pre-norm", "Post-LN", "change", [1.0, 1.0, 0.2]),
    ],
)
def test_claims_of_output_change_are_judged(
    monkeypatch: Patch, name: str, model: str, key: str, factor: list[float]
) -> None:
    depths, found = in_theory()
    monkeypatch.setattr(change, "measured", lambda run: (depths, found))
    held(name)
    found[model][key] = found[model][key] * np.array(factor)
    assert not measure(name).holds


def test_slopes() -> None:
    depths = (2, 4, 16, 32, 64)
    n = np.array(depths, dtype=float)
    assert change.slope(depths, 3 * n) == pytest.approx(1.0)
    assert change.slope(depths, n**0) == pytest.approx(0.0)
    assert 0.25 < change.slope(depths, np.log(n)) < 0.35


def test_own_share_along_depth(monkeypatch: Patch) -> None:
    held("own-share-along-depth")
    monkeypatch.setattr(dependency, "PRE", dependency.POST)
    assert not measure("own-share-along-depth").holds


def test_factors_fold_away(monkeypatch: Patch) -> None:
    held("factors-fold-away")
    plain = skips._fold_into_norm

    def halved(model: Any, place: Any, omega: Any) -> None:
        plain(model, place, omega)
        skips.parameter_at(model, place.weights[0].parameter).mul_(1 + 1e-9)

    monkeypatch.setattr(skips, "_fold_into_norm", halved)
    assert not measure("factors-fold-away").holds
