"""What cannot be meant is refused in one sentence; what can be meant works."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from attoscope import AttoscopeError
from attoscope.svm import (
    AttentionSVM,
    Entrywise,
    Schatten,
    Selection,
    certify,
    context_markov,
    feasibility,
    finite_part,
    fit_many,
    graph_svm,
    soft_component,
    token_priority_graph,
)
from attoscope.svm import _checks as checks

RNG = np.random.default_rng(3)
KEYS, QUERIES = RNG.normal(size=(6, 5, 4)), RNG.normal(size=(6, 4))
CHOSEN = RNG.integers(0, 5, 6)
RAGGED = [[1, 2], [1]]
GIVEN = {"keys": KEYS, "queries": QUERIES, "selected": CHOSEN}
SELECTION = Selection(**GIVEN)
GRAPHS = token_priority_graph([[0, 1, 2]] * 3, [0, 0, 1])
# One key more than the two chosen ones, and biases; either query may set its own ratio.
TWO = Selection(
    np.array([[[1.0, 0], [0, 1], [5, 5]]]), np.eye(2), np.array([[1, 1, 0], [1, 1, 0]], bool),
    bias=np.array([[0.3, -0.4, 0], [0.1, 0.2, 0]]),
)  # fmt: skip


def bare(function):
    """The function as users have it, whose annotations are not checked at run time."""
    return inspect.unwrap(function)


@pytest.fixture(scope="module")
def model() -> AttentionSVM:
    return AttentionSVM().fit(KEYS, QUERIES, CHOSEN)


def one_sentence(call, message: str) -> None:
    with pytest.raises(AttoscopeError, match=message) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said and ". " not in said


# Arrays.


@pytest.mark.parametrize("name", ["keys", "queries", "selected", "allowed", "sequence", "bias"])
@pytest.mark.parametrize("value", [RAGGED, "x", [None], {"a": 1}, 1j * np.ones((6, 5))])
def test_every_array_of_a_selection(name: str, value) -> None:
    one_sentence(lambda: Selection(**{**GIVEN, name: value}), f"^{name}: got .*; expected")


@pytest.mark.parametrize("value", [RAGGED, "x", None, 1j, np.array("2"), np.datetime64("2020")])
def test_required(value) -> None:
    one_sentence(
        lambda: Selection(**GIVEN, required=value), "^required: got .*; expected a number"
    )


def test_complex_numbers_are_said() -> None:
    one_sentence(lambda: Selection(KEYS + 1j, QUERIES, CHOSEN), "keys: got complex numbers")


CALLS = [
    (lambda: Selection.causal(KEYS, RAGGED), r"^selected: got list .*\(6, 5\) positions"),
    (lambda: Selection.every_position(KEYS, RAGGED), "^selected: got list"),
    (lambda: Selection.cross([1, 2], QUERIES, CHOSEN), "^keys: got shape"),
    (lambda: Selection.cross(KEYS, [RAGGED], CHOSEN), "^queries: got list"),
    (
        lambda: Selection.cross([KEYS[0], KEYS[1, :2]], QUERIES[:2], [0, 0], lengths=[5, 2]),
        "or the",
    ),
    (
        lambda: bare(Selection.self_attention)(Selection, KEYS, CHOSEN, position=1.5),
        "^position: got 1.5",
    ),
    (lambda: SELECTION.without([(0, 5)]), r"^pairs: got numbers from \[0, 5\]"),
    (lambda: SELECTION.without([(-1, 0)]), r"^pairs: got numbers from \[-1, 0\]"),
    (lambda: SELECTION.without([0, 1]), r"^pairs: got shape \(2,\)"),
    (lambda: SELECTION.without([(0, 1, 2)]), r"^pairs: got shape \(1, 3\)"),
    (lambda: SELECTION.without(RAGGED), "^pairs: got list"),
    (lambda: SELECTION.without([(0, CHOSEN[0])]), "query 0 choosing key"),
    (lambda: SELECTION.replace(foo=1, required=2.0), "^got foo; expected any of keys, queries"),
    (lambda: bare(fit_many)(["a"]), "^selection: got str"),
    (lambda: bare(fit_many)(SELECTION), "^selections: got Selection; expected a list"),
    (lambda: bare(fit_many)(None), "^selections: got NoneType"),
    (lambda: bare(fit_many)([SELECTION], n_jobs=0), "^n_jobs: got 0"),
    (lambda: bare(fit_many)([SELECTION], n_jobs=1.5), "^n_jobs: got 1.5"),
    (lambda: bare(AttentionSVM.fit_selection)(AttentionSVM(), KEYS), "^selection: got ndarray"),
    (lambda: bare(graph_svm)(np.eye(3), None), "^graphs: got NoneType"),
    (
        lambda: bare(graph_svm)(np.eye(3), {2: 3}),
        "^graphs: got dict that is no mapping to Token",
    ),
    (lambda: graph_svm(np.eye(3), GRAPHS).project(np.ones((2, 3))), r"got shape \(2, 3\)"),
    (lambda: token_priority_graph(None, [0]), "^sequences: got NoneType"),
    (lambda: token_priority_graph([[0, 1], RAGGED], [0, 0]), r"^sequences\[1\]: got list"),
    (lambda: token_priority_graph([[0], []], [0, 0]), r"^sequences\[1\]: got an empty context"),
    (lambda: token_priority_graph([[0, 1], [1]], RAGGED), "^labels: got list"),
    (lambda: token_priority_graph([np.array([2**63, 1], np.uint64)], [1]), "of at most"),
    (
        lambda: token_priority_graph([[1]], np.array([2**63], np.uint64)),
        "^labels: got 92.* at most",
    ),
    (lambda: token_priority_graph([[1, 2**70]], [1]), r"^sequences\[0\]: got .* of object"),
    (lambda: context_markov(RAGGED, RAGGED), "^counts: got list"),
    (lambda: context_markov([1, 2], [np.nan, 0]), "^logits: got NaN"),
    (lambda: context_markov([1, 2], [np.inf, 0]), "^logits: got NaN or infinity"),
    (lambda: context_markov([1, 2], [-np.inf, -np.inf]), "^logits: got NaN or infinity"),
    (lambda: finite_part(TWO, RAGGED), "^probabilities: got list"),
    (
        lambda: finite_part(TWO, [[1, 1, np.nan], [1, 1, 0]]),
        r"NaN or infinite \(first at \(0, 2\)",
    ),
    (
        lambda: finite_part(TWO, [[1, 0, 1], [1, 1, 0]]),
        "zero or negative values at chosen",
    ),
    (lambda: finite_part(TWO, [[1, 1, 0], [1, 1, 0]], tol=np.nan), "^tol: got nan"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_calls(call, message: str) -> None:
    one_sentence(call, message)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({name: value}, name)
        for name, values in {
            "C": ("x", np.nan, None, True, -1.0),
            "tol": ("x", np.nan, np.inf, None, 0),
            "max_iter": ("a", 1.5, None, 0),
            "time_limit": ("x", np.nan, -1),
            "max_rank": (1.5, "2", 0),
        }.items()
        for value in values
    ],
)
def test_settings(options, name: str) -> None:
    one_sentence(
        lambda: AttentionSVM().set_params(**options).fit_selection(SELECTION), f"^{name}: got"
    )


def test_a_loose_tolerance_is_a_number_all_the_same() -> None:
    model = AttentionSVM(tol=10).fit_selection(SELECTION)
    assert np.isfinite(model.objective_) and model.status_.startswith("optimal")


@pytest.mark.parametrize("kind", [Schatten, Entrywise])
@pytest.mark.parametrize("p", ["2", np.nan, None, True])
def test_powers(kind, p) -> None:
    one_sentence(lambda: unchecked(kind, p), "got p = ")


def unchecked(kind, p) -> None:
    made = object.__new__(kind)
    object.__setattr__(made, "p", p)
    bare(kind.__post_init__)(made)


# What can be meant works.


def test_tensors_that_carry_gradients(model: AttentionSVM) -> None:
    keys, queries = (torch.tensor(part, requires_grad=True) for part in (KEYS, QUERIES))
    same = AttentionSVM().fit(keys, queries, torch.tensor(CHOSEN))
    np.testing.assert_array_equal(same.weight_, model.weight_)
    listed = Selection.cross(list(keys), queries, CHOSEN)
    np.testing.assert_array_equal(listed.keys, KEYS)
    assert Selection(keys.bfloat16(), queries, CHOSEN).keys.dtype == np.float64


def test_a_score_needs_no_competitor(model: AttentionSVM) -> None:
    assert model.predict(KEYS[:, :1], QUERIES).tolist() == [0] * 6
    assert model.decision_function(KEYS[:, :1], QUERIES).shape == (6, 1)
    assert model.score(KEYS[:, :1], QUERIES, np.zeros(6, int)) == 1.0
    assert model.score(KEYS, QUERIES, np.ones((6, 5), bool)) == 1.0
    none = np.zeros((6, 5), bool)
    one_sentence(lambda: model.score(KEYS, QUERIES, none), "6 queries that choose no key")


def test_the_side_that_does_not_fit_is_named(model: AttentionSVM) -> None:
    one_sentence(
        lambda: model.predict(KEYS[..., :3], QUERIES), "^keys: got width 3; expected 4"
    )
    one_sentence(
        lambda: model.predict(KEYS, QUERIES[:, :3]), "^queries: got width 3; expected 4"
    )
    one_sentence(lambda: model.predict(None, None), "^keys: got NoneType")
    one_sentence(lambda: model.score(KEYS, QUERIES, RAGGED), "^selected: got list")


def test_pairs_may_be_a_list() -> None:
    pair = (0, int(CHOSEN[0] + 1) % 5)
    rest = SELECTION.without([pair])
    assert rest.constraint_count == SELECTION.constraint_count - 1 and not rest.allowed[pair]
    assert SELECTION.without([]).constraint_count == SELECTION.constraint_count


def test_lengths_and_allowed_keys_together() -> None:
    chosen, open_ = np.minimum(CHOSEN, 1), np.ones((6, 5), bool)
    open_[0, 2] = False
    both = Selection.cross(KEYS, QUERIES, chosen, lengths=[3] * 6, allowed=open_)
    np.testing.assert_array_equal(both.allowed, open_ & (np.arange(5) < 3))
    alone = Selection.self_attention(KEYS, chosen, allowed=open_)
    np.testing.assert_array_equal(alone.allowed, open_)
    shared = Selection.cross(KEYS[:1], QUERIES, chosen, lengths=[4])
    assert shared.allowed.sum(1).tolist() == [4] * 6
    order = [1, 0, 0, 1, 1, 0]
    read = Selection.cross(KEYS[:2], QUERIES, chosen, order, lengths=[4, 2])
    assert read.allowed.sum(1).tolist() == [2, 4, 4, 2, 2, 4]


@pytest.mark.parametrize(
    "make", [np.asfortranarray, "read-only", "strided", "unaligned", "swapped"]
)
def test_kernels_see_one_kind_of_array(make) -> None:
    changed = {"keys": KEYS, "queries": QUERIES, "selected": SELECTION.selected}
    changed |= {
        "allowed": np.ones((6, 5), bool),
        "required": np.ones((6, 5)),
        "bias": KEYS[..., 0],
    }
    changed |= {"sequence": np.arange(6)}
    selection = Selection(**{name: odd(value, make) for name, value in changed.items()})
    for name in changed:
        flags = getattr(selection, name).flags
        assert flags.c_contiguous and flags.aligned and flags.writeable, name
        assert getattr(selection, name).dtype.isnative


def odd(array: np.ndarray, make) -> np.ndarray:
    if make == "read-only":
        array = array.copy()
        array.flags.writeable = False
    elif make == "strided":
        array = np.repeat(array, 2, -1)[..., ::2]
    elif make == "unaligned":
        room = np.zeros(array.nbytes + 1, np.uint8)
        moved = room[1:].view(array.dtype).reshape(array.shape)
        moved[...] = array
        array = moved
    elif make == "swapped":
        array = array.astype(array.dtype.newbyteorder())
    else:
        array = make(array)
    return array


def test_arrays_that_fit_are_not_copied() -> None:
    assert SELECTION.keys is KEYS and checks.floats("x", KEYS, 3, "") is KEYS
    assert "do not change them afterwards" in (Selection.__doc__ or "")


def test_what_the_ratios_contradict_is_said() -> None:
    # One direction of queries, so both ask of one number: log 1 = 0 and log(0.9 / 0.1) / 2.
    same = TWO.replace(queries=np.array([[1.0, 0], [2, 0]]), bias=None)
    shares = np.array([[0.5, 0.5, 0], [0.9, 0.1, 0]])
    one_sentence(lambda: finite_part(same, shares), "no weight gives .* by 0.88")
    least = finite_part(same, shares, tol=np.inf)
    gap = (least[0, 0] - least[1, 0]) * np.array([1, 2])
    np.testing.assert_allclose(gap, 0.4 * np.log(9) * np.array([1, 2]), atol=1e-12)


def test_the_finite_part_allows_for_biases() -> None:
    shares = np.array([[0.5, 0.5, 0], [0.9, 0.1, 0]])
    kept = np.exp(TWO.scores(finite_part(TWO, shares)))[:, :2]
    np.testing.assert_allclose(kept / kept.sum(1, keepdims=True), shares[:, :2], atol=1e-12)


@pytest.mark.parametrize("size", [1e-150, 1e-4, 1e4, 1e150])
def test_the_soft_component_at_any_scale(size: float) -> None:
    sequences, labels = [[0, 1, 2]] * 3, [0, 0, 1]
    found = soft_component(np.eye(3) * size, sequences, labels) * size * size
    half = np.log(2) / 2
    np.testing.assert_allclose(found, np.outer([half, -half, 0], [0, 0, 1]), atol=1e-12)


def test_the_soft_component_of_equal_embeddings_is_nothing() -> None:
    assert not soft_component(np.ones((3, 3)), [[0, 1, 2]] * 3, [0, 0, 1]).any()


def test_the_chain_with_large_counts_and_closed_tokens() -> None:
    np.testing.assert_allclose(context_markov([1e308, 1e308], [0.0, 0]), [0.5, 0.5])
    np.testing.assert_allclose(context_markov([1e-20, 1e308], [0.0, -2000]), [1, 0])
    np.testing.assert_allclose(context_markov([1, 2], [-np.inf, 0]), [0, 1])
    np.testing.assert_allclose(context_markov([1, 0], [0, np.nan]), [1, 0])


@pytest.mark.parametrize("size", [1e-200, 1e200])
@pytest.mark.parametrize("p", [1, 1.5, 2, np.inf])
def test_norms_at_any_scale(p: float, size: float) -> None:
    matrix = RNG.normal(size=(3, 4))
    assert Schatten(p).value(matrix * size) / size == pytest.approx(Schatten(p).value(matrix))


def test_a_certificate_of_a_huge_weight(model: AttentionSVM) -> None:
    found = certify(SELECTION, model.weight_ * 1e200, model.dual_, "spectral")
    plain = certify(SELECTION, model.weight_, model.dual_, "spectral")
    assert found.upper == pytest.approx(plain.upper)
    assert feasibility(SELECTION).queries == 6
