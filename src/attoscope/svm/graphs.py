"""Next-token prediction as token priorities: graphs, their SVM, and the finite part.

With the loss `-mean log sum_{t: x_t = label} s_t` one attention layer is a conditional logit over
the tokens of its context, convex in W. Gradient descent then goes to `W_fin + R W_svm`, R growing:
hard retrieval of the highest component of the priority graph that the context holds, and a soft
composition inside it. Source: arXiv 2403.08081.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import root
from scipy.sparse.csgraph import connected_components

from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks
from attoscope.svm.equalities import least_norm
from attoscope.svm.estimator import AttentionSVM
from attoscope.svm.selection import Array, Selection

Ids = NDArray[np.int64]
# Eigenvalues of a Gram matrix below this share of the largest count as zero.
RANK = 1e-12
# The gradient at which a minimum counts as found.
STATIONARY = 1e-9


@dataclass(frozen=True, eq=False)
class TokenGraph:
    """Priorities of tokens in the contexts that end with `last`.

    An edge (i, j) says that label i was preferred to token j of its context. Strongly connected
    components are numbered in condensation order: every edge between components goes from a
    lower number to a higher one, so that 0 is a component that nothing is preferred to.

    Fields: `last`; `tokens` (node,) ascending; `edges` (edge, 2) of token numbers, ascending,
    without repetitions or loops; `component` (node,) number of each token's component.
    """

    last: int
    tokens: Int[np.ndarray, " node"]
    edges: Int[np.ndarray, "edge 2"]
    component: Int[np.ndarray, " node"]

    @property
    def components(self) -> list[Int[np.ndarray, " member"]]:
        """Tokens of each component, the highest priority first."""
        return [self.tokens[self.component == c] for c in range(self.component.max() + 1)]

    def beaten(self, component: int) -> Int[np.ndarray, " token"]:
        """Tokens of other components that an edge from this component leads to."""
        tail, head = (self.component[np.searchsorted(self.tokens, e)] for e in self.edges.T)
        return np.unique(self.edges[(tail == component) & (head != component), 1])


def token_priority_graph(
    sequences: Any, labels: Any, *, drop_absent: bool = False
) -> dict[int, TokenGraph]:
    """One directed graph per last token: label -> every other token of its context.

    Args:
        sequences: contexts of token numbers, (sequence, position) or a list of ragged ones.
        labels: (sequence,) the token that follows each.
        drop_absent: leave out contexts that do not hold their label, for which the loss is
            infinite; otherwise they are an error.

    Raises `AttoscopeError` in one sentence for what are no token numbers, and for absent labels.
    Source: arXiv 2403.08081.
    """
    contexts, follows = _contexts(sequences, labels, drop_absent)
    last = np.array([context[-1] for context in contexts])
    return {
        int(k): _graph(
            int(k), [contexts[i] for i in np.flatnonzero(last == k)], follows[last == k]
        )
        for k in np.unique(last)
    }


@dataclass(frozen=True, eq=False)
class GraphSVM:
    """The smallest weight that respects all token priorities.

    Fields: `weight` W_svm (width, width), zeros where nothing competes; `model` the fitted
    `AttentionSVM` with its certificate, None where nothing competes; `apart` (pair, width) and
    `last` (pair, width): S_fin is the span of `apart_p last_p^T`.
    """

    weight: Float[np.ndarray, "width width"]
    model: AttentionSVM | None
    apart: Float[np.ndarray, "pair width"]
    last: Float[np.ndarray, "pair width"]

    def project(self, weight: Float[np.ndarray, "width width"]) -> Array:
        """The part of a weight in S_fin = span{(e_i - e_j) e_k^T: one component of graph k}.

        What decides probabilities inside components; W_svm is orthogonal to it.
        """
        if not len(self.apart):
            return np.zeros_like(weight)
        goal = np.einsum("pi,ij,pj->p", self.apart, weight, self.last, optimize=True)
        return least_norm(self.apart, self.last, goal)


def graph_svm(
    embeddings: Any, graphs: Mapping[int, TokenGraph], *, tol: float | int = 1e-8
) -> GraphSVM:
    """W_svm: the least Frobenius norm with the priorities of all graphs as margins.

        (e_i - e_j)^T W e_k  = 0   for i, j in one component of graph k
        (e_i - e_j)^T W e_k >= 1   for an edge i -> j of graph k between components

    Args:
        embeddings: (vocabulary, width).
        graphs: of `token_priority_graph`, by last token k.
        tol: relative gap between certified bounds at which to stop.

    Raises `InfeasibleSelection` where no weight does it, as for equal embeddings, and
    `AttoscopeError` for bad input. Source: arXiv 2403.08081 (Graph-SVM).
    """
    e = _embeddings(embeddings, graphs)
    apart, last = _inside(e, graphs)
    selection = _selection(e, graphs)
    if selection is None:
        return GraphSVM(np.zeros((e.shape[1], e.shape[1])), None, apart, last)
    model = AttentionSVM(tol=tol).fit_selection(selection)
    return GraphSVM(model.weight_, model, apart, last)


def soft_component(
    embeddings: Any, sequences: Any, labels: Any, *, drop_absent: bool = False
) -> Float[np.ndarray, "width width"]:
    """W_fin: what the projection of a trained weight on S_fin tends to.

        argmin over W in S_fin of  -mean log sum_{t: x_t = label} s_t

    with the softmax over only those tokens of the context that are in the label's component.
    Convex, strictly so on S_fin; the minimum is finite, because components are strongly connected.

    Args: as in `token_priority_graph`, and `embeddings` (vocabulary, width).

    Raises `AttoscopeError` for bad input. Source: arXiv 2403.08081.
    """
    contexts, follows = _contexts(sequences, labels, drop_absent)
    graphs = token_priority_graph(contexts, follows)
    e = _embeddings(embeddings, graphs)
    apart, last = _inside(e, graphs)
    if not len(apart):
        return np.zeros((e.shape[1], e.shape[1]))
    # W = sum_p c_p A_p has the values G c at the A_p; coordinates u make ||W|| = ||u||.
    gram = (apart @ apart.T) * (last @ last.T)
    square, vectors = np.linalg.eigh(gram)
    keep = square > RANK * square[-1]
    basis, size = vectors[:, keep], np.sqrt(square[keep])
    loss = _ComponentLoss(contexts, follows, graphs, basis * size)
    found = root(loss.gradient, np.zeros(len(size)), jac=loss.hessian, tol=1e-13)
    miss = float(np.abs(loss.gradient(found.x)).max())
    if miss > STATIONARY:
        raise AttoscopeError(
            f"soft_component: got stuck at a gradient of {miss:.1e}; expected at most "
            f"{STATIONARY:.0e}, so rescale the embeddings or remove nearly equal ones"
        )
    return np.asarray((apart * (basis @ (found.x / size))[:, None]).T @ last)


def context_markov(counts: Any, logits: Any) -> Float[np.ndarray, "*batch token"]:
    """The next-token law of one attention layer: a Markov chain reweighted by the context.

    `p(y) = c_y e^{l_y} / sum_x c_x e^{l_x}`, with c the number of times that the context holds
    each token and `l_x = e_x^T W e_last`. Sums to 1; 0 for tokens that the context lacks.

    Args:
        counts: (..., token) from 0.
        logits: (..., token).

    Raises `AttoscopeError` for shapes that differ, negative counts and empty contexts.
    Source: arXiv 2402.13512 (context-conditioned Markov chain).
    """
    c, l = np.asarray(counts, np.float64), np.asarray(logits, np.float64)  # noqa: E741
    if c.shape != l.shape or c.ndim < 1:
        raise AttoscopeError(
            f"counts, logits: got shapes {c.shape} and {l.shape}; expected one shape (..., token)"
        )
    if not np.isfinite(c).all() or (c < 0).any() or not (c.sum(-1) > 0).all():
        raise AttoscopeError(
            "counts: got negative or infinite counts or an empty context; expected counts from 0 "
            "with a positive sum"
        )
    held = np.where(c > 0, l, -np.inf)
    weight = c * np.exp(held - held.max(-1, keepdims=True))
    return np.asarray(weight / weight.sum(-1, keepdims=True))


def _contexts(sequences: Any, labels: Any, drop_absent: bool) -> tuple[list[Ids], Ids]:
    """Contexts and labels as whole numbers, each label in its context."""
    contexts = [np.asarray(sequence) for sequence in sequences]
    follows = np.asarray(labels)
    for i, context in enumerate(contexts):
        if context.dtype.kind not in "iu" or context.ndim != 1 or context.min(initial=0) < 0:
            raise AttoscopeError(
                f"sequences: got shape {context.shape} of {context.dtype} in sequence {i}; "
                "expected token numbers (position,), from 0"
            )
        if not len(context):
            raise AttoscopeError(
                f"sequences: got none in sequence {i}; expected a token at least"
            )
    if follows.dtype.kind not in "iu" or follows.shape != (len(contexts),) or not contexts:
        raise AttoscopeError(
            f"labels: got shape {follows.shape} of {follows.dtype} for {len(contexts)} sequences; "
            "expected one token number for each, and one sequence at least"
        )
    held = np.array(
        [label in context for context, label in zip(contexts, follows, strict=True)]
    )
    if not held.all() and not (drop_absent and held.any()):
        i = int(np.flatnonzero(~held)[0])
        raise AttoscopeError(
            f"labels: got {int((~held).sum())} that their context does not hold (first: token "
            f"{follows[i]} of sequence {i}); expected each among the tokens of its sequence, so "
            "correct them, or leave them out by drop_absent=True"
        )
    kept = [
        context.astype(np.int64) for context, keeps in zip(contexts, held, strict=True) if keeps
    ]
    return kept, follows[held].astype(np.int64)


def _graph(last: int, contexts: list[Ids], labels: Ids) -> TokenGraph:
    tokens = np.unique(np.concatenate(contexts))
    pairs = [
        (y, x) for y, context in zip(labels, contexts, strict=True) for x in context if x != y
    ]
    edges = np.unique(np.array(pairs, np.int64).reshape(-1, 2), axis=0)
    ends = np.searchsorted(tokens, edges)
    links = sparse.csr_array((np.ones(len(ends)), ends.T), shape=(len(tokens), len(tokens)))
    count, component = connected_components(links, connection="strong")
    tail, head = component[ends.T]
    above: dict[int, set[int]] = {c: set() for c in range(count)}
    for i, j in zip(tail, head, strict=True):
        if i != j:
            above[int(j)].add(int(i))
    order = np.array(list(TopologicalSorter(above).static_order()))
    return TokenGraph(last, tokens, edges, np.argsort(order)[component])


def _embeddings(embeddings: Any, graphs: Mapping[int, TokenGraph]) -> Array:
    e = checks.floats("embeddings", embeddings, 2, "(vocabulary, width)")
    most = max((int(graph.tokens.max()) for graph in graphs.values()), default=-1)
    if most < 0:
        raise AttoscopeError("graphs: got none; expected those of token_priority_graph")
    if most >= len(e):
        raise AttoscopeError(
            f"embeddings: got {len(e)}, and a token number {most}; expected one embedding for "
            f"each token, {most + 1} at least"
        )
    return e


def _inside(e: Array, graphs: Mapping[int, TokenGraph]) -> tuple[Array, Array]:
    """Differences from the first member of each component, and the last token of its graph."""
    pairs = [
        (members[0], other, graph.last)
        for graph in graphs.values()
        for members in graph.components
        for other in members[1:]
    ]
    first, other, last = np.array(pairs, np.int64).reshape(-1, 3).T
    return e[other] - e[first], e[last]


def _selection(e: Array, graphs: Mapping[int, TokenGraph]) -> Selection | None:
    """One query per component: its members over the tokens that its edges lead to."""
    queries, selected, allowed = [], [], []
    for graph in graphs.values():
        for c, members in enumerate(graph.components):
            beaten = graph.beaten(c)
            if len(members) == 1 and not len(beaten):
                continue
            queries.append(graph.last)
            selected.append(np.isin(np.arange(len(e)), members))
            allowed.append(np.isin(np.arange(len(e)), np.concatenate([members, beaten])))
    if not any((a & ~s).any() for a, s in zip(allowed, selected, strict=True)):
        return None
    return Selection(e[None], e[queries], np.array(selected), allowed=np.array(allowed))


class _ComponentLoss:
    """-mean log p(label) inside the label's component, in coordinates u of S_fin.

    The logit of a member over the first of its component is `design_p^T u`, 0 at the first.
    """

    def __init__(
        self, contexts: list[Ids], labels: Ids, graphs: Mapping[int, TokenGraph], design: Array
    ) -> None:
        rows, pair = {}, 0
        for graph in graphs.values():
            for members in graph.components:
                table = np.zeros((len(members), design.shape[1]))
                table[1:] = design[pair : pair + len(members) - 1]
                pair += len(members) - 1
                rows.update({(graph.last, int(x)): (members, table) for x in members})
        self.samples = []
        for context, label in zip(contexts, labels, strict=True):
            members, table = rows[int(context[-1]), int(label)]
            counts = (members[:, None] == context).sum(1)
            held = counts > 0
            own = table[np.searchsorted(members, label)]
            self.samples.append((np.log(counts[held]), table[held] - own))

    def gradient(self, u: Array) -> Array:
        total = np.zeros_like(u)
        for log_counts, apart in self.samples:
            total += _softmax(log_counts + apart @ u) @ apart
        return total / len(self.samples)

    def hessian(self, u: Array) -> Array:
        total = np.zeros((len(u), len(u)))
        for log_counts, apart in self.samples:
            p = _softmax(log_counts + apart @ u)
            mean = p @ apart
            total += (apart * p[:, None]).T @ apart - np.outer(mean, mean)
        return total / len(self.samples)


def _softmax(logits: Array) -> Array:
    p = np.exp(logits - logits.max())
    return np.asarray(p / p.sum())
