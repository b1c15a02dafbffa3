"""What must not change the answer, what must stop the solver, and what it must refuse."""

from __future__ import annotations

import time

import joblib
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from attoscope import AttoscopeError
from attoscope.svm import (
    AttentionSVM,
    Entrywise,
    InfeasibleSelection,
    Schatten,
    Selection,
    certify,
    feasibility,
    finite_part,
    fit_many,
)
from attoscope.tasks import unit_sphere
from tests.svm.random_problems import small, unit


def tight(model: AttentionSVM) -> set[tuple[int, int]]:
    return {(int(i), int(t)) for i, t in model.support_}


@pytest.fixture(scope="module")
def base() -> Selection:
    return unit(12, 9, 7)


@pytest.mark.parametrize("norm", ["frobenius", "nuclear"])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_scale_of_the_data(base: Selection, norm: str, scale: float) -> None:
    one = AttentionSVM(norm, tol=1e-9).fit_selection(base)
    other = AttentionSVM(norm, tol=1e-9).fit_selection(
        base.replace(keys=base.keys * scale, queries=base.queries * scale)
    )
    assert other.objective_ * scale**2 == pytest.approx(one.objective_, rel=1e-8)
    np.testing.assert_allclose(other.weight_ * scale**2, one.weight_, atol=2e-4)
    if norm == "frobenius":
        assert tight(one) == tight(other)


@pytest.mark.parametrize("norm", ["frobenius", "nuclear", "spectral"])
def test_rotations(base: Selection, norm: str) -> None:
    rng = np.random.default_rng(5)
    left = np.linalg.qr(rng.standard_normal((7, 7)))[0]
    right = np.linalg.qr(rng.standard_normal((7, 7)))[0]
    one = AttentionSVM(norm, tol=1e-9).fit_selection(base)
    other = AttentionSVM(norm, tol=1e-9).fit_selection(
        base.replace(keys=base.keys @ left, queries=base.queries @ right)
    )
    assert other.objective_ == pytest.approx(one.objective_, rel=1e-8)
    if norm == "frobenius":
        np.testing.assert_allclose(left @ other.weight_ @ right.T, one.weight_, atol=1e-6)


def test_order_of_tokens_and_a_constant_on_all_keys(base: Selection) -> None:
    rng = np.random.default_rng(6)
    one = AttentionSVM(tol=1e-9).fit_selection(base)
    order = rng.permutation(9)
    moved = base.replace(
        keys=base.keys[:, order] + 50.0 * rng.standard_normal((12, 1, 7)),
        selected=base.selected[:, order],
    )
    other = AttentionSVM(tol=1e-9).fit_selection(moved)
    np.testing.assert_allclose(other.weight_, one.weight_, atol=1e-6)
    np.testing.assert_allclose(other.dual_.toarray(), one.dual_.toarray()[:, order], atol=1e-4)


def test_order_of_queries_and_shared_sequences() -> None:
    rng = np.random.default_rng(7)
    keys, queries = rng.standard_normal((3, 6, 9)), rng.standard_normal((8, 9))
    sequence, chosen = rng.integers(0, 3, 8), rng.integers(0, 6, 8)
    one = AttentionSVM(tol=1e-9).fit(keys, queries, chosen, sequence)
    copied = AttentionSVM(tol=1e-9).fit(keys[sequence], queries, chosen)
    np.testing.assert_allclose(copied.weight_, one.weight_, atol=1e-7)
    np.testing.assert_allclose(copied.dual_.toarray(), one.dual_.toarray(), atol=1e-5)


