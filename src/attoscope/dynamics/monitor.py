"""Watch an attention layer that somebody else is training: does it go where its own SVM points?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.exceptions import ConvergenceWarning

from attoscope.dynamics.optimality import competing
from attoscope.dynamics.weights import correlation
from attoscope.errors import AttoscopeError
from attoscope.svm import AttentionSVM, InfeasibleSelection, Norm, Selection
from attoscope.svm import _checks as checks
from attoscope.svm.norms import as_norm
from attoscope.svm.selection import key_scores

Array = NDArray[np.float64]
# Directions of keys and queries below this, relative to the largest, are rounding.
FLAT = 1e-10
# What modules call their query and key projections.
NAMES = (("q_proj", "k_proj"), ("query", "key"), ("to_q", "to_k"), ("q", "k"))
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "heads")


@dataclass(frozen=True, eq=False)
class Look:
    """What one look at the layer found.

    `selected` (query,) most probable keys, `changed` how many of them differ from the look before;
    `max_probability` their mean probability; `norm` the Frobenius norm of W and `inside` the share
    of it that the probes can see; `duplicates` how many keys equal the selected one (they are left
    out). Per norm: `correlation` with the SVM of what is selected, `margin_share` (least margin of
    W over its norm, over the largest possible: 1 is max-margin, at most 0 does not separate) and
    the certified `gap` of the SVM; NaN where `feasible` is False, also where no key competes. Where
    the weight, or what functions give for keys and queries, is not finite, all readings are NaN
    and `selected` is -1.
    """

    step: int
    selected: Int[np.ndarray, " query"]
    changed: int
    max_probability: float
    norm: float
    inside: float
    duplicates: int
    feasible: bool
    correlation: dict[str, float]
    margin_share: dict[str, float]
    gap: dict[str, float]

    def row(self) -> dict[str, int | float | bool]:
        """Plain numbers by name, one column per norm."""
        names = (
            "step",
            "changed",
            "max_probability",
            "norm",
            "inside",
            "duplicates",
            "feasible",
        )
        out = {name: getattr(self, name) for name in names}
        for name in ("correlation", "margin_share", "gap"):
            out |= {f"{name}_{norm}": value for norm, value in getattr(self, name).items()}
        return out


class LayerMonitor:
    """Compares an attention layer with the SVM of what it selects, every few training steps.

    Call `step()` once per training step; every `every`-th call takes a `Look` into `looks`. The
    solver starts from its last solution, so that a look costs little once the selection settles.

    Args:
        weight: a function that gives the layer's current W (key width, query width), or its
            factors (K, Q) with W = K Q^T, as arrays or torch tensors; with the layer's own scale
            (1/sqrt(head width)) in it. See `head_weight` for torch layers. One column more than
            queries are wide means a query bias: a 1 is put after each query.
        keys: (sequence, token, key width) probes: what enters the key projection; or a function
            that gives them, where they change in training.
        queries: (query, query width) likewise.
        sequence: (query,) whose keys each query reads; as in `Selection`.
        allowed: (query, token) booleans.
        every: look at each such step; the start is looked at by `look()`.
        norms: of the SVMs to compare with; entrywise norms see all of W, also what probes do not.
        tol: certified gap at which a solver stops.
        time_limit: seconds per solution.

    Source: arXiv 2308.16898 (the direction of training); the diagnostics are ours.
    """

    def __init__(
        self,
        weight: Any,
        keys: Any,
        queries: Any,
        *,
        sequence: Any = None,
        allowed: Any = None,
        every: Any = 100,
        norms: str | Sequence[str | Norm] = ("frobenius", "nuclear"),
        tol: float | int = 1e-4,
        time_limit: float | int | None = None,
    ) -> None:
        if not callable(weight):
            raise AttoscopeError(
                f"weight: got {type(weight).__name__}; expected a function that gives the "
                "current weight, as `lambda: head_weight(layer)`"
            )
        if not checks.is_number(every, whole=True) or every < 1:
            raise AttoscopeError(f"every: got {every!r}; expected a whole number of at least 1")
        if allowed is not None:
            allowed = checks.as_array("allowed", allowed, "booleans (query, token)")
            if allowed.ndim == 2 and not allowed.any(1).all():
                raise AttoscopeError(
                    f"allowed: got query {int(allowed.any(1).argmin())} with no key allowed; "
                    "expected at least one for each, so drop such queries"
                )
        self.weight, self.keys, self.queries = weight, keys, queries
        self.sequence, self.allowed, self.every = sequence, allowed, every
        self.models = [
            AttentionSVM(as_norm(norm), tol=tol, time_limit=time_limit, warm_start=True)
            for norm in ((norms,) if isinstance(norms, str) else norms)
        ]
        self.count = 0
        self.looks: list[Look] = []

    def step(self) -> Look | None:
        """Count a training step; gives a look at every `every`-th one."""
        self.count += 1
        return self.look() if self.count % self.every == 0 else None

    def rows(self) -> list[dict[str, int | float | bool]]:
        """All looks as plain rows, for a table."""
        return [look.row() for look in self.looks]

    def look(self) -> Look:
        """Look now."""
        weight, keys, queries = self._now()
        moving = [a for a, x in ((keys, self.keys), (queries, self.queries)) if callable(x)]
        if all(np.isfinite(a).all() for a in (weight, *moving)):
            selection, selected, p, same = _selection(
                weight, keys, queries, self.sequence, self.allowed
            )
        else:
            selection, selected, p, same = None, np.full(len(queries), -1), np.nan, 0
        last = self.looks[-1].selected if self.looks else selected
        seen = np.zeros_like(weight) if selection is None else _inside(selection, weight)
        size = float(np.linalg.norm(weight)) if np.isfinite(p) else float("nan")
        feasible, readings = self._compare(selection, weight, seen)
        found = Look(
            step=self.count,
            selected=selected,
            changed=int((selected != last).sum()) if last.shape == selected.shape else -1,
            max_probability=p,
            norm=size,
            inside=float(np.linalg.norm(seen)) / size if size > 0.0 else float("nan"),
            duplicates=same,
            feasible=feasible,
            correlation=readings[0],
            margin_share=readings[1],
            gap=readings[2],
        )
        self.looks.append(found)
        return found

    def _now(self) -> tuple[Array, Array, Array]:
        """The weight, keys and queries of this moment, with the query bias as a last column."""
        given = self.weight()
        weight = _multiplied(given) if isinstance(given, (tuple, list)) else as_array(given)
        keys, queries = (as_array(x() if callable(x) else x) for x in (self.keys, self.queries))
        if weight.ndim == 2 and queries.ndim == 2 and weight.shape[1] == queries.shape[1] + 1:
            queries = np.concatenate([queries, np.ones((len(queries), 1))], 1)
        return weight, keys, queries

    def _compare(
        self, selection: Selection | None, weight: Array, seen: Array
    ) -> tuple[bool, tuple[dict[str, float], dict[str, float], dict[str, float]]]:
        """Correlation, margin share and gap per norm."""
        out: tuple[dict[str, float], dict[str, float], dict[str, float]] = ({}, {}, {})
        if selection is None:
            for part in out:
                part |= {as_norm(model.norm).name: float("nan") for model in self.models}
            return False, out
        margin = float(selection.margins(weight)[competing(selection)].min())
        feasible = True
        for model in self.models:
            norm, values = as_norm(model.norm), (np.nan, np.nan, np.nan)
            own = seen if norm.rotates else weight
            try:
                with warnings.catch_warnings():
                    # The gap says it, at each look.
                    warnings.simplefilter("ignore", ConvergenceWarning)
                    model.fit_selection(selection)
                size = norm.value(own)
                share = margin / size * model.objective_ if size > 0.0 else np.nan
                values = (float(correlation(own, model.weight_)), share, model.gap_)
            except InfeasibleSelection:
                feasible = False
            for part, value in zip(out, values, strict=True):
                part[norm.name] = value
        return feasible, out


def head_weight(
    layer: Any, head: Any = 0, *, heads: Any = None
) -> Float[np.ndarray, "key_width query_width"]:
    """W of one head of a torch attention layer: its logits are `key_input^T W query_input`.

    `W_k^T W_q / sqrt(head width)`, with one more column `W_k^T b_q / sqrt(head width)` where the
    query projection has a bias (a bias of the keys changes no probability). For
    `nn.MultiheadAttention`, and modules with linear layers q_proj and k_proj, query and key, to_q
    and to_k, or q and k. Grouped key heads are shared as usual. Scores are assumed to be divided
    by sqrt(head width), which the layer is not asked about. Not for rotary or relative positions:
    there no single W exists; rotary ones are refused where the layer shows them.

    Args:
        layer: the module.
        head: which head, from 0.
        heads: how many heads, where the module does not say.
    """
    if _rotary(layer):
        raise AttoscopeError(
            f"layer: got a {type(layer).__name__} with rotary positions; expected a layer whose "
            "scores come from one W at all distances, so give a function for the distance you mean"
        )
    query, key, bias = _projections(layer)
    count: Any = heads or next((getattr(layer, n) for n in COUNTS if hasattr(layer, n)), None)
    if not checks.is_number(count, whole=True) or count < 1 or len(query) % count:
        raise AttoscopeError(
            f"heads: got {count!r} for a query projection to {len(query)}; expected the number of "
            "heads, so give heads="
        )
    width = len(query) // int(count)
    if not checks.is_number(head, whole=True) or not 0 <= head < count:
        raise AttoscopeError(f"head: got {head!r}; expected 0 to {int(count) - 1}")
    if not len(key) or len(key) % width or int(count) % (len(key) // width):
        raise AttoscopeError(
            f"layer: got a key projection to {len(key)} and {count} query heads of width {width}; "
            "expected key heads of that width, as many or shared evenly"
        )
    shared = head * (len(key) // width) // int(count)
    q = query[head * width : (head + 1) * width]
    if bias is not None:
        q = np.concatenate([q, bias[head * width : (head + 1) * width, None]], 1)
    return np.asarray(key[shared * width : (shared + 1) * width].T @ q / np.sqrt(width))


def _rotary(layer: Any) -> bool:
    """Whether the layer shows that it turns queries and keys by their positions."""
    named = any(word in type(layer).__name__.lower() for word in ("rotary", "rope"))
    held = any(getattr(layer, n, None) is not None for n in ("rotary_fn", "rotary_emb"))
    told = getattr(getattr(layer, "config", None), "rope_parameters", None)
    return named or held or bool(told)


def _projections(layer: Any) -> tuple[Array, Array, Array | None]:
    """Query and key weights (out, in) and the query bias of a torch layer."""
    packed = getattr(layer, "in_proj_weight", None)
    if packed is not None or hasattr(layer, "q_proj_weight"):
        bias = getattr(layer, "in_proj_bias", None)
        embed = int(layer.embed_dim)
        b = None if bias is None else as_array(bias)[:embed]
        if packed is None:
            return as_array(layer.q_proj_weight), as_array(layer.k_proj_weight), b
        both = as_array(packed)
        return both[:embed], both[embed : 2 * embed], b
    for q, k in NAMES:
        if hasattr(layer, q) and hasattr(layer, k):
            query, key = getattr(layer, q), getattr(layer, k)
            for name, part in ((q, query), (k, key)):
                # Other layers keep their weights transposed, packed or not at all.
                shape = tuple(getattr(getattr(part, "weight", None), "shape", ()))
                if shape != tuple(getattr(part, n, 0) for n in ("out_features", "in_features")):
                    raise AttoscopeError(
                        f"layer: got a {type(part).__name__} as {name}; expected a linear layer, "
                        "so give a function that computes the weight"
                    )
            bias = getattr(query, "bias", None)
            b = None if bias is None else as_array(bias)
            return as_array(query.weight), as_array(key.weight), b
    raise AttoscopeError(
        f"layer: got a {type(layer).__name__} without query and key projections; expected "
        "nn.MultiheadAttention or linear layers q_proj and k_proj (or query and key), so give a "
        "function that computes the weight"
    )


def as_array(value: Any) -> Array:
    """A float64 array of an array or a torch tensor, of any type and on any device."""
    if hasattr(value, "detach"):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, np.float64)


def _multiplied(pair: Any) -> Array:
    k, q = (as_array(part) for part in pair)
    return np.asarray(k @ q.T)


def _selection(
    weight: Array, keys: Array, queries: Array, sequence: Any, allowed: Any
) -> tuple[Selection | None, Int[np.ndarray, " query"], float, int]:
    """What the weight selects: the problem without duplicates (None where no key competes), the
    selected keys, their mean probability, and how many duplicates there are."""
    if keys.ndim != 3 or queries.ndim != 2:
        raise AttoscopeError(
            f"keys: got keys of shape {keys.shape} and queries of shape {queries.shape}; expected "
            "(sequence, token, width) and (query, width)"
        )
    weight = checks.weight(weight, keys.shape[2], queries.shape[1])
    scores = key_scores(keys, queries, sequence, weight)
    if allowed is not None:
        allowed = checks.mask("allowed", allowed, *scores.shape)
        scores[~allowed] = -np.inf
    selected = scores.argmax(1)
    p = float(softmax(scores, axis=1).max(1).mean())
    if (np.isfinite(scores).sum(1) < 2).all():
        return None, selected, p, 0
    selection = Selection(keys, queries, selected, sequence, allowed=allowed)
    same = selection.duplicates()
    if len(same) == selection.constraint_count:
        return None, selected, p, len(same)
    return (selection.without(same) if len(same) else selection), selected, p, len(same)


def _inside(selection: Selection, weight: Array) -> Array:
    """The part of the weight that margins can see: differences of keys, and queries."""
    i, t = np.nonzero(competing(selection))
    seq = selection.sequence[i]
    apart = selection.keys[seq, selection.reference[i]] - selection.keys[seq, t]
    left, right = _span(apart), _span(selection.queries)
    return np.asarray(left @ (left.T @ weight @ right) @ right.T)


def _span(rows: Array) -> Array:
    """An orthonormal basis of the rows' span, as columns."""
    values, vectors = np.linalg.eigh(rows.T @ rows)
    return np.asarray(vectors[:, values > FLAT * values[-1]])
