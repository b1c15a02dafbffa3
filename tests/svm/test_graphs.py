"""Token priorities: graphs, their SVM, the finite part, and the context-conditioned chain."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from attoscope.errors import AttoscopeError
from attoscope.svm import InfeasibleSelection
from attoscope.svm.graphs import (
    context_markov,
    graph_svm,
    soft_component,
    token_priority_graph,
)
from attoscope.tasks import next_token_contexts

# Orthonormal a, b, c; last token c; labels a, a, b: {a, b} above {c}.
SEQUENCES, LABELS = [[0, 1, 2]] * 3, [0, 0, 1]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_known_graph() -> None:
    (graph,) = token_priority_graph(SEQUENCES, LABELS).values()
    assert graph.last == 2
    assert graph.edges.tolist() == [[0, 1], [0, 2], [1, 0], [1, 2]]
    assert [c.tolist() for c in graph.components] == [[0, 1], [2]]
    assert graph.beaten(0).tolist() == [2] and graph.beaten(1).tolist() == []


def test_known_weights() -> None:
    found = graph_svm(np.eye(3), token_priority_graph(SEQUENCES, LABELS), tol=1e-12)
    np.testing.assert_allclose(
        found.weight, np.outer([1 / 3, 1 / 3, -2 / 3], [0, 0, 1]), atol=1e-12
    )
    assert np.linalg.norm(found.weight) ** 2 == pytest.approx(2 / 3, abs=1e-12)
    assert found.model is not None and found.model.gap_ <= 1e-12
    fin = soft_component(np.eye(3), SEQUENCES, LABELS)
    half = math.log(2) / 2
    np.testing.assert_allclose(fin, np.outer([half, -half, 0], [0, 0, 1]), atol=1e-12)
    np.testing.assert_allclose(found.project(fin), fin, atol=1e-12)
    np.testing.assert_allclose(found.project(found.weight), 0, atol=1e-12)


def test_training_goes_where_they_say() -> None:
    found = graph_svm(np.eye(3), token_priority_graph(SEQUENCES, LABELS))
    counts = np.array([2, 1, 0]) / 3
    logits = np.zeros(3)
    for _ in range(20_000):
        p = np.exp(logits - logits.max())
        p /= p.sum()
        logits -= 2.0 * (p - counts)
    weight = np.outer(logits, [0, 0, 1])
    loss = -counts[:2] @ np.log(p[:2])
    assert loss == pytest.approx(0.63653, abs=5e-6)
    assert 0 < loss - (math.log(3) - 2 / 3 * math.log(2)) < 5e-5
    fin = soft_component(np.eye(3), SEQUENCES, LABELS)
    np.testing.assert_allclose(found.project(weight), fin, atol=1e-4)
    assert correlation(weight - found.project(weight), found.weight) > 0.999999


def test_components_are_mutual_reachability_in_condensation_order() -> None:
    for seed in range(20):
        data = next_token_contexts(seed, K=9, sequences=25, length=4)
        for last, graph in token_priority_graph(data.sequences, data.labels).items():
            links = np.zeros((9, 9), bool)
            expected = {
                (int(y), int(x))
                for s, y in zip(data.sequences, data.labels, strict=True)
                if s[-1] == last
                for x in s
                if x != y
            }
            assert set(map(tuple, graph.edges.tolist())) == expected
            for i, j in expected:
                links[i, j] = True
            reach = np.linalg.matrix_power(np.eye(9) + links, 9) > 0
            for a, i in zip(graph.component, graph.tokens, strict=True):
                for b, j in zip(graph.component, graph.tokens, strict=True):
                    assert (a == b) == (reach[i, j] and reach[j, i])
                    assert not (a > b and reach[i, j])


def test_ragged_contexts_repeated_tokens_and_two_last_tokens() -> None:
    graphs = token_priority_graph([[3, 3, 1], [1], [2, 1], [0, 2, 0, 5]], [3, 1, 1, 0])
    assert sorted(graphs) == [1, 5]
    assert graphs[1].tokens.tolist() == [1, 2, 3]
    assert [c.tolist() for c in graphs[1].components] == [[3], [1], [2]]
    assert graphs[5].edges.tolist() == [[0, 2], [0, 5]]


def test_margins_and_equalities_hold_on_random_data() -> None:
    checked = 0
    for seed in range(10):
        data = next_token_contexts(seed, K=6, d=8, sequences=10)
        graphs = token_priority_graph(data.sequences, data.labels)
        found = graph_svm(data.embeddings, graphs)
        for k, graph in graphs.items():
            scores = data.embeddings @ found.weight @ data.embeddings[k]
            i, j = graph.edges.T
            same = (lambda c: c[0] == c[1])(
                graph.component[np.searchsorted(graph.tokens, [i, j])]
            )
            np.testing.assert_allclose((scores[i] - scores[j])[same], 0, atol=1e-8)
            assert (scores[i] - scores[j])[~same].min(initial=1.0) >= 1 - 1e-6
            checked += int(same.sum())
        # Every preference reversed is the same problem with the other sign.
        flipped = {k: reversed_graph(g) for k, g in graphs.items()}
        other = graph_svm(data.embeddings, flipped)
        np.testing.assert_allclose(other.weight, -found.weight, atol=1e-5)
    assert checked > 10


def reversed_graph(graph):
    return replace(
        graph, edges=graph.edges[:, ::-1], component=graph.component.max() - graph.component
    )


def test_nothing_competes_inside_one_component() -> None:
    sequences, labels = [[0, 1], [0, 1], [0, 1]], [0, 1, 1]
    found = graph_svm(np.eye(2), token_priority_graph(sequences, labels))
    assert found.model is None and not found.weight.any()
    fin = soft_component(np.eye(2), sequences, labels)
    assert fin[0, 1] - fin[1, 1] == pytest.approx(-math.log(2), abs=1e-10)
    # No component of two: nothing is finite.
    alone = graph_svm(np.eye(2), token_priority_graph([[0, 1]], [0]))
    np.testing.assert_allclose(alone.weight, [[0, 0.5], [0, -0.5]], atol=1e-12)
    assert not alone.project(np.ones((2, 2))).any()
    assert not soft_component(np.eye(2), [[0, 1]], [0]).any()


def test_equal_embeddings_cannot_be_ranked() -> None:
    with pytest.raises(InfeasibleSelection):
        graph_svm(np.ones((2, 3)), token_priority_graph([[0, 1]], [0]))


class Loss:
    """-mean log p(label), whole or inside the label's component, as a function of W."""

    def __init__(self, data, graphs=None) -> None:
        e = data.embeddings
        queries = e[data.sequences[:, -1]]
        self.features = np.einsum("nti,nj->ntij", e[data.sequences], queries)
        self.hit = data.sequences == data.labels[:, None]
        self.seen = np.ones_like(self.hit)
        if graphs is not None:
            for row, (s, y) in enumerate(zip(data.sequences, data.labels, strict=True)):
                graph = graphs[int(s[-1])]
                component = graph.component[np.searchsorted(graph.tokens, s)]
                self.seen[row] = component == component[s == y][0]

    def __call__(self, w: np.ndarray, ridge: float = 0.0) -> tuple[float, np.ndarray]:
        weight = w.reshape(self.features.shape[2:])
        logits = np.einsum("ntij,ij->nt", self.features, weight)
        every, log_every = share(np.where(self.seen, logits, -np.inf))
        own, log_own = share(np.where(self.hit, logits, -np.inf))
        slope = np.einsum("nt,ntij->ij", every - own, self.features) / len(logits)
        value = (log_every - log_own).mean() + ridge / 2 * w @ w
        return float(value), slope.ravel() + ridge * w


