"""Claims 1 to 6 of the main paper: each holds in a small run, and not when it is broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attoscope.dynamics import Condition
from attoscope.papers import Run
from attoscope.papers.transformers_as_svms import (
    _scs,
    _setting,
    feasibility,
    global_paths,
    local_convergence,
    overparameterisation,
    rank,
)
from attoscope.papers.transformers_as_svms._paper import PAPER
from attoscope.svm import Selection
from attoscope.tasks import Instance

MODULES = (local_convergence, global_paths, rank, overparameterisation, feasibility)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few instances and sizes; what is judged stays as it is."""
    real = _setting.instance_seeds
    most = {"local_convergence": 4, "global_paths": 1, "rank": 5, "feasibility": 2}
    for module in MODULES:
        count = most.get(module.__name__.rsplit(".")[-1], 400)
        few = lambda run, n, count=count: real(run, min(n, count))  # noqa: E731
        monkeypatch.setattr(module, "instance_seeds", few)
    monkeypatch.setattr(rank, "SIZES", ((10, 5), (5, 10)))
    monkeypatch.setattr(rank, "WIDTHS", (2, 10))
    monkeypatch.setattr(rank, "WIDE", (5, 10))
    monkeypatch.setattr(rank, "PEER_AT", ())
    monkeypatch.setattr(overparameterisation, "QUICK", {5: 25, 20: 5})
    monkeypatch.setattr(overparameterisation, "SETTINGS", {(5, 5, 10): 20, (3, 3, 4): 20})


CLAIMS = {
    "local-convergence": local_convergence.local_convergence,
    "global-paths": global_paths.global_paths,
    "svm-rank": rank.svm_rank,
    "frobenius-full-rank": rank.frobenius_full_rank,
    "overparameterisation": overparameterisation.overparameterisation,
    "first-gradient": overparameterisation.first_gradient,
    "feasibility": feasibility.feasibility,
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_small_run_comes_out_as_declared_and_its_control_fails(name: str) -> None:
    (claim,) = PAPER.chosen([name])
    assert claim.function is CLAIMS[name]
    evidence = claim.function(Run())
    assert evidence.holds is (name != "frobenius-full-rank")
    assert evidence.control.fails
    assert evidence.figure.to_dict()["$schema"].startswith("https://vega.github.io")


# Broken variants: none may hold.


def test_the_other_norm_is_not_where_training_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = {"W": "nuclear", "(K,Q)": "frobenius"}
    monkeypatch.setattr(local_convergence, "OWN", swapped)
    monkeypatch.setattr(local_convergence, "STEPS", 1000)
    monkeypatch.setattr(local_convergence, "RECORD", [0, 200, 1000])
    assert not local_convergence.local_convergence(Run()).holds


def test_a_criterion_of_local_convergence_needs_all_its_parts() -> None:
    good = {
        "correlation, own norm": 0.99,
        "correlation, other norm": 0.9,
        "own norm nearer": 0.95,
    }
    assert local_convergence.meets(good)
    for name, worse in (("own norm nearer", 0.94), ("correlation, other norm", 0.91)):
        assert not local_convergence.meets({**good, name: worse})


def test_paths_do_not_go_to_the_other_norms_svm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_paths, "NORMS", ("nuclear", "frobenius"))
    monkeypatch.setattr(global_paths, "STEPS", 500)
    monkeypatch.setattr(global_paths, "RECORD", [0, 500])
    assert not global_paths.global_paths(Run()).holds


def test_frobenius_solutions_break_the_bound_on_nuclear_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = rank.solve
    monkeypatch.setattr(rank, "solve", lambda selection, norm: real(selection, "frobenius"))
    evidence = rank.svm_rank(Run())
    assert not evidence.holds and evidence.measured["nuclear rank above its bound"] > 0


def test_a_nuclear_solution_has_not_the_rank_of_the_frobenius_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = rank.solve
    monkeypatch.setattr(rank, "SIZES", ((10, 5),))
    monkeypatch.setattr(rank, "_ratio", lambda *cells: 0.5)
    monkeypatch.setattr(rank, "solve", lambda selection, norm: real(selection, "nuclear"))
    evidence = rank.svm_rank(Run())
    assert not evidence.holds and evidence.measured["Frobenius rank other than stated"] > 0


def test_the_full_rank_could_have_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "sweep", lambda *sizes: {(5, 5, 5): FULL})
    assert rank.frobenius_full_rank(Run()).holds


FULL = {name: np.full(3, 5.0) for name in rank.READINGS} | {"infeasible": np.zeros(3)}


def test_training_that_has_hardly_begun_is_not_locally_optimal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overparameterisation, "QUICK", {5: 10})
    monkeypatch.setattr(overparameterisation, "EARLY", 1)
    monkeypatch.setattr(overparameterisation, "LATE", 2)
    monkeypatch.setattr(overparameterisation, "LAST", 4)
    evidence = overparameterisation.overparameterisation(Run())
    assert not evidence.holds
    assert evidence.measured["locally optimal after 64,000 steps, least"] < 1.0


