"""Claims of the follow-ups: each holds in a small run, and not when it is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from attoscope.dynamics import (
    AttentionData,
    GradientDescent,
    LinearHead,
    Mirror,
    Normalised,
    train,
)
from attoscope.papers import Evidence, Run
from attoscope.papers.attention_max_margin_followups import (
    PAPER,
    decay,
    fingerprint,
    joint,
    mirror,
    next_token,
    noise,
    rates,
    recall,
)
from attoscope.papers.registry import find
from attoscope.svm.estimator import AttentionSVM
from attoscope.tasks.next_token import next_token_contexts
from attoscope.tasks.prompts import prompt_sequences, single_prompt
from tests.papers.judging import sound

T = TypeVar("T")
Patch = pytest.MonkeyPatch


class Few(Run):
    """A quick run with at most `most` of whatever is counted."""

    most = 2

    def pick(self, *, quick: T, paper: T) -> T:
        return min(quick, self.most) if quick <= 20 else quick  # type: ignore[return-value,operator,type-var]


class Five(Few):
    most = 5


class One(Few):
    most = 1


def measure(name: str, run: Run | None = None) -> Evidence:
    (claim,) = PAPER.chosen([name])
    return claim.function(Few() if run is None else run)


def held(name: str, run: Run | None = None) -> Evidence:
    return sound(measure(name, run))


def test_the_registry_finds_the_paper_with_its_claims_in_order() -> None:
    entry = find("attention-max-margin-followups")
    assert entry.load() is PAPER and entry.link == PAPER.link
    assert [claim.name for claim in PAPER.claims] == [
        "optimiser-fingerprint", "joint-max-margin", "prompt-basins", "graph-svm",
        "hard-and-soft-parts", "convergence-rates", "mirror-descent", "recall-margins",
        "recall-training", "label-noise", "two-steps", "small-start", "decay-is-nuclear",
    ]  # fmt: skip


# Fingerprint.


def test_fingerprint(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fingerprint, "STEPS", 2500)
    rows = [row for row in fingerprint.ROWS if row.optimiser in ("normalised GD", "Adam")]
    monkeypatch.setattr(fingerprint, "ROWS", (*rows, fingerprint.ROWS[-1]))
    found = held("optimiser-fingerprint")
    assert [row["answer"] for row in found.table or ()] == ["frobenius", "max", "none"]
    monkeypatch.setitem(fingerprint.RULES, "Adam", Normalised(fingerprint.step_length))
    broken = measure("optimiser-fingerprint")
    assert not broken.holds
    assert broken.measured["rows_named"] == 1
    assert not broken.control.fails  # what stands for Adam on factors is nuclear now


def test_a_row_is_named_by_its_least_excess_unless_that_is_large() -> None:
    assert fingerprint.named({"max": 1.06, "l1": 1.07}) == "max"
    assert fingerprint.named({"max": 1.0601, "l1": 1.07}) == "none"


def test_normalised_steps_do_not_change_when_gradients_come_at_norm_one() -> None:
    instance = single_prompt(0.0)
    data = AttentionData.cross(
        instance.tokens[None], [[[1.0]]], [[1.0]], LinearHead(instance.head[None])
    )
    plain = train(data, Normalised(0.1), 50)
    unit = train(data, fingerprint.UnitGradient(Normalised(0.1)), 50)
    assert np.allclose(plain.weight, unit.weight, atol=1e-12)
    assert np.allclose(plain.coefficients, unit.coefficients, atol=1e-12)


# Prompts.


def test_smallest_prompts_and_which_margins_are_asked() -> None:
    tight, relaxed = prompt_sequences(), prompt_sequences((0.5, 1.5))
    p = joint.prompt_svm(tight, np.ones(3))
    assert np.allclose(p, (4 / 3, 1 / 3), atol=1e-6)
    assert p @ p / 2 == pytest.approx(17 / 18, abs=1e-6)
    assert joint.joint_margins(tight).tolist() == [1.0, 1.0, 1.0]
    assert joint.joint_margins(relaxed).tolist() == [1.0, 1.0, 0.0]
    assert np.allclose(joint.prompt_svm(relaxed, np.array([1.0, 1.0, 0.0])), (1, 0), atol=1e-6)
    assert np.allclose(joint.value_svm(relaxed).weight_[:, 0], (0, 1), atol=1e-6)


def test_joint_max_margin(monkeypatch: Patch) -> None:
    monkeypatch.setattr(joint, "STEPS", 400)
    found = held("joint-max-margin")
    tight, relaxed = found.table or ()
    assert tight["least_selected"] == pytest.approx(0.38, abs=0.005)
    assert relaxed["angle_all_margins_1"] > 0.15
    monkeypatch.setattr(joint, "joint_margins", lambda _: np.ones(3))
    assert not measure("joint-max-margin").holds


def test_prompt_basins(monkeypatch: Patch) -> None:
    found = held("prompt-basins")
    assert found.measured["end_token"].tolist() == [0, 0, 0, 0, 1, 1]
    monkeypatch.setattr(joint, "single_prompt", lambda _: single_prompt(0.9))
    assert not measure("prompt-basins").holds


# Next tokens.


def test_choice_loss_derivatives_are_those_of_its_value() -> None:
    loss = next_token.ChoiceLoss.next_token(next_token_contexts(3, K=4, d=3))
    w = np.random.default_rng(0).standard_normal(9)
    assert np.allclose(loss.gradient(w), approx_fprime(w, loss.value, 1e-7), atol=1e-6)
    assert np.allclose(loss.hessian(w), approx_fprime(w, loss.gradient, 1e-7), atol=1e-6)


def test_graph_svm(monkeypatch: Patch) -> None:
    found = held("graph-svm")
    assert found.measured["largest_error_of_its_predicted_norm"] < 1e-4
    real = next_token.ChoiceLoss.next_token

    def all_tokens(data: Any) -> next_token.ChoiceLoss:
        loss = real(data)
        loss.bias = np.zeros_like(loss.bias)
        return loss

    monkeypatch.setattr(next_token.ChoiceLoss, "next_token", all_tokens)
    assert not measure("graph-svm").holds


def test_hard_and_soft_parts(monkeypatch: Patch) -> None:
    monkeypatch.setattr(next_token, "STEPS", 6000)
    found = held("hard-and-soft-parts")
    assert found.measured["components"] == [[0, 1], [2]]
    assert np.allclose(found.measured["graph_svm"], (1 / 3, 1 / 3, -2 / 3), atol=1e-6)
    assert found.measured["loss"] == pytest.approx(0.6365, abs=2e-4)
    monkeypatch.setattr(next_token, "soft_component", lambda e, *_: np.zeros_like(e))
    assert not measure("hard-and-soft-parts").holds


# Rates and mirror descent.


def test_convergence_rates(monkeypatch: Patch) -> None:
    found = held("convergence-rates", Five())
    assert found.measured["norm_plain_at_10000"] == pytest.approx(18.7, rel=0.1)
    monkeypatch.setitem(rates.RULES, "normalised", (GradientDescent(1.0), 6))
    monkeypatch.setattr(rates, "STEPS", (3, 10, 30, 100, 300, 1000))
    assert not measure("convergence-rates", One()).holds


def test_mirror_descent(monkeypatch: Patch) -> None:
    monkeypatch.setattr(mirror, "POWERS", (1.5, 2.0))
    monkeypatch.setattr(mirror, "STEPS", 3000)
    held("mirror-descent")
    monkeypatch.setattr(mirror, "Mirror", lambda _, lr: Mirror(2.0, lr))
    assert not measure("mirror-descent").holds


# Recall.


def test_recall_margins(monkeypatch: Patch) -> None:
    found = held("recall-margins")
    assert np.allclose(found.measured["nuclear_margins"], (0.5**0.5, 3**-0.5, 1, 1), atol=1e-4)
    first = (found.table or ())[0]
    assert first["value_frobenius"] == pytest.approx(3.31662, abs=1e-4)
    assert first["value_nuclear"] == pytest.approx(6.56048, abs=1e-4)
    monkeypatch.setattr(recall, "AttentionSVM", lambda norm, tol: AttentionSVM(tol=tol))
    assert not measure("recall-margins").holds


REAL: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "recall": recall.train_recall,
    "noise": noise.memorise,
    "decay": decay.descend,
}


def never_factored(item: dict[str, Any]) -> dict[str, Any]:
    return REAL["recall"]({**item, "factored": False})


def test_recall_training(monkeypatch: Patch) -> None:
    monkeypatch.setattr(recall, "CASES", {(3, 1, 2): (None, None)})
    held("recall-training", One())
    monkeypatch.setattr(recall, "train_recall", never_factored)
    assert not measure("recall-training", One()).holds


# Noise.


def always_right(item: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value[::-1] if value.ndim == 2 else value
        for key, value in REAL["noise"](item).items()
    }


def test_label_noise(monkeypatch: Patch) -> None:
    monkeypatch.setattr(noise, "TEST", 200)
    held("label-noise", One())
    monkeypatch.setattr(noise, "memorise", always_right)
    broken = measure("label-noise", One())
    assert not broken.holds and broken.measured["largest_flipped_attention"] > 0.05


def test_two_steps(monkeypatch: Patch) -> None:
    monkeypatch.setattr(noise, "TEST", 200)
    held("two-steps", One())
    monkeypatch.setattr(noise, "SMALL_STEP", noise.LARGE_STEP)
    assert not measure("two-steps", One()).holds


# Factors.


def test_diagonal_flow_is_the_limit_of_small_steps() -> None:
    k = q = np.full(2, 0.3)
    while (k * q) @ decay.CONSTRAINT < 5.0:
        slope = 1e-4 * decay.CONSTRAINT
        k, q = k + slope * q, q + slope * k
    assert np.allclose(k * q, decay.diagonal_flow(0.3, 5.0), rtol=2e-3)


def test_small_start(monkeypatch: Patch) -> None:
    found = held("small-start")
    assert np.allclose(found.measured["shares"], (0.9998, 0.982, 0.840, 0.615), atol=1e-3)
    monkeypatch.setattr(decay, "diagonal_flow", lambda *_: decay.CONSTRAINT)
    assert not measure("small-start").holds


def decoupled(item: dict[str, Any]) -> dict[str, Any]:
    return REAL["decay"]({**item, "decay": 0.5 * item["decay"]})


def test_decay_is_nuclear(monkeypatch: Patch) -> None:
    monkeypatch.setattr(decay, "STEPS", 5000)
    found = held("decay-is-nuclear")
    assert np.allclose((found.table or ())[0]["singular_values"], (0.9, 0.7, 0.5, 0.3, 0.1))
    monkeypatch.setattr(decay, "descend", decoupled)
    assert not measure("decay-is-nuclear").holds
