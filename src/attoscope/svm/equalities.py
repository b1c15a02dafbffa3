"""Several chosen keys: scores that have to be equal, or to differ by known amounts."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, lsmr

from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks
from attoscope.svm.selection import Array, Selection, as_selection

DENSE = 4_000_000


def nearest_equal(
    selection: Selection, weight: Float[np.ndarray, "key_width width"]
) -> Float[np.ndarray, "key_width width"]:
    """The nearest weight (Frobenius) that scores each query's chosen keys equally, with bias."""
    i, t = _pairs(selection)
    if not len(i):
        return weight
    apart = _apart(selection, i, t)
    z = selection.queries[i]
    miss = _bias(selection, i, t) - np.einsum("pk,kd,pd->p", apart, weight, z, optimize=True)
    return np.asarray(weight + least_norm(apart, z, miss))


def least_norm(
    apart: Float[np.ndarray, "pair key_width"],
    queries: Float[np.ndarray, "pair width"],
    goal: Float[np.ndarray, " pair"],
) -> Float[np.ndarray, "key_width width"]:
    """The least-norm W with `apart_p^T W query_p = goal_p` (least squares where inconsistent)."""
    pairs, rows = apart.shape
    columns = queries.shape[1]
    if pairs * rows * columns <= DENSE:
        design = (apart[:, :, None] * queries[:, None, :]).reshape(pairs, -1)
        return np.asarray(np.linalg.lstsq(design, goal, rcond=1e-12)[0].reshape(rows, columns))
    operator = LinearOperator(
        (pairs, rows * columns),
        matvec=lambda w: np.einsum("pk,pk->p", apart, queries @ w.reshape(rows, columns).T),
        rmatvec=lambda c: ((apart * np.ravel(c)[:, None]).T @ queries).ravel(),
    )
    found = lsmr(operator, goal, atol=1e-14, btol=1e-14, maxiter=20 * pairs)[0]
    return np.asarray(found.reshape(rows, columns))


def finite_part(
    selection: Selection,
    probabilities: Any,
    *,
    tol: float | int = 1e-6,
) -> Float[np.ndarray, "key_width width"]:
    """W_fin: the least-norm weight that gives the chosen keys these relative probabilities.

    `(key_t - key_r)^T W query_i + bias_it - bias_ir = log(p_it / p_ir)` for chosen t, r of each
    query. What the softmax of a nonlinear head converges to is W_fin plus a growing multiple of the
    max-margin direction that suppresses the other keys.

    Args:
        selection: its chosen keys are those kept; a selection in which every key is chosen cannot
            be made, so give probabilities 0 to what is not kept and let it compete.
        probabilities: (query, token), positive at chosen keys; each row up to a factor.
        tol: by how much a log ratio may be missed, relative to the largest one if that is above
            1; infinite for least squares where probabilities contradict each other.

    Raises `AttoscopeError` for a probability of 0 at a chosen key, and for probabilities that no
    weight gives. Source: arXiv 2308.16898,
    general SVM equivalence (conjecture); proved for next-token prediction in arXiv 2403.08081.
    """
    selection = as_selection(selection)
    if not (checks.is_number(tol) and tol > 0):
        raise AttoscopeError(f"tol: got {tol!r}; expected a positive number, or infinity")
    p = checks.table("probabilities", probabilities, *selection.selected.shape)
    if not (p[selection.selected] > 0.0).all():
        raise AttoscopeError(
            "probabilities: got zero or negative values at chosen keys; expected "
            "positive numbers there, so choose only the keys that keep a share"
        )
    i, t = _pairs(selection)
    if not len(i):
        return np.zeros((selection.shape[2], selection.shape[3]))
    ratio = np.log(p[i, selection.reference[i]]) - np.log(p[i, t])
    apart, z, goal = (
        _apart(selection, i, t),
        selection.queries[i],
        ratio + _bias(selection, i, t),
    )
    weight = least_norm(apart, z, goal)
    miss = float(np.abs(np.einsum("pk,kd,pd->p", apart, weight, z, optimize=True) - goal).max())
    if miss > tol * max(1.0, float(np.abs(goal).max())):
        raise AttoscopeError(
            f"probabilities: got some that no weight gives (least squares misses a log ratio by "
            f"{miss:.2g}); expected consistent ones, so correct them or raise tol"
        )
    return weight


def _bias(selection: Selection, i: NDArray[np.int64], t: NDArray[np.int64]) -> Array:
    """What equal scores ask of the weight: the bias of the pair less that of the first chosen."""
    if selection.bias is None:
        return np.zeros(len(i))
    return np.asarray(selection.bias[i, t] - selection.bias[i, selection.reference[i]])


def _pairs(selection: Selection) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(query, token) of chosen keys other than the first."""
    others = selection.selected.copy()
    others[np.arange(len(others)), selection.reference] = False
    i, t = np.nonzero(others)
    return i, t


def _apart(selection: Selection, i: NDArray[np.int64], t: NDArray[np.int64]) -> Array:
    seq = selection.sequence[i]
    return np.asarray(selection.keys[seq, selection.reference[i]] - selection.keys[seq, t])