def test_training_goes_on_where_it_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overparameterisation, "LAST", 8000)
    item = {"seeds": [313, 314], "d": 3}
    late, last = overparameterisation.train_width(item)["local"][1:]
    assert late.tolist() == [False, True] and last.tolist() == [True, True]


def test_the_first_step_separates_where_it_can() -> None:
    data = _setting.unit_sphere_data(range(40), 3, 3, 4)
    condition = overparameterisation.first_gradient_separates(data)
    length = overparameterisation.first_length(condition)
    weight = overparameterisation.first_weight(data, length)
    assert length.min() == 30.0 and np.linalg.norm(weight, axis=(1, 2)) == pytest.approx(length)
    for trial in np.flatnonzero(condition.holds).tolist():
        selection = data.selection(trial, data.optimal()[trial])
        assert selection.margins(weight[trial])[~selection.selected].min() > 10.0 - 1e-9


@pytest.mark.parametrize(
    ("shares", "good"),
    [
        ({3: 0.4, 5: 0.7, 20: 0.95}, True),
        ({3: 0.4, 5: 0.7, 20: 0.94}, False),
        ({3: 0.4, 5: 0.76, 20: 1.0}, False),
        ({3: 0.8, 5: 0.7, 20: 1.0}, False),
        ({5: 0.7, 20: 1.0, 40: 0.96}, True),
        ({5: 0.7, 20: 1.0, 40: 0.98, 80: 0.94}, False),
    ],
)
def test_shares_have_to_grow_with_width(shares: dict[int, float], good: bool) -> None:
    assert overparameterisation.grows(shares) is good


def test_the_opposite_of_the_condition_promises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = overparameterisation.first_gradient_separates

    def opposite(data: Any) -> Condition:
        found = real(data)
        return Condition(~found.holds, -found.slack)

    monkeypatch.setattr(overparameterisation, "first_gradient_separates", opposite)
    evidence = overparameterisation.first_gradient(Run())
    assert not evidence.holds and not evidence.control.fails


def test_equal_tokens_are_never_feasible(monkeypatch: pytest.MonkeyPatch) -> None:
    real = feasibility.instance

    def equal(*sizes: Any) -> Instance:
        one = real(*sizes)
        tokens = np.repeat(one.tokens[:, :1], one.tokens.shape[1], axis=1)
        return Instance(tokens, one.queries, one.labels, one.head)

    monkeypatch.setattr(feasibility, "instance", equal)
    evidence = feasibility.feasibility(Run())
    assert not evidence.holds
    assert evidence.measured["least feasible share where d is enough"] == 0.0


# Parts with known values.


def test_the_largest_rank_by_active_constraints() -> None:
    assert rank.rank_bound([1, 2, 3, 5, 6, 9, 10]).tolist() == [1, 1, 2, 2, 3, 3, 4]


def test_feasible_and_not() -> None:
    keys = np.array([[[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]])
    query = np.array([[1.0, 0.0]])
    assert feasibility.verdict(Selection(keys, query, [0])) == feasibility.INFEASIBLE
    assert feasibility.verdict(Selection(keys, query, [1])) == feasibility.FEASIBLE


def test_a_hidden_token_is_the_only_one_that_moves() -> None:
    tokens = np.random.default_rng(0).normal(size=(2, 4, 3))
    moved = feasibility.hidden(tokens, np.array([1, 2]), 0)
    same = (moved == tokens).all(2)
    assert same.sum() == 7 and not same[0, 1]


@pytest.mark.parametrize(("labels", "separable"), [([1, -1], True), ([1, 1], False)])
def test_queries_separable_by_label(labels: list[int], separable: bool) -> None:
    one = Instance(
        np.zeros((2, 2, 1)), np.array([[1.0], [-2.0]]), np.array(labels, float), np.ones(1)
    )
    assert feasibility.queries_separable(one) is separable


def test_scs_finds_the_nuclear_norm_of_a_known_problem() -> None:
    pytest.importorskip("scs")
    keys = np.array([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]])
    queries = np.array([[1.0, 0.0], [0.5, 0.75**0.5]])
    weight = _scs.nuclear_by_scs(Selection(keys, queries, [0, 0]))
    assert np.linalg.norm(weight, "nuc") == pytest.approx(1.6329932, rel=1e-3)
    assert weight == pytest.approx(np.array([[1.0, 0.5773503]] * 2), abs=1e-2)


def test_starts_and_seeds_depend_on_the_seed_alone() -> None:
    both = _setting.default_start([3, 4], 5, 1)
    assert both[1] == pytest.approx(_setting.default_start([4], 5, 1)[0], abs=0.0)
    assert (np.abs(both) <= 5**-0.5).all() and np.abs(both).max() > 0.4
    assert not np.array_equal(both, _setting.default_start([3, 4], 5, 0))
    assert _setting.instance_seeds(Run(), 3) == [0, 1, 2]
    assert not {*_setting.instance_seeds(Run(seed=1), 500)} & {*range(1000)}
    assert _setting.parts(range(5), 2) == [[0, 1], [2, 3], [4]]