@pytest.mark.parametrize("norm", ["frobenius", "nuclear", "spectral", Entrywise(1.5)])
def test_bounds_hold_at_any_stop(base: Selection, norm) -> None:
    best = AttentionSVM(norm, tol=1e-8).fit_selection(base).objective_
    for limit in (1, 3, 10, 30):
        with pytest.warns(ConvergenceWarning, match="limit: stopped by max_iter"):
            model = AttentionSVM(norm, tol=1e-300, max_iter=limit).fit_selection(base)
        assert model.lower_bound_ <= best * (1 + 1e-9)
        assert model.objective_ >= best * (1 - 1e-9)
        again = certify(base, model.weight_, model.dual_, norm)
        assert again.gap == pytest.approx(model.gap_)
        assert model.status_.startswith("limit")


def test_time_limit() -> None:
    problem = unit(20, 8, 10)
    AttentionSVM("nuclear").fit_selection(problem)  # compiles: not to be timed
    # Not solvable to this tolerance: rounding alone is larger.
    began = time.perf_counter()
    with pytest.warns(ConvergenceWarning, match="time_limit"):
        model = AttentionSVM("nuclear", tol=1e-300, time_limit=1.0, max_iter=10**9)
        model.fit_selection(problem)
    # Generous: a machine may be busy. Without the limit it would not end at all.
    assert time.perf_counter() - began < 60.0
    assert model.gap_ == certify(problem, model.weight_, model.dual_, "nuclear").gap < 1e-3


def test_certificate_of_made_up_candidates(base: Selection) -> None:
    best = AttentionSVM(tol=1e-9).fit_selection(base)
    rng = np.random.default_rng(8)
    for _ in range(20):
        weight = best.weight_ + 0.1 * rng.standard_normal((7, 7))
        dual = rng.exponential(size=base.selected.shape)
        found = certify(base, weight, dual)
        assert found.lower <= best.objective_ * (1 + 1e-9) <= found.upper * (1 + 2e-9)
    assert certify(base, -best.weight_, best.dual_).gap == np.inf
    assert certify(base, best.weight_, -best.dual_).lower == 0.0
    with pytest.raises(AttoscopeError, match="dual: got shape"):
        certify(base, best.weight_, np.ones((2, 2)))


def test_the_multipliers_represent_the_weight(base: Selection) -> None:
    model = AttentionSVM(tol=1e-10).fit_selection(base)
    apart = base.keys[np.arange(12), base.reference][:, None] - base.keys
    made = np.einsum("nt,ntk,nd->kd", model.dual_.toarray(), apart, base.queries)
    np.testing.assert_allclose(made, model.weight_, atol=1e-8)
    assert model.dual_.sum() == pytest.approx(model.objective_**2, rel=1e-8)


@pytest.mark.parametrize("size", [(60, 10, 3), (200, 30, 6), (300, 40, 16)])
def test_large_contradictions_are_proved(size) -> None:
    selection = unit(*size)
    with pytest.raises(InfeasibleSelection) as caught:
        AttentionSVM().fit_selection(selection)
    proof = caught.value.certificate
    assert proof.verify() and proof.excluded_norm > 1e6
    # A proof of something else is none.
    assert not type(proof)(unit(*size, seed=1), proof.dual).verify()


def test_duplicates_contradict() -> None:
    keys = np.random.default_rng(9).standard_normal((2, 4, 3))
    keys[0, 3] = keys[0, 1]
    with pytest.raises(InfeasibleSelection, match="drop duplicates") as caught:
        AttentionSVM().fit(keys, np.eye(3)[:2], [1, 0])
    assert caught.value.verify()
    assert caught.value.certificate.dual.toarray()[0, 3] == pytest.approx(1)


def test_feasibility_without_solving() -> None:
    assert feasibility(unit(5, 8, 7)).feasible is True
    inside = Selection([[[0, 0], [1, 0], [-1, 0.0]]], [[1.0, 0]], [0])
    assert feasibility(inside).inside_hull == (0,)
    assert feasibility(unit(30, 3, 5)).feasible is None
    for seed in range(0, 64, 8):
        selection = small(seed)
        told = feasibility(selection).feasible
        try:
            AttentionSVM().fit_selection(selection)
            solved = True
        except InfeasibleSelection:
            solved = False
        assert told in (None, solved), seed
    with pytest.raises(AttoscopeError, match="several chosen keys"):
        feasibility(inside.replace(selected=np.array([[True, True, False]])))


