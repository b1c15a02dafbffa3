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

    def project(self, weight: Any) -> Array:
        """The part of (width, width) in S_fin = span{(e_i - e_j) e_k^T: one component of graph k}.

        What decides probabilities inside components; W_svm is orthogonal to it.
        """
        weight = checks.weight(weight, self.apart.shape[1], self.last.shape[1])
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
    Tokens of equal embeddings keep equal scores, as S_fin has nothing that tells them apart.

    Args: as in `token_priority_graph`, and `embeddings` (vocabulary, width).

    Raises `AttoscopeError` for bad input. Source: arXiv 2403.08081.
    """
    contexts, follows = _contexts(sequences, labels, drop_absent)
    graphs = token_priority_graph(contexts, follows)
    e = _embeddings(embeddings, graphs)
    apart, last = _inside(e, graphs)
    if not len(apart):
        return np.zeros((e.shape[1], e.shape[1]))
    # Logits are products of these two: at scale 1 the sizes of embeddings do not matter.
    scale = [float(np.abs(part).max()) or 1.0 for part in (apart, last)]
    apart, last = apart / scale[0], last / scale[1]
    # W = sum_p c_p A_p has the values G c at the A_p; coordinates u are values in their range.
    square, vectors = np.linalg.eigh((apart @ apart.T) * (last @ last.T))
    keep = square > RANK * square[-1]
    if not keep.any():
        return np.zeros((e.shape[1], e.shape[1]))
    basis = vectors[:, keep]
    loss = _ComponentLoss(contexts, follows, graphs, basis)
    found = root(loss.gradient, np.zeros(basis.shape[1]), jac=loss.hessian, tol=1e-13)
    miss = float(np.abs(loss.gradient(found.x)).max())
    if miss > STATIONARY:
        raise AttoscopeError(
            f"soft_component: got stuck at a gradient of {miss:.1e}; expected at most "
            f"{STATIONARY:.0e}, so remove nearly equal embeddings"
        )
    weight = (apart * (basis @ (found.x / square[keep]))[:, None]).T @ last
    return np.asarray(weight / scale[0] / scale[1])


def context_markov(counts: Any, logits: Any) -> Float[np.ndarray, "*batch token"]:
    """The next-token law of one attention layer: a Markov chain reweighted by the context.

    `p(y) = c_y e^{l_y} / sum_x c_x e^{l_x}`, with c the number of times that the context holds
    each token and `l_x = e_x^T W e_last`. Sums to 1; 0 for tokens that the context lacks.

    Args:
        counts: (..., token) from 0.
        logits: (..., token).

    Raises `AttoscopeError` for shapes that differ, negative counts, empty contexts, and logits
    that leave no law: NaN or infinity, or minus infinity at every token of the context.
    Source: arXiv 2402.13512 (context-conditioned Markov chain).
    """
    c, l = (  # noqa: E741
        checks.real(name, value, "(..., token)")
        for name, value in (("counts", counts), ("logits", logits))
    )
    if c.shape != l.shape or c.ndim < 1:
        raise AttoscopeError(
            f"counts, logits: got shapes {c.shape} and {l.shape}; expected one shape (..., token)"
        )
    if not np.isfinite(c).all() or (c < 0).any() or not (c > 0).any(-1).all():
        raise AttoscopeError(
            "counts: got negative or infinite counts or an empty context; expected counts from 0 "
            "with a positive sum"
        )
    held = np.where(c > 0, l, -np.inf)
    if not np.isfinite(held.max(-1)).all():
        raise AttoscopeError(
            "logits: got NaN or infinity at a token of the context, or minus infinity at all; "
            "expected finite numbers"
        )
    with np.errstate(divide="ignore"):
        held += np.log(c)
    weight = np.exp(held - held.max(-1, keepdims=True))
    return np.asarray(weight / weight.sum(-1, keepdims=True))


def _contexts(sequences: Any, labels: Any, drop_absent: bool) -> tuple[list[Ids], Ids]:
    """Contexts and labels as whole numbers, each label in its context."""
    if not np.iterable(sequences):
        raise AttoscopeError(
            f"sequences: got {type(sequences).__name__}; expected a list of contexts"
        )
    contexts = [_context(i, sequence) for i, sequence in enumerate(sequences)]
    if not contexts:
        raise AttoscopeError("sequences: got none; expected one sequence at least")
    meaning = f"{len(contexts)} token numbers, one for each sequence"
    follows = checks.whole("labels", labels, meaning, (len(contexts),))
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
    kept = [context for context, keeps in zip(contexts, held, strict=True) if keeps]
    return kept, follows[held]


def _context(i: int, sequence: Any) -> Ids:
    name, meaning = f"sequences[{i}]", "token numbers (position,), from 0"
    found = checks.as_array(name, sequence, meaning)
    if not found.size:
        raise AttoscopeError(f"{name}: got an empty context; expected a token at least")
    context = checks.whole(name, found, meaning)
    if context.ndim != 1 or context.min() < 0:
        raise AttoscopeError(
            f"{name}: got shape {context.shape} and numbers from {context.min()}; expected "
            f"{meaning}"
        )
    return context


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


def _embeddings(embeddings: Any, graphs: Any) -> Array:
    e = checks.floats("embeddings", embeddings, 2, "(vocabulary, width)")
    if not isinstance(graphs, Mapping) or not all(
        isinstance(graph, TokenGraph) for graph in graphs.values()
    ):
        raise AttoscopeError(
            f"graphs: got {type(graphs).__name__} that is no mapping to TokenGraph; expected those "
            "of token_priority_graph, by last token"
        )
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