def share(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    top = logits.max(1, keepdims=True)
    p = np.exp(logits - top)
    return p / p.sum(1, keepdims=True), top[:, 0] + np.log(p.sum(1))


@pytest.mark.parametrize("width", [2, 8])
def test_the_finite_part_is_stationary_and_in_its_space(width: int) -> None:
    """Also where embeddings are dependent, fewer dimensions than tokens."""
    sizes = 0.0
    for seed in range(6):
        data = next_token_contexts(seed, K=6, d=width, sequences=20, length=5)
        graphs = token_priority_graph(data.sequences, data.labels)
        fin = soft_component(data.embeddings, data.sequences, data.labels)
        loss = Loss(data, graphs)
        value, slope = loss(fin.ravel())
        np.testing.assert_allclose(slope, 0, atol=1e-8)
        nearby = np.random.default_rng(seed).standard_normal((10, fin.size)) * 0.1
        assert all(loss(fin.ravel() + step)[0] >= value - 1e-12 for step in nearby)
        sizes += np.linalg.norm(fin)
        if width == 8:
            found = graph_svm(data.embeddings, graphs)
            np.testing.assert_allclose(found.project(fin), fin, atol=1e-9)
            random = np.random.default_rng(seed).standard_normal(fin.shape)
            once = found.project(random)
            np.testing.assert_allclose(found.project(once), once, atol=1e-9)
            assert np.vdot(random - once, once) == pytest.approx(0, abs=1e-8)
    assert sizes > 1.0


def test_the_ridge_path_goes_to_both_parts() -> None:
    ridges = [1e-2, 1e-4, 1e-6, 1e-8, 1e-10]
    along, fresh = [], []
    for seed in range(12):
        data = next_token_contexts(seed)
        found = graph_svm(data.embeddings, token_priority_graph(data.sequences, data.labels))
        fin = soft_component(data.embeddings, data.sequences, data.labels)
        loss, w, path = Loss(data), np.zeros(64), []
        for ridge in ridges:
            options = {"maxiter": 20_000, "ftol": 1e-17, "gtol": 1e-14, "maxcor": 50}
            w = minimize(loss, w, (ridge,), "L-BFGS-B", jac=True, options=options).x
            path.append(w.reshape(8, 8))
        rest = [weight - found.project(weight) for weight in path]
        along.append([correlation(weight, found.weight) for weight in rest])
        np.testing.assert_allclose(found.project(path[-1]), fin, atol=1e-5)
        if seed == 0:
            size = [np.linalg.norm(found.project(weight)) for weight in path]
            assert size[0] == pytest.approx(1.173, abs=5e-4)
            assert size[-1] == pytest.approx(1.151, abs=5e-4)
        rng = np.random.default_rng(1000 + seed)
        labels = data.sequences[np.arange(6), rng.integers(0, 4, 6)]
        other = graph_svm(data.embeddings, token_priority_graph(data.sequences, labels))
        fresh.append(correlation(rest[3], other.weight))
    median = np.median(along, axis=0)
    assert (np.diff(median) > 0).all() and median[3] >= 0.99
    # Labels drawn anew from the same contexts say nothing of this path.
    assert abs(np.median(fresh)) < 0.5


def test_context_markov() -> None:
    counts = np.array([[3, 1, 0], [0, 2, 2]])
    np.testing.assert_allclose(
        context_markov(counts, np.zeros((2, 3))), [[0.75, 0.25, 0], [0, 0.5, 0.5]], atol=1e-15
    )
    law = context_markov(counts, np.log([[1.0, 6.0, 1e9], [1.0, 1.0, 3.0]]))
    np.testing.assert_allclose(law, [[1 / 3, 2 / 3, 0], [0, 0.25, 0.75]], atol=1e-15)
    np.testing.assert_allclose(
        context_markov(np.array([1, 1]), np.array([800.0, -800])), [1, 0]
    )
    # However large the logit of a token that the context lacks.
    np.testing.assert_allclose(context_markov([0, 1, 1], [2000.0, 0, 0]), [0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: token_priority_graph([[0, 1], [1, 2], [0, 1]], [1, 4, 2]),
            r"got 2 that their context does not hold \(first: token 4 of sequence 1\)",
        ),
        (lambda: token_priority_graph([[0, 1]], [3], drop_absent=True), "first: token 3"),
        (
            lambda: token_priority_graph([[0.5, 1]], [1]),
            r"sequences\[0\]: got shape \(2,\) of float64; expected token",
        ),
        (lambda: token_priority_graph([[0, -1]], [0]), "expected token numbers"),
        (
            lambda: token_priority_graph([[0], np.array([], int)], [0, 0]),
            r"sequences\[1\]: got an empty context",
        ),
        (
            lambda: token_priority_graph([[0, 1]], [0, 1]),
            r"labels: got shape \(2,\) of int64; expected 1 token numbers",
        ),
        (lambda: token_priority_graph([], np.array([], int)), "one sequence at least"),
        (lambda: graph_svm(np.eye(3), {}), "graphs: got none"),
        (
            lambda: graph_svm(np.eye(2), token_priority_graph(SEQUENCES, LABELS)),
            "embeddings: got 2, and a token number 2; expected one embedding for each token, 3 at",
        ),
        (lambda: context_markov(np.array([1, 2]), np.array([0.0])), "expected one shape"),
        (lambda: context_markov(np.array([0, 0]), np.zeros(2)), "an empty context"),
        (lambda: context_markov(np.array([-1, 2]), np.zeros(2)), "negative or infinite counts"),
    ],
)
def test_errors_are_one_sentence(call, message) -> None:
    with pytest.raises(AttoscopeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_absent_labels_can_be_left_out() -> None:
    graphs = token_priority_graph([[0, 1, 2], [1, 2], [0, 1, 2]], [0, 0, 1], drop_absent=True)
    same = token_priority_graph([[0, 1, 2], [0, 1, 2]], [0, 1])
    assert graphs[2].edges.tolist() == same[2].edges.tolist()
    dropped = soft_component(np.eye(3), [[0, 2], [1, 2]], [0, 0], drop_absent=True)
    assert not dropped.any()