def test_several_chosen_keys_score_equally() -> None:
    base = unit(6, 7, 9)
    chosen = base.selected.copy()
    chosen[np.arange(6), (base.reference + 3) % 7] = True
    selection = base.replace(selected=chosen)
    for norm in ("frobenius", "nuclear"):
        model = AttentionSVM(norm, tol=1e-8).fit_selection(selection)
        margins = selection.margins(model.weight_)
        np.testing.assert_allclose(margins[chosen], 0, atol=1e-7)
        assert margins[~chosen].min() >= 1 - 1e-7


def test_biases_move_to_the_right_hand_side() -> None:
    base = unit(6, 7, 9)
    bias = np.random.default_rng(10).standard_normal((6, 7))
    with_bias = AttentionSVM(tol=1e-8).fit_selection(base.replace(bias=bias))
    own = np.take_along_axis(bias, base.reference[:, None], 1)
    required = AttentionSVM(tol=1e-8).fit_selection(base.replace(required=1 - (own - bias)))
    np.testing.assert_allclose(with_bias.weight_, required.weight_, atol=1e-6)
    assert with_bias.margin_ >= 1 - 1e-9


def test_finite_part_gives_the_probabilities() -> None:
    base = unit(4, 6, 8)
    chosen = base.selected.copy()
    chosen[np.arange(4), (base.reference + 1) % 6] = True
    p = np.where(chosen, np.random.default_rng(11).uniform(0.2, 1.0, chosen.shape), 0.0)
    p /= p.sum(1, keepdims=True)
    selection = base.replace(selected=chosen)
    scores = selection.scores(finite_part(selection, p))
    kept = np.where(chosen, np.exp(scores), 0.0)
    np.testing.assert_allclose(kept / kept.sum(1, keepdims=True), p, atol=1e-10)
    with pytest.raises(AttoscopeError, match="zero or negative"):
        finite_part(selection, np.zeros_like(p))


def test_prompt_svm_with_a_relaxed_sequence() -> None:
    # arXiv 2306.13596: three sequences, the prompt p is the weight's only column.
    keys = [[[0, 0], [1, 1]], [[0, 0], [1, -1]], [[0, 0], [0.5, 1]]]
    full = AttentionSVM(tol=1e-10).fit(keys, np.ones((3, 1)), [1, 1, 1])
    np.testing.assert_allclose(full.weight_[:, 0], [4 / 3, 1 / 3], atol=1e-9)
    assert full.objective_**2 / 2 == pytest.approx(17 / 18, rel=1e-9)
    relaxed = np.ones((3, 2))
    relaxed[2] = 0.0
    some = AttentionSVM(tol=1e-10).fit(keys, np.ones((3, 1)), [1, 1, 1], required=relaxed)
    np.testing.assert_allclose(some.weight_[:, 0], [1, 0], atol=1e-9)


