"""Bounds on the optimum from any weight and any multipliers: nothing of the solver is used.

Weak duality, for multipliers lam >= 0 (free where keys have to score equally) and
Y = sum lam_it (key_chosen - key_t) query_i^T: every weight with the required margins has
||W|| >= sum(lam * required) / ||Y||_dual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy import sparse

from attoscope.errors import AttoscopeError
from attoscope.svm.norms import Norm, Schatten, as_norm
from attoscope.svm.selection import Array, Selection

# A margin missed by less than this, relative to the right-hand sides, is held.
ROUNDING = 1e-11
# So many numbers are multiplied out at once; more go through a sparse product.
FEW = 2**15


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
    """What a pass over all constraints at one weight found."""

    margin: float = np.inf
    slack: float = np.inf
    need: float = 0.0
    permit: float = np.inf
    hinge: float = 0.0
    unequal: float = 0.0


def certify(
    selection: Selection,
    weight: Float[np.ndarray, "key_width width"],
    dual: Any,
    norm: str | Norm = "frobenius",
    C: float | int = np.inf,
    *,
    interior: Float[np.ndarray, "key_width width"] | None = None,
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
        interior: for right-hand sides that no scaling can reach, a weight that has all required
            margins with something to spare; a little of it repairs what `weight` misses.
    """
    norm = as_norm(norm)
    dual = multipliers(selection, dual)
    total = dual_total(selection, dual)
    image = dual_image(selection, dual)
    weight, reading = _repaired(selection, np.asarray(weight, np.float64), interior, C)
    if np.isfinite(C):
        priced = dual.data[~selection.selected[dual.row, dual.col]]
        most = C / float(priced.max(initial=1e-300))
        lower, upper = _soft(norm, weight, reading, most, total, image, C)
    else:
        size = norm.value(weight)
        factor = reading.need if reading.need <= reading.permit else np.inf
        upper = factor * size if factor < np.inf else np.inf
        bound = norm.dual.value(image)
        lower = total / bound if bound > 0.0 and total > 0.0 else 0.0
    gap = _gap(lower, upper)
    violation = max(0.0, -reading.slack)
    return Certificate(lower, upper, gap, reading.margin, violation, reading.unequal, norm.name)


def _gap(lower: float, upper: float) -> float:
    if upper == 0.0:
        return 0.0
    if not np.isfinite(upper) or lower <= 0.0:
        return float("inf")
    return max(0.0, upper / lower - 1.0)


def _soft(
    norm: Norm,
    weight: Array,
    reading: _Reading,
    most: float,
    total: float,
    image: Array,
    C: float | int,
) -> tuple[float, float]:
    """Bounds with a price for shortfalls: multipliers may be scaled by `most`, up to C."""
    if norm == Schatten(2):
        upper = 0.5 * float(np.vdot(weight, weight)) + C * reading.hinge
        square = float(np.vdot(image, image))
        scale = min(most, total / square) if square > 0.0 and total > 0.0 else 0.0
        return scale * total - 0.5 * scale**2 * square, upper
    upper = norm.value(weight) + C * reading.hinge
    bound = norm.dual.value(image)
    scale = min(most, 1.0 / bound) if bound > 0.0 else most
    return (max(0.0, scale * total) if np.isfinite(scale) else 0.0), upper


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
    return Multipliers(i[keep], t[keep], value[keep])


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


def dual_image(selection: Selection, dual: Multipliers) -> Array:
    """sum lam_it (key_chosen - key_t) query_i^T, (key width, query width)."""
    tokens, width = selection.keys.shape[1:]
    if len(dual) * width <= FEW:
        seq = selection.sequence[dual.row]
        own = selection.keys[seq, selection.reference[dual.row]]
        apart = (own - selection.keys[seq, dual.col]) * dual.data[:, None]
        return np.asarray(apart.T @ selection.queries[dual.row])
    n = len(selection.queries)
    offset = selection.sequence * tokens
    flat = selection.keys.reshape(-1, width)
    columns = offset[dual.row] + dual.col
    minus = sparse.csr_array((dual.data, (dual.row, columns)), shape=(n, len(flat)))
    own = flat[offset + selection.reference] * minus.sum(1)[:, None]
    return np.asarray((own - minus @ flat).T @ selection.queries)


def _read(selection: Selection, weight: Array) -> _Reading:
    """One pass over all constraints, in blocks of queries."""
    out = _Reading()
    plain = selection.bias is None and selection.required.size == 1
    for rows, scores in selection.score_blocks(weight):
        selected = selection.selected[rows]
        if selection.bias is not None:
            scores = scores + selection.bias[rows]
        ref = selected.argmax(1)
        margin = np.take_along_axis(scores, ref[:, None], 1) - scores
        out.unequal = max(out.unequal, float(np.abs(margin[selected]).max()))
        competes = ~selected
        if selection.allowed is not None:
            competes &= selection.allowed[rows]
        required = selection.required if plain else _rows(selection.required, rows)
        slack = np.where(competes, margin - required, np.inf)
        least = float(slack.min())
        out.slack = min(out.slack, least)
        if least < 0.0:
            out.hinge -= float(np.minimum(slack, 0.0).sum())
        h = float(required[0, 0])
        if plain and h > 0.0:
            # The least margin says it all.
            out.margin = min(out.margin, least + h)
            out.need = max(out.need, h / (least + h) if least + h > 0.0 else np.inf)
            continue
        out.margin = min(out.margin, float(np.where(competes, margin, np.inf).min()))
        _scaling(selection, rows, margin, required, competes, out)
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


def _repaired(
    selection: Selection, weight: Array, interior: Array | None, C: float
) -> tuple[Array, _Reading]:
    """A weight for which the bound is finite, where a small correction makes it so."""
    if (selection.selected.sum(1) > 1).any():
        from attoscope.svm.equalities import nearest_equal

        weight = nearest_equal(selection, weight)
    reading = _read(selection, weight)
    scales = reading.need <= reading.permit and reading.need < np.inf
    if np.isfinite(C) or scales:
        return weight, reading
    spare = -np.inf if interior is None else _read(selection, interior).slack
    if interior is not None and spare > 0.0 > reading.slack:
        share = min(1.0, -reading.slack / (spare - reading.slack) * (1.0 + 1e-12))
        weight = (1.0 - share) * weight + share * interior
        reading = _read(selection, weight)
    if reading.slack >= -ROUNDING * max(1.0, float(np.abs(selection.required).max())):
        # The weight itself is a feasible point: its norm is an upper bound as it stands.
        reading.need = reading.permit = 1.0
    return weight, reading
