"""Bounds on the optimum from any weight and any multipliers: nothing of the solver is used.

Weak duality, for multipliers lam >= 0 (free where keys have to score equally) and
Y = sum lam_it (key_chosen - key_t) query_i^T: every weight with the required margins has
||W|| >= sum(lam * required) / ||Y||_dual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy import sparse

from attoscope.errors import AttoscopeError
from attoscope.svm._jit import kernel
from attoscope.svm.norms import Norm, Schatten, as_norm
from attoscope.svm.selection import Array, Selection

# A margin missed by less than this, relative to the right-hand sides, is held.
ROUNDING = 1e-11
# Scores chosen together may differ by this, likewise.
EQUAL = 1e-9
# Relative rounding of a sum of products: bounds are moved outwards by it.
ROUND = 16.0 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Certificate:
    """What is known about the optimum.

    `lower` <= optimum <= `upper`; `gap` is `upper / lower - 1` (0: optimal; infinite: the weight
    does not separate, or there are no multipliers). `margin` is the least margin of the weight
    given (not of the rescaled one that `upper` belongs to), `violation` how much the worst
    required margin was missed by, `unequal` the largest difference of scores that had to be equal.
    """

    lower: float
    upper: float
    gap: float
    margin: float
    violation: float
    unequal: float
    norm: str

    def __str__(self) -> str:
        return (
            f"{self.norm} norm: optimum between {self.lower:.9g} and {self.upper:.9g}, "
            f"relative gap {self.gap:.1e}, least margin {self.margin:.6g}"
        )


@dataclass
class _Reading:
    """What a pass over all constraints at one weight found; rounding is taken off `slack`."""

    margin: float = np.inf
    slack: float = np.inf
    missed: float = 0.0
    need: float = 0.0
    permit: float = np.inf
    hinge: float = 0.0
    unequal: float = 0.0
    largest: float = 0.0

    @property
    def factor(self) -> float:
        """What the weight has to be scaled by to separate; infinite where no scaling helps."""
        return self.need if self.need <= self.permit else np.inf

    def equal(self, scale: float) -> bool:
        """Whether scores chosen together are equal, at the size that the weight is scaled to."""
        factor = self.factor if self.factor < np.inf else 1.0
        return factor * self.unequal <= EQUAL * scale + factor * ROUND * self.largest


def certify(
    selection: Selection,
    weight: Float[np.ndarray, "key_width width"],
    dual: Any,
    norm: str | Norm = "frobenius",
    C: float | int = np.inf,
) -> Certificate:
    """A lower and an upper bound on the optimum, computed from the data alone.

    Hard margin (C infinite): the optimum is the least norm with all required margins, the upper
    bound is the norm of `weight` scaled until it separates. Soft margin: the optimum is that of
    `1/2 ||W||_F^2 + C sum of shortfalls` (Frobenius) or `||W|| + C sum of shortfalls` (others).

    Args:
        selection: the problem.
        weight: any candidate, (key width, query width).
        dual: any multipliers (query, token), dense or sparse; negative ones count as 0 except
            between chosen keys.
        norm: as in `AttentionSVM`.
        C: the price of a shortfall.

    Rounding in the scores and in the combination of constraints is allowed for. A weight that no
    scaling makes separate, or whose chosen keys cannot be made to score equally by a small
    change, gives an infinite upper bound.
    """
    norm = as_norm(norm)
    dual = multipliers(selection, dual)
    total = dual_total(selection, dual)
    image, doubt = dual_image(selection, dual)
    bound = norm.dual.value(image) + doubt * _spread(norm.dual, image.shape)
    weight = _equalised(selection, np.asarray(weight, np.float64))
    reading = _read(selection, weight)
    if np.isfinite(C):
        priced = dual.data[~selection.selected[dual.row, dual.col]]
        most = C / float(priced.max(initial=1e-300))
        lower, upper = _soft(norm, weight, reading, most, total, bound, C)
    else:
        if reading.slack >= -ROUNDING * _scale(selection) and reading.factor == np.inf:
            # The weight itself is a feasible point: its norm is an upper bound as it stands.
            reading.need = reading.permit = 1.0
        upper = reading.factor * norm.value(weight) if reading.factor < np.inf else np.inf
        lower = total / bound if bound > 0.0 and total > 0.0 else 0.0
    if not reading.equal(_scale(selection)):
        upper = np.inf
    return Certificate(
        lower, upper, _gap(lower, upper), reading.margin, reading.missed, reading.unequal,
        norm.name,
    )  # fmt: skip


def _scale(selection: Selection) -> float:
    return max(1.0, float(np.abs(selection.required).max()))


def _spread(norm: Norm, shape: tuple[int, int]) -> float:
    """The largest value of `norm` among matrices of this shape and Frobenius norm 1."""
    if getattr(norm, "p", 1.0) >= 2:
        return 1.0
    flat, identity = np.ones(shape), np.eye(*shape)
    return max(norm.value(m) / float(np.linalg.norm(m)) for m in (flat, identity))


def _gap(lower: float, upper: float) -> float:
    if upper == 0.0:
        return 0.0
    if not np.isfinite(upper) or not 0.0 < lower <= upper * (1.0 + EQUAL):
        return float("inf")
    return max(0.0, upper / lower - 1.0)


def _soft(
    norm: Norm,
    weight: Array,
    reading: _Reading,
    most: float,
    total: float,
    bound: float,
    C: float | int,
) -> tuple[float, float]:
    """Bounds with a price for shortfalls: multipliers may be scaled by `most`, up to C."""
    if norm == Schatten(2):
        upper = 0.5 * float(np.vdot(weight, weight)) + C * reading.hinge
        scale = min(most, total / bound**2) if bound > 0.0 else most
        lower = scale * total - 0.5 * scale**2 * bound**2
        return max(0.0, lower) if np.isfinite(scale) else 0.0, upper
    upper = norm.value(weight) + C * reading.hinge
    scale = min(most, 1.0 / bound) if bound > 0.0 else most
    return max(0.0, scale * total) if np.isfinite(scale) else 0.0, upper


@dataclass(frozen=True, eq=False)
class Multipliers:
    """Those that count: entry k belongs to (query `row[k]`, token `col[k]`)."""

    row: NDArray[np.int64]
    col: NDArray[np.int64]
    data: Array

    def __len__(self) -> int:
        return len(self.data)


def multipliers(selection: Selection, dual: Any) -> Multipliers:
    """Multipliers of a (query, token) table: none where nothing competes, none negative."""
    shape = np.shape(dual)
    if shape != selection.selected.shape:
        raise AttoscopeError(
            f"dual: got shape {shape}; expected {selection.selected.shape} (query, token)"
        )
    if sparse.issparse(dual):
        rows = dual.tocsr()
        i = np.repeat(np.arange(shape[0]), np.diff(rows.indptr))
        t, value = rows.indices, np.asarray(rows.data, np.float64)
    else:
        table = np.asarray(dual, np.float64)
        i, t = np.nonzero(table)
        value = table[i, t]
    if not np.isfinite(value).all():
        raise AttoscopeError("dual: got NaN or infinite multipliers; expected finite numbers")
    keep = (value > 0.0) | selection.selected[i, t]
    keep &= t != selection.reference[i]
    if selection.allowed is not None:
        keep &= selection.allowed[i, t]
    return Multipliers(i[keep], np.asarray(t[keep], np.int64), value[keep])


def right_sides(selection: Selection, i: NDArray[Any], t: NDArray[Any]) -> Array:
    """What each (query, token) margin has to be: `required` less the difference of biases."""
    chosen = selection.selected[i, t]
    wide = selection.required.size > 1
    out = np.where(chosen, 0.0, selection.required[i, t] if wide else selection.required[0, 0])
    if selection.bias is not None:
        out = out - (selection.bias[i, selection.reference[i]] - selection.bias[i, t])
    return np.asarray(out)


def dual_total(selection: Selection, dual: Multipliers) -> float:
    """sum of multipliers times right-hand sides."""
    return float(dual.data @ right_sides(selection, dual.row, dual.col))


def dual_image(selection: Selection, dual: Multipliers) -> tuple[Array, float]:
    """sum lam_it (key_chosen - key_t) query_i^T, (key width, query width), and its rounding.

    The second is a bound on the Frobenius norm of what rounding may have changed.
    """
    pulled = np.zeros((len(selection.queries), selection.keys.shape[2]))
    sizes = np.zeros(len(pulled))
    pull(
        selection.keys, selection.sequence, selection.reference, dual.row, dual.col, dual.data,
        pulled, sizes,
    )  # fmt: skip
    lengths = np.sqrt(np.einsum("nd,nd->n", selection.queries, selection.queries))
    return np.asarray(pulled.T @ selection.queries), ROUND * float(sizes @ lengths)


@kernel
@no_type_check
def pull(keys, seq, ref, row, col, data, pulled, sizes):
    """sum_t lam_it (key_chosen - key_t) for each query i, and how large the terms are."""
    d = keys.shape[2]
    for p in range(row.shape[0]):
        i = row[p]
        x, y = keys[seq[i], ref[i]], keys[seq[i], col[p]]
        own, other = 0.0, 0.0
        for k in range(d):
            own += x[k] * x[k]
            other += y[k] * y[k]
            pulled[i, k] += data[p] * (x[k] - y[k])
        sizes[i] += abs(data[p]) * (np.sqrt(own) + np.sqrt(other))


def _read(selection: Selection, weight: Array) -> _Reading:
    """One pass over all constraints, in blocks of queries."""
    out = _Reading()
    plain = selection.bias is None and selection.required.size == 1
    for rows, scores in selection.score_blocks(weight):
        selected = selection.selected[rows]
        seen = scores if selection.allowed is None else scores * selection.allowed[rows]
        largest = np.abs(seen).max(1, keepdims=True)
        out.largest = max(out.largest, float(largest.max()))
        if selection.bias is not None:
            scores = scores + selection.bias[rows]
        margin = np.take_along_axis(scores, selected.argmax(1)[:, None], 1) - scores
        out.unequal = max(out.unequal, float(np.abs(margin[selected]).max()))
        competes = ~selected
        if selection.allowed is not None:
            competes &= selection.allowed[rows]
        required = selection.required if plain else _rows(selection.required, rows)
        slack = np.where(competes, margin - required, np.inf)
        least = float(slack.min())
        out.missed = max(out.missed, -least)
        slack -= ROUND * largest
        out.slack = min(out.slack, safe := float(slack.min()))
        if safe < 0.0:
            out.hinge -= float(np.minimum(slack, 0.0).sum())
        h = float(required[0, 0])
        if plain and h > 0.0:
            # The least margin says it all.
            out.margin = min(out.margin, least + h)
            out.need = max(out.need, h / (safe + h) if safe + h > 0.0 else np.inf)
            continue
        out.margin = min(out.margin, float(np.where(competes, margin, np.inf).min()))
        _scaling(selection, rows, margin - ROUND * largest, required, competes, out)
    return out


def _rows(required: Array, rows: Any) -> Array:
    return required[rows] if required.size > 1 else required


def _scaling(
    selection: Selection,
    rows: Any,
    margin: Array,
    required: Array,
    competes: NDArray[np.bool_],
    out: _Reading,
) -> None:
    """By which factors the weight may be scaled: margins without bias scale, biases do not."""
    h = np.broadcast_to(required, margin.shape)
    if selection.bias is not None:
        bias = selection.bias[rows]
        apart = np.take_along_axis(bias, selection.selected[rows].argmax(1)[:, None], 1) - bias
        margin, h = margin - apart, h - apart
        if np.abs(apart[selection.selected[rows]]).max(initial=0.0) > 0.0:
            out.need, out.permit = max(out.need, 1.0), min(out.permit, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(margin > 0.0, h / margin, np.inf)
        out.need = max(out.need, float(ratio[competes & (h > 0.0)].max(initial=0.0)))
        low = competes & (h <= 0.0) & (margin < 0.0)
        out.permit = min(out.permit, float((h / margin)[low].min(initial=np.inf)))


def _equalised(selection: Selection, weight: Array) -> Array:
    """The nearest weight at which keys chosen together score equally, where several are chosen."""
    if not (selection.selected.sum(1) > 1).any():
        return weight
    from attoscope.svm.equalities import nearest_equal

    return np.asarray(nearest_equal(selection, weight))


def made_to_separate(selection: Selection, weight: Array, interior: Array | None) -> Array:
    """A weight that separates as it stands, by a small change (or as it was: none is known).

    `interior` is a weight that has all required margins with something to spare, for right-hand
    sides that no scaling can reach: a little of it makes up for what `weight` misses.
    """
    weight = _equalised(selection, weight)
    reading = _read(selection, weight)
    if interior is None or reading.slack >= 0.0:
        return weight * reading.factor if 0.0 < reading.factor < np.inf else weight
    interior = _equalised(selection, interior)
    spare = _read(selection, interior).slack
    if spare <= 0.0:
        return weight
    share = min(1.0, -reading.slack / (spare - reading.slack) * (1.0 + 1e-12))
    return (1.0 - share) * weight + share * interior