@pytest.mark.parametrize("norm", ["frobenius", "nuclear"])
def test_warm_start_is_a_short_way(norm: str) -> None:
    base = unit(60, 12, 20)
    model = AttentionSVM(norm, tol=1e-7, warm_start=True).fit_selection(base)
    cold = model.n_iter_
    assert model.fit_selection(base).n_iter_ <= max(3, cold // 3)
    keys = base.keys.copy()
    keys[:2, 0] += 0.01
    changed = base.replace(keys=keys)
    warm = model.fit_selection(changed)
    fresh = AttentionSVM(norm, tol=1e-7).fit_selection(changed)
    assert warm.n_iter_ < fresh.n_iter_
    assert warm.gap_ <= 1e-7
    assert warm.objective_ == pytest.approx(fresh.objective_, rel=1e-6)


def test_warm_start_across_settings() -> None:
    base = unit(60, 12, 20)
    model = AttentionSVM(tol=1e-7, warm_start=True).fit_selection(base)
    for options in ({"C": 50.0}, {"C": np.inf, "norm": "nuclear"}, {"C": 3.0},
                    {"C": np.inf, "norm": "spectral"}, {"norm": "frobenius"}):  # fmt: skip
        model.set_params(**options).fit_selection(base)
        assert model.gap_ <= 1e-7, options
    # A start from a solvable problem does not hide that the next one is not.
    with pytest.raises(InfeasibleSelection):
        model.set_params(norm="nuclear").fit_selection(unit(60, 12, 20).replace(
            keys=np.repeat(base.keys[:1], 60, axis=0), queries=np.ones((60, 20))))  # fmt: skip


def test_a_bound_on_the_rank() -> None:
    base = unit(10, 6, 8)
    free = AttentionSVM("nuclear", tol=1e-6).fit_selection(base)
    assert free.rank_ > 2
    same = AttentionSVM("nuclear", tol=1e-6, max_rank=free.rank_).fit_selection(base)
    assert same.objective_ == pytest.approx(free.objective_, rel=1e-4)
    objectives = []
    for rank in (8, 4, 3, 2):
        two = AttentionSVM("frobenius", max_rank=rank).fit_selection(base)
        assert np.linalg.matrix_rank(two.weight_, tol=1e-7) <= rank
        assert two.margin_ >= 1 - 1e-9
        objectives.append(two.objective_)
    assert objectives == sorted(objectives)
    assert "rank at most 2" in two.status_ and two.status_.startswith("limit")


@pytest.mark.parametrize("norm", ["frobenius", "nuclear", "spectral"])
def test_rank_one_where_its_optimum_is_known(norm: str) -> None:
    # Of rank one, all three norms are the same: the optimum is the nuclear one, which has rank 1.
    angle = np.pi / 3
    keys = np.zeros((2, 2, 2))
    keys[0, 0], keys[1, 0] = (1.0, 0.0), (0.0, 1.0)
    queries = [[1.0, 0.0], [np.cos(angle), np.sin(angle)]]
    model = AttentionSVM(norm, max_rank=1, tol=1e-7).fit(keys, queries, [0, 0])
    expected = np.sqrt(2.0) / np.cos(angle / 2)
    np.testing.assert_allclose(model.objective_, expected, rtol=1e-6)
    np.testing.assert_allclose(model.weight_, [[1.0, np.tan(angle / 2)]] * 2, rtol=1e-4)


@pytest.mark.parametrize("norm, optimum", [("frobenius", 16887.62), ("nuclear", 16972.07)])
def test_margins_that_hardly_exist(norm: str, optimum: float) -> None:
    # Descent alone would need millions of passes; the optimum is that of Lawson and Hanson's NNLS.
    data = unit_sphere(41, 5, 15, 3)
    selected = np.random.default_rng(41).integers(0, 15, 5)
    model = AttentionSVM(norm).fit(data.tokens, data.queries, selected)
    assert model.objective_ == pytest.approx(optimum, rel=1e-6)
    assert model.gap_ <= 1e-6 and model.n_iter_ < 2_000


def test_a_bound_on_the_rank_when_the_time_is_up(base: Selection) -> None:
    with pytest.warns(ConvergenceWarning, match="limit: stopped by time_limit"):
        model = AttentionSVM(max_rank=2, time_limit=1e-9).fit_selection(base)
    assert np.linalg.matrix_rank(model.weight_) <= 2


def test_no_weight_of_so_low_a_rank() -> None:
    # Scores along one direction put the three keys in one order: the middle one never wins.
    keys = np.tile(np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]), (3, 1, 1))
    queries = np.eye(3)
    free = AttentionSVM().fit(keys, queries, [0, 1, 2])
    assert free.rank_ == 2
    with pytest.warns(ConvergenceWarning, match="no weight with rank at most 1"):
        one = AttentionSVM(max_rank=1).fit(keys, queries, [0, 1, 2])
    assert one.gap_ == np.inf and np.linalg.matrix_rank(one.weight_) <= 1


