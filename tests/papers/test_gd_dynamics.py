"""Claims on gradient descent dynamics: short runs, known values, and that they can be broken."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

from attoscope.papers import Evidence, Run
from attoscope.papers.base import Fails
from attoscope.papers.gd_dynamics import PAPER, _layer, ordering, queries, rates, slices, trap
from attoscope.papers.registry import find
from attoscope.prediction.reach import softmax_floor

T = TypeVar("T")
Patch = pytest.MonkeyPatch
OURS = [
    "softmax-sticks", "softmax-query-floor", "gaussian-reaches-every-target", "value-path-rate",
    "width-gives-a-useful-rate", "all-weights-reach-zero", "any-start-will-do",
    "gaussian-trains-better", "gaussian-slices-are-flatter", "gaussian-slices-are-smoother",
]  # fmt: skip
DOUBTED = {
    "gaussian-reaches-every-target", "width-gives-a-useful-rate", "any-start-will-do",
    "gaussian-trains-better", "gaussian-slices-are-smoother",
}  # fmt: skip


class Few(Run):
    """A quick run with at most two draws of whatever is drawn."""

    def pick(self, *, quick: T, paper: T) -> T:
        return min(quick, 2) if isinstance(quick, int) and quick < 10 else quick  # type: ignore[return-value]


def measure(name: str, run: Run | None = None) -> Evidence:
    (claim,) = PAPER.chosen([name])
    evidence = claim.function(Few() if run is None else run)
    assert evidence.figure.to_dict()
    return evidence


def held(name: str, run: Run | None = None) -> Evidence:
    evidence = measure(name, run)
    assert evidence.holds, evidence.measured
    assert evidence.control.fails, evidence.control.measured
    return evidence


def missed(name: str, run: Run | None = None) -> Evidence:
    evidence = measure(name, run)
    assert not evidence.holds, evidence.measured
    assert evidence.control.fails, evidence.control.measured
    return evidence


def test_the_registry_finds_the_paper_with_its_claims_in_order() -> None:
    entry = find("gd-dynamics")
    assert entry.load() is PAPER and entry.link == PAPER.link and entry.title == PAPER.title
    assert [claim.name for claim in PAPER.claims] == OURS
    assert {c.name for c in PAPER.claims if isinstance(c.expected, Fails)} == DOUBTED


def test_no_claim_passes_for_the_paper_s_theorem() -> None:
    for claim in PAPER.claims:
        assert "heorem" not in claim.statement
        assert any(word in claim.source for word in ("derived", "ours", "worded", "toy"))


# The layer.


def layer(draws: int = 3) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    x, y = _layer.normal(rng, draws, 2, 3, 5), _layer.normal(rng, draws, 2, 3, 2)
    shapes = {"Q": (5, 4), "K": (5, 4), "V": (5, 4), "O": (4, 2)}
    return x, y, {n: _layer.normal(rng, draws, *shape) for n, shape in shapes.items()}


@pytest.mark.parametrize("kernel", _layer.KERNELS)
def test_the_loss_is_that_of_the_formula(kernel: str) -> None:
    x, y, weights = layer()
    found = _layer.losses(kernel, x, y, weights)
    for draw in range(3):
        own = {name: w[draw] for name, w in weights.items()}
        total = 0.0
        for sample in range(2):
            q, k = x[draw, sample] @ own["Q"], x[draw, sample] @ own["K"]
            if kernel == "softmax":
                rows = torch.softmax(q @ k.T / 2, 1)
            else:
                rows = torch.exp(-torch.cdist(q, k).square() / 4)
            left = rows @ x[draw, sample] @ own["V"] @ own["O"] - y[draw, sample]
            total += float(left.square().sum() / 2)
        assert float(found[draw]) == pytest.approx(total, rel=1e-10)


def test_draws_are_trained_as_each_alone_would_be() -> None:
    x, y, weights = layer()
    path, slope, end = _layer.descend("gaussian", x, y, weights, "QV", 0.01, 5)
    assert path.shape == (6, 3) and slope.shape == (3,)
    assert torch.equal(end["K"], weights["K"]) and not torch.equal(end["Q"], weights["Q"])
    one = {name: w[1:2] for name, w in weights.items()}
    alone, _, last = _layer.descend("gaussian", x[1:2], y[1:2], one, "QV", 0.01, 5)
    np.testing.assert_allclose(alone[:, 0], path[:, 1], rtol=1e-12)
    torch.testing.assert_close(last["V"], end["V"][1:2])
    assert (np.diff(path, axis=0) < 0).all()


def test_tokens_are_orthonormal_over_all_samples() -> None:
    tokens = _layer.orthonormal_tokens(np.random.default_rng(0), 4, 3, 12).flatten(0, 1)
    torch.testing.assert_close(tokens @ tokens.T, torch.eye(12, dtype=torch.float64))


# Equal values.


def test_softmax_sticks(monkeypatch: Patch) -> None:
    monkeypatch.setattr(trap, "STEPS", 1200)
    monkeypatch.setattr(trap, "ZERO", 1e-3)  # what so few steps reach
    found = held("softmax-sticks")
    assert found.measured["largest_gradient_while_stuck"] < 1e-14
    plain = _layer.attention
    monkeypatch.setattr(_layer, "attention", lambda kernel, x, w: plain("gaussian", x, w))
    assert not measure("softmax-sticks").holds


def test_the_trap_s_formula() -> None:
    """0.685 |v|^2, which is the floor over all softmax weights as well."""
    drawn = trap.drawn(0, odd=False)
    values = drawn["x"] @ drawn["V"] @ drawn["O"]
    v = values[0, 0]
    torch.testing.assert_close(values, v.expand_as(values))
    assert float(drawn["formula"]) == pytest.approx(0.685 * float(v.square().sum()))
    assert softmax_floor(values, drawn["y"]) == pytest.approx(float(drawn["formula"]))
    odd = trap.drawn(0, odd=True)
    assert not torch.allclose((odd["x"] @ odd["V"])[0, 0], (odd["x"] @ odd["V"])[0, 1])


# Queries alone.


def test_softmax_query_floor(monkeypatch: Patch) -> None:
    monkeypatch.setattr(queries, "STEPS", 1200)
    monkeypatch.setattr(queries, "SHARE", 0.1)
    found = measure("softmax-query-floor")
    assert found.measured["largest_distance_to_floor"] < 1e-4
    assert found.control.fails
    monkeypatch.setattr(queries, "softmax_floor", lambda v, y, **_: softmax_floor(v, y) + 1e-3)
    assert not measure("softmax-query-floor").holds


def test_the_floor_of_identity_values_is_the_formula() -> None:
    drawn = queries.drawn(0, queries.ROWS, "gaussian")
    values = drawn["x"] @ drawn["V"] @ drawn["O"]
    eye = torch.eye(3, dtype=torch.float64).expand(4, 3, 3)
    torch.testing.assert_close(values, eye)
    expected = float((drawn["y"].sum(-1) - 1).square().sum() / 6)
    assert softmax_floor(values, drawn["y"]) == pytest.approx(expected, rel=1e-10)
    same = queries.drawn(0, queries.ROWS, "softmax")
    assert softmax_floor(values, same["y"]) < 1e-20


def test_gaussian_reaches_every_target(monkeypatch: Patch) -> None:
    monkeypatch.setattr(queries, "STEPS", 800)
    found = missed("gaussian-reaches-every-target")
    assert (found.measured["loss_gaussian"] < found.measured["loss_softmax"]).all()


def test_straightness_is_of_log_losses_above_rounding() -> None:
    straight = np.exp(-0.5 * np.arange(400))
    assert queries.straightness(straight) == pytest.approx(1.0)
    assert queries.straightness(1 / (1 + np.arange(400.0))) < 0.999  # a power law


# Width.


def test_value_path_rate(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rates, "STEPS", 500)
    found = held("value-path-rate")
    assert found.measured["largest_excess"] <= 1e-9
    plain = rates.value_path

    def faster(*args: Any, **kwargs: Any) -> Any:
        path = plain(*args, **kwargs)
        return type(path)(
            **{f: getattr(path, f) for f in path.__slots__} | {"mu": path.largest / 2}
        )

    monkeypatch.setattr(rates, "value_path", faster)
    assert not measure("value-path-rate").holds


def test_width_gives_a_useful_rate() -> None:
    found = missed("width-gives-a-useful-rate")
    assert 0 < found.measured["largest mu/L"] < 1e-3


def test_all_weights_reach_zero_from_near_and_not_from_far(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rates, "ALL_STEPS", 1000)
    held("all-weights-reach-zero")
    far = missed("any-start-will-do")
    assert far.measured["share that arrive, gaussian"] < 1


# Classification and slices.


def test_the_task_has_two_marks_and_balanced_classes() -> None:
    tokens, labels = ordering.two_marks(np.random.default_rng(0), 4000)
    marked = tokens >= ordering.SYMBOLS
    assert (marked.sum(1) == 2).all()
    pairs = tokens[marked].reshape(-1, 2)
    assert ((pairs[:, 0] == pairs[:, 1]) == labels).all()
    assert labels.mean() == pytest.approx(0.5, abs=0.03)
    assert np.bincount(pairs.ravel())[ordering.SYMBOLS :].min() > 1800


def test_models_trained_side_by_side_are_those_trained_alone() -> None:
    item = {"kernel": "gaussian", "rate": 2e-3, "seeds": [3, 4], "steps": 20}
    both = ordering.trained(item)
    alone = ordering.trained(item | {"seeds": [4]})
    np.testing.assert_allclose(both[:, 1], alone[:, 0], rtol=1e-3)
    assert both.shape == (20, 2)


def test_the_classifier_s_softmax_is_torch_s_attention() -> None:
    torch.manual_seed(0)
    model = ordering.Classifier("softmax")
    tokens = torch.randint(8, (3, 16))
    x = model.embed(tokens) + model.place
    attend = nn.MultiheadAttention(32, 2, batch_first=True)
    attend.in_proj_weight, attend.in_proj_bias = model.qkv.weight, model.qkv.bias
    attend.out_proj = model.out
    h = model.norms[0](x)
    x = x + attend(h, h, h)[0]
    x = x + model.down(nn.functional.gelu(model.up(model.norms[1](x))))
    torch.testing.assert_close(model(tokens), model.classes(x.mean(1)))


def test_the_ordering_claim_fails_on_the_toy_and_can_hold(monkeypatch: Patch) -> None:
    falling = np.linspace(1, 0.5, 100)[:, None] * np.linspace(1, 1.2, 6)

    class Six(Few):
        def map(self, function: Any, items: Any, label: str = "items") -> Any:
            return [falling * (0.5 if i["kernel"] == winner else 1.0) for i in items]

    winner = "softmax"
    evidence = measure("gaussian-trains-better", Six())
    assert not evidence.holds and evidence.measured["wins_of_the_gaussian"] == 0
    winner = "gaussian"
    evidence = measure("gaussian-trains-better", Six())
    assert evidence.holds and evidence.measured["wins_of_the_gaussian"] == 6


def test_slices(monkeypatch: Patch) -> None:
    flat = held("gaussian-slices-are-flatter", Three())
    assert (flat.measured["ratio"] < 1).all()
    smooth = measure("gaussian-slices-are-smoother", Three())
    assert not smooth.holds


class Three(Few):
    """Three draws; a slice's control compares a draw with the next."""

    def pick(self, *, quick: T, paper: T) -> T:
        return min(quick, 3)  # type: ignore[type-var]


def test_the_middle_of_a_slice_is_the_loss_itself() -> None:
    x, y, weights = layer(1)
    grid = slices.surface("gaussian", x, y, weights, np.random.default_rng(0))
    assert grid.shape == (21, 21)
    assert grid[10, 10] == pytest.approx(float(_layer.losses("gaussian", x, y, weights)[0]))
