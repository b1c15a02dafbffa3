"""Prompts, out-of-context recall, label noise, next-token contexts: what is known of them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from attoscope.errors import AttoscopeError
from attoscope.svm import AttentionSVM, Selection
from attoscope.tasks import (
    label_noise_tokens,
    next_token_contexts,
    out_of_context,
    prompt_sequences,
    single_prompt,
    stack,
    two_token_signal_noise,
)


def exact(norm="frobenius") -> AttentionSVM:
    return AttentionSVM(norm, tol=1e-8 if norm == "nuclear" else 1e-12)


def test_three_sequences_and_their_prompt() -> None:
    data = prompt_sequences()
    assert data.optimal.tolist() == [1, 1, 1] and data.labels.tolist() == [1, -1, 1]
    problem = Selection.cross(data.tokens, data.queries, data.optimal)
    tight = exact().fit_selection(problem)
    np.testing.assert_allclose(tight.weight_[:, 0], [4 / 3, 1 / 3], atol=1e-12)
    assert tight.objective_**2 / 2 == pytest.approx(17 / 18, abs=1e-12)
    required = np.ones((3, 2))
    required[2] = 0.0
    relaxed = exact().fit_selection(problem.replace(required=required))
    np.testing.assert_allclose(relaxed.weight_[:, 0], [1, 0], atol=1e-12)
    assert relaxed.objective_**2 / 2 == pytest.approx(0.5, abs=1e-12)
    assert prompt_sequences(third=(0.5, 1.5)).tokens[2, 1].tolist() == [0.5, 1.5]


@pytest.mark.parametrize(("third", "local"), [(0.9, False), (0.0, True)])
def test_one_sequence_and_its_two_prompts(third: float, local: bool) -> None:
    data = single_prompt(third)
    np.testing.assert_allclose(data.scores, [[1, 0.9, third]])
    for chosen, prompt, half in ((0, [-0.1 / 1.01, 1 / 1.01], 0.5 / 1.01), (1, [1, 0], 0.5)):
        model = exact().fit(data.tokens[..., :2], data.queries, [chosen])
        np.testing.assert_allclose(model.weight_[:, 0], prompt, atol=1e-12)
        assert model.objective_**2 / 2 == pytest.approx(half, abs=1e-12)
    # The second selection is locally optimal where its only support scores lower.
    assert model.support_.tolist() == [[0, 2]]
    assert (data.scores[0, 1] > data.scores[0, 2]) == local


RECALL = [
    ((3, 1, 2), 3.31662, 6.56048, 0.7071),
    ((4, 1, 3), None, None, 0.5774),
    ((3, 2, 1), None, None, 1.0),
    ((2, 1, 1), 2.23607, 3.41421, 1.0),
]


@pytest.mark.parametrize(("sizes", "fro", "nuclear", "margin"), RECALL)
def test_only_the_nuclear_norm_infers_what_was_not_shown(sizes, fro, nuclear, margin) -> None:
    task = out_of_context(*sizes)
    full, low = (exact(norm).fit_selection(task.selection) for norm in ("frobenius", "nuclear"))
    assert task.test_margin(full.weight_) == pytest.approx(0.0, abs=1e-9)
    assert task.test_margin(low.weight_) == pytest.approx(margin, abs=1e-4)
    n, train, test = sizes
    assert task.test_margin(low.weight_) >= train / (train + test)
    if fro is not None:
        assert full.objective_ == pytest.approx(fro, abs=1e-5)
        assert low.objective_ == pytest.approx(nuclear, abs=1e-5)


def test_recall_shapes_and_what_changes_the_numbers() -> None:
    task = out_of_context(3, 1, 2)
    assert task.selection.shape == (9 + 3, 6, 6, 11)
    assert task.test_queries.shape == (6, 11) and task.test_answers.tolist() == [
        3,
        3,
        4,
        4,
        5,
        5,
    ]
    assert (task.queries.sum(1) == 2).all() and (task.queries[:9, -2] == 1).all()
    # Answers of the same relation alone as competitors are another problem.
    fact = np.arange(6) < 3
    allowed = np.where((task.answers < 3)[:, None], fact, ~fact)
    other = exact("nuclear").fit_selection(task.selection.replace(allowed=allowed))
    assert other.objective_ < 6.56048 - 0.1
    assert abs(task.test_margin(np.zeros((6, 11)))) == 0.0


def test_label_noise_tokens() -> None:
    data = label_noise_tokens(3, n=20, d=50, signal=1e4, rho=0.1)
    clean = np.where(data.flipped, -data.labels, data.labels)
    assert clean.tolist() == [1] * 10 + [-1] * 10
    assert np.flatnonzero(data.flipped).tolist() == [0, 1, 10, 11]
    own, other = np.where(clean > 0, 0, 1), np.where(clean > 0, 1, 0)
    row = np.arange(20)
    for token, column, size in ((0, own, 1e4), (1, own, 1e3), (2, other, 1e3)):
        np.testing.assert_allclose(data.tokens[row, token, column], size, atol=6)
    # The rest is noise: no entry far from a standard normal.
    rest = data.tokens[:, 3:]
    assert abs(rest.mean()) < 0.05 and abs(rest.std() - 1) < 0.05
    assert np.linalg.norm(data.head) == pytest.approx(1e-4)
    # The relevant token is what the clean label asks for, never what a flipped one does.
    assert ((data.optimal == 0) == ~data.flipped).all()
    assert not label_noise_tokens(3, flips=0.0).flipped.any()
    assert stack([data, data]).flipped.shape == (2, 20)


def test_two_tokens_of_signal_and_noise() -> None:
    data = two_token_signal_noise(1, n=40, d=3000, snr=0.5, flips=0.1)
    clean = np.where(data.flipped, -data.labels, data.labels)
    assert data.flipped.sum() == 4 and set(clean) == {-1.0, 1.0}
    signal, noise = data.tokens[:, 0], data.tokens[:, 1]
    np.testing.assert_allclose(signal, np.outer(clean, 0.5 * np.sqrt(3000) * data.head))
    assert not (noise @ data.head).any()
    np.testing.assert_allclose(np.linalg.norm(noise, axis=1), np.sqrt(3000), rtol=0.06)


def accuracy_after_two_steps(ratio: float, lr: float, seed: int) -> tuple[float, float]:
    """Gradient descent on prompt and head from zero, both with the same step."""
    train = two_token_signal_noise(seed, snr=ratio / np.sqrt(50))
    test = two_token_signal_noise(100 + seed, 200, snr=ratio / np.sqrt(50), flips=0.0)
    v, p = np.zeros(4000), np.zeros(4000)

    def read(data):
        s = 1 / (1 + np.exp(-(data.tokens @ p) @ [[1, -1], [-1, 1]]))
        return s, data.tokens @ v

    for _ in range(2):
        s, x = read(train)
        g = -train.labels / (1 + np.exp(train.labels * (s * x).sum(1))) / len(s)
        inside = s * (x - (s * x).sum(1, keepdims=True))
        step_v = np.einsum("n,nt,ntd->d", g, s, train.tokens)
        step_p = np.einsum("n,nt,ntd->d", g, inside, train.tokens)
        v, p = v - lr * step_v, p - lr * step_p
    right = []
    for data in (train, test):
        s, x = read(data)
        right.append(float((data.labels * (s * x).sum(1) > 0).mean()))
    return right[0], right[1]


def test_overfitting_is_benign_from_a_signal_of_one_over_root_n() -> None:
    weak, strong, hasty = (
        np.mean([accuracy_after_two_steps(*at, seed) for seed in range(4)], axis=0)
        for at in ((0.25, 0.05), (1.0, 0.05), (1.0, 1.25))
    )
    assert weak[0] == strong[0] == 1.0
    assert weak[1] < 0.8 and strong[1] > 0.99
    assert hasty[1] < 0.95


def test_next_token_contexts() -> None:
    data = next_token_contexts(4, K=5, d=7, sequences=30, length=6)
    assert data.embeddings.shape == (5, 7) and data.sequences.shape == (30, 6)
    np.testing.assert_allclose(np.linalg.norm(data.embeddings, axis=1), 1)
    assert set(data.sequences.ravel()) == set(range(5))
    assert (data.sequences == data.labels[:, None]).any(1).all()
    again = next_token_contexts(4, K=5, d=7, sequences=30, length=6)
    np.testing.assert_array_equal(data.sequences, again.sequences)
    assert (next_token_contexts(5).sequences != next_token_contexts(4).sequences).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: out_of_context(3, 0, 1), "m_train: got 0; expected a whole number"),
        (lambda: next_token_contexts(0, K=0), "K: got 0"),
        (lambda: label_noise_tokens(0, T=2), "got 2 tokens of width 2000; expected at least 3"),
        (
            lambda: label_noise_tokens(0, flips=1.5),
            "flips: got 1.5; expected a share from 0 to 1",
        ),
        (lambda: label_noise_tokens(0, rho=0.0), "expected positive numbers"),
        (lambda: two_token_signal_noise(0, snr=-1.0), "a positive ratio"),
    ],
)
def test_errors_are_one_sentence(call, message) -> None:
    with pytest.raises(AttoscopeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_seeds_repeat_and_differ() -> None:
    for make in (label_noise_tokens, two_token_signal_noise):
        first, again, other = make(0, d=30), make(0, d=30), make(1, d=30)
        np.testing.assert_array_equal(first.tokens, again.tokens)
        np.testing.assert_array_equal(first.labels, again.labels)
        assert np.abs(first.tokens - other.tokens).max() > 0.1


def test_torch_is_imported_by_what_draws_from_it_alone() -> None:
    code = (
        "import sys, attoscope.tasks as t; t.label_noise_tokens(0, d=9); t.out_of_context(2, 1, 1);"
        "print('torch' in sys.modules); t.vis1(); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True
    )
    assert done.stdout.split() == ["False", "True"]