def test_many_problems_side_by_side() -> None:
    problems = [unit(6, 5, 4, seed=k) for k in range(5)]
    problems.append(Selection([[[0, 0], [1, 0], [-1, 0.0]]], [[1.0, 0]], [0]))
    for jobs in (1, 2):
        results = fit_many(problems, AttentionSVM("nuclear"), n_jobs=jobs)
        assert [r.gap_ <= 1e-6 for r in results[:5] if isinstance(r, AttentionSVM)] == [
            True
        ] * 5
        assert isinstance(results[5], InfeasibleSelection) and results[5].verify()
    with pytest.raises(AttoscopeError, match="expected an AttentionSVM"):
        fit_many(problems, AttentionSVM)


def test_many_problems_on_a_cluster() -> None:
    distributed = pytest.importorskip(
        "distributed", reason="the extra attoscope[cluster] is not installed"
    )
    problems = [unit(6, 5, 4, seed=k) for k in range(4)]
    here = fit_many(problems, n_jobs=1)
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        there = fit_many(problems)
    for one, other in zip(here, there, strict=True):
        np.testing.assert_array_equal(one.weight_, other.weight_)


def test_it_is_an_estimator(base: Selection) -> None:
    model = AttentionSVM("nuclear", C=3.0, max_rank=None, tol=1e-5)
    copy = clone(model)
    assert copy.get_params() == model.get_params() and copy is not model
    assert copy.set_params(norm="l1").norm == "l1"
    with pytest.raises(NotFittedError):
        AttentionSVM().predict(base.keys, base.queries)
    fitted = AttentionSVM().fit(base.keys, base.queries, base.selected)
    np.testing.assert_array_equal(fitted.predict(base.keys, base.queries), base.reference)
    assert fitted.score(base.keys, base.queries, base.selected) == 1.0
    scores = fitted.decision_function(base.keys, base.queries)
    np.testing.assert_allclose(scores, base.scores(fitted.weight_))
    flipped = fitted.score(-base.keys, base.queries, base.selected)
    assert flipped < 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"C": 0}, "C: got 0"),
        ({"tol": -1.0}, "tol: got -1.0"),
        ({"max_iter": 0}, "max_iter: got 0"),
        ({"time_limit": 0}, "time_limit: got 0"),
        ({"norm": "l7"}, "norm: got 'l7'"),
        ({"max_rank": 0}, "max_rank: got 0"),
    ],
)
def test_settings_are_checked(base: Selection, options, message: str) -> None:
    with pytest.raises(AttoscopeError, match=message):
        AttentionSVM(**options).fit_selection(base)


@pytest.mark.parametrize("kind", [Schatten, Entrywise])
@pytest.mark.parametrize("p", [1, 1.3, 2, 3, 7.5, np.inf])
def test_proximal_maps(kind, p: float) -> None:
    rng = np.random.default_rng(12)
    norm = kind(p)
    for step in (0.1, 1.0, 30.0):
        point = rng.standard_normal((4, 6))
        best = norm.prox(point, step)
        # Moreau: what is taken away lies in the dual ball and pairs with what is left.
        rest = (point - best) / step
        assert norm.dual.value(rest) <= 1 + 1e-9
        assert np.vdot(rest, best) == pytest.approx(norm.value(best), abs=1e-8)
    with pytest.raises(AttoscopeError, match="p = 0.5"):
        kind(0.5)


FORCED = np.array([[True, True, True, False, False]])


