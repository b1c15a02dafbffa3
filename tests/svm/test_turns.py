"""The compiled turns of the alternation against those in the norm's own terms."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from attoscope.svm import AttentionSVM, InfeasibleSelection, Schatten, Selection, _admm
from attoscope.svm._kernels import largest_singular
from attoscope.svm._memory import DEPTH, HELD, PLAIN, Memory, add, follow
from attoscope.svm._problem import Problem, WorkingSet
from attoscope.svm._scan import WORKING
from tests.svm.random_problems import small, unit


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of turn, and the end of one that lags, was called."""
    seen: Counter[str] = Counter()
    for name in ("one", "several", "catch_up"):
        method = getattr(_admm.Alternating, name)

        def counted(self, *given, name=name, method=method):
            seen[name] += 1
            return method(self, *given)

        monkeypatch.setattr(_admm.Alternating, name, counted)
    return seen


def fitted(selection: Selection, limit: int, **options) -> AttentionSVM:
    """Turns are compiled up to widths of `limit`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_admm, "SMALL", limit)
        return AttentionSVM("nuclear", **options).fit_selection(selection)


def both(selection: Selection, calls: Counter[str], **options) -> list[AttentionSVM]:
    """Compiled, and in the norm's own terms."""
    compiled = fitted(selection, 32, **options)
    assert calls["several"] > 0
    assert not calls["one"]
    plain = fitted(selection, 0, **options)
    assert calls["one"] > 0
    return [compiled, plain]


def same(compiled: AttentionSVM, plain: AttentionSVM) -> None:
    assert compiled.n_iter_ == plain.n_iter_
    np.testing.assert_allclose(compiled.weight_, plain.weight_, atol=1e-8)
    np.testing.assert_allclose(compiled.dual_.toarray(), plain.dual_.toarray(), atol=1e-6)
    assert compiled.gap_ == pytest.approx(plain.gap_, rel=1e-3, abs=2e-8)
    for name in ("lower", "upper", "margin"):
        ours, theirs = (getattr(m.certificate_, name) for m in (compiled, plain))
        assert ours == pytest.approx(theirs, rel=1e-7)


@pytest.mark.parametrize(
    ("shape", "C"),
    [
        ((6, 8, 10), np.inf),
        ((3, 2, 32), np.inf),
        ((40, 3, 8), np.inf),
        ((6, 8, 10), 0.5),
        ((10, 4, 3), 0.5),
        ((40, 6, 8), 0.5),
    ],
)
def test_same_weight_and_certificate(shape, C: float, calls) -> None:
    compiled, plain = both(unit(*shape, seed=1), calls, C=C, tol=1e-6)
    assert compiled.gap_ <= 1e-6
    same(compiled, plain)


def test_turns_that_lag(calls) -> None:
    lagging = 0
    for seed in range(12):
        calls.clear()
        compiled, plain = both(unit(6, 8, 10, seed), calls, tol=1e-7)
        lagging += calls["catch_up"]
        same(compiled, plain)
    assert lagging > 0


@pytest.mark.parametrize("seed", range(24))
def test_awkward_problems(seed: int) -> None:
    found: list[float] = []
    for limit in (32, 0):
        try:
            found.append(fitted(small(seed), limit, tol=1e-5, max_iter=3000).objective_)
        except InfeasibleSelection as error:
            assert error.verify()
            found.append(np.inf)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_what_is_compiled(calls) -> None:
    AttentionSVM("nuclear").fit_selection(unit(4, 3, 32))
    assert not calls["one"]
    calls.clear()
    AttentionSVM("nuclear").fit_selection(unit(40, 3, 33))
    AttentionSVM(Schatten(1.5)).fit_selection(unit(4, 3, 5))
    AttentionSVM("spectral").fit_selection(unit(4, 3, 5))
    assert not calls["several"]


def test_memory_solves_a_linear_map() -> None:
    """In two dimensions three steps determine an affine map, and its fixed point."""
    matrix, offset = np.array([[0.5, 0.2], [-0.1, 0.3]]), np.array([1.0, 2.0])
    memory, y = Memory.of(2), np.array([3.0, -1.0])
    for _ in range(4):
        add(memory, y, matrix @ y + offset - y)
        # The first turns of a run are plain.
        memory.counts[PLAIN] = 0
        follow(memory, y)
    np.testing.assert_allclose(y, np.linalg.solve(np.eye(2) - matrix, offset), atol=1e-8)


def test_memory_keeps_the_last_points() -> None:
    memory = Memory.of(3)
    steps = np.random.default_rng(0).standard_normal((11, 3))
    steps /= np.linalg.norm(steps, axis=1)[:, None]
    for number, step in enumerate(steps):
        add(memory, np.full(3, float(number)), step)
    held = memory.order[: memory.counts[HELD]]
    assert memory.points[held, 0].tolist() == list(range(11 - DEPTH, 11))
    np.testing.assert_allclose(
        memory.gram[np.ix_(held, held)], steps[-DEPTH:] @ steps[-DEPTH:].T, atol=1e-15
    )


@pytest.mark.parametrize("shape", [(10, 6), (6, 10), (1, 1), (32, 32)])
def test_largest_singular_value(shape) -> None:
    weight = np.random.default_rng(0).standard_normal(shape)
    assert largest_singular(weight) == pytest.approx(np.linalg.norm(weight, 2), rel=1e-14)
    assert Schatten(np.inf).value(1e150 * weight) == pytest.approx(
        1e150 * np.linalg.norm(weight, 2), rel=1e-14
    )


@pytest.mark.parametrize("local", [True, False])
def test_working_set_of_what_is_marked_and_what_carries_a_multiplier(local: bool) -> None:
    """Two queries of three keys each, the first one chosen."""
    keys = [[[1.0, 0.0], [0.0, 0.0], [0.0, 2.0]], [[0.0, 1.0], [0.0, 0.0], [3.0, 1.0]]]
    problem = Problem.of(Selection(keys, [[1.0, 0.0], [0.0, 2.0]], [0, 0]), reduce=False)
    problem.state[0, 1:] |= WORKING
    made = WorkingSet.empty(2).rebuilt(problem, local)
    assert (made.ptr.tolist(), made.tok.tolist()) == ([0, 2, 2], [1, 2])
    made.lam[:] = 0.0, 0.5
    problem.state &= 3
    problem.state[1, 2] |= WORKING
    made = made.rebuilt(problem, local)
    assert (made.ptr.tolist(), made.tok.tolist()) == ([0, 1, 2], [2, 2])
    assert (made.lam.tolist(), made.rhs.tolist()) == ([0.5, 0.0], [1.0, 1.0])
    assert made.sq.tolist() == [5.0, 9.0]
    assert made.gptr.tolist() == ([0, 1] if local else [-1, -1])
    assert made.gram.tolist() == ([5.0, 9.0] if local else [])
    assert made.scale == 1.0