@pytest.mark.parametrize("norm", ["frobenius", "nuclear", "max", Entrywise(1.5)])
def test_equal_scores_that_leave_no_margin(norm) -> None:
    # Three chosen keys of width one have to score equally, so that every score is zero.
    keys, required = [[[0.3], [1.7], [-0.4], [2.0], [0.7]]], [[1, 1, 1, 2.05, 0.06]]
    with pytest.raises(InfeasibleSelection) as caught:
        AttentionSVM(norm).fit(keys, [[0.3] * 3], FORCED, required=required)
    assert caught.value.verify()
    # What rounding leaves of the margins, scaled up, is no solution.
    selection = Selection(keys, [[0.3] * 3], FORCED, required=required)
    assert certify(selection, np.full((1, 3), 1e-3), np.zeros((1, 5)), norm).upper == np.inf


@pytest.mark.parametrize("C", [np.inf, 10.0])
def test_equal_keys_that_have_to_differ(C: float) -> None:
    keys, chosen = [[[1.0, 0], [1, 0], [-1, -1]]], [[True, True, False]]
    for required in (1.0, 0.0):
        with pytest.raises(InfeasibleSelection) as caught:
            AttentionSVM(C=C).fit(
                keys, [[1.0, 0]], chosen, bias=[[0.0, 1, 0]], required=required
            )
        assert caught.value.verify()


def test_the_certificate_is_that_of_the_weight_returned() -> None:
    for seed in range(30):
        selection = small(seed)
        try:
            model = AttentionSVM().fit_selection(selection)
        except InfeasibleSelection:
            continue
        again = certify(selection, model.weight_, model.dual_)
        assert again.gap == model.gap_ and again.unequal <= 1e-9, seed
        assert model.objective_ >= model.lower_bound_ * (1 - 1e-12), seed


def test_bounds_allow_for_rounding() -> None:
    # Keys 1e-8 apart need a weight of 1e7: what scores lose to rounding belongs to the gap.
    rng = np.random.default_rng(3)
    keys, queries = rng.normal(size=(6, 5, 4)), rng.normal(size=(6, 4))
    chosen = rng.integers(0, 5, 6)
    other = (chosen[0] + 1) % 5
    keys[0, other] = keys[0, chosen[0]] + 1e-8 * np.arange(1.0, 5)
    model = AttentionSVM().fit(keys, queries, chosen)
    assert 1e-9 < model.gap_ <= 1e-6 and model.objective_ > model.lower_bound_


@pytest.mark.parametrize("norm", ["l1", "max"])
def test_linear_programmes(norm: str) -> None:
    for seed in range(3):
        base = unit(20, 6, 10, seed=seed)
        model = AttentionSVM(norm).fit_selection(base)
        assert model.gap_ <= 1e-9
        priced = AttentionSVM(norm, C=0.01).fit_selection(base)
        assert priced.gap_ <= 1e-6 and priced.objective_ < model.objective_


def test_nothing_pays_for_its_margin() -> None:
    # Opposite wishes for one query: the weight is zero and every shortfall is paid.
    model = AttentionSVM(C=0.01).fit(np.eye(2)[None], np.ones((2, 2)), [0, 1])
    assert model.objective_ == pytest.approx(0.02) and model.gap_ <= 1e-6


@pytest.mark.parametrize(
    "scale, name",
    [((1e-100, 1e-100), "keys"), ((1.0, 1e-170), "queries"), ((1e154, 1), "keys")],
)
def test_sizes_that_double_precision_cannot_multiply(scale, name: str) -> None:
    base = unit(6, 5, 4)
    with pytest.raises(AttoscopeError, match=f"{name}: got numbers of size"):
        AttentionSVM().fit(base.keys * scale[0], base.queries * scale[1], base.reference)


def test_a_query_that_vanishes_beside_the_others() -> None:
    base = unit(6, 5, 4)
    for size in (1e-30, 1e-300):
        queries = base.queries.copy()
        queries[2] *= size
        with pytest.raises(AttoscopeError, match="queries: got 1 of size below"):
            AttentionSVM().fit(base.keys, queries, base.reference)
        assert queries[2].any()
