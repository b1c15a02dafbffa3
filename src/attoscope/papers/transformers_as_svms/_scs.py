"""The nuclear-norm SVM as a semidefinite programme for SCS, which the published figure rests on.

Needs the package scs, which nothing else here does; without it there is nothing to compare.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
from jaxtyping import Float
from scipy import sparse

from attoscope.svm import Selection


def available() -> bool:
    """Whether SCS is installed."""
    return find_spec("scs") is not None


def nuclear_by_scs(selection: Selection) -> Float[np.ndarray, "key_width width"]:
    """What SCS finds at its default accuracy (1e-4), with no certificate.

    `min (trace P + trace Q)/2` over positive semidefinite `[[P, W], [W^T, Q]]` with all margins
    of W at least 1; the optimum is the least nuclear norm.
    """
    import scs

    keys, own = selection.keys[selection.sequence], selection.reference
    i, t = np.nonzero(~selection.selected)
    apart = keys[i, own[i]] - keys[i, t]
    dk, dq = selection.shape[2:]
    # The lower triangle by columns, off the diagonal times sqrt(2), as SCS wants it.
    column, row = np.triu_indices(dk + dq)
    scale = np.where(row == column, 1.0, np.sqrt(2.0))
    block = (column < dk) & (row >= dk)
    margins = np.zeros((len(i), len(row)))
    k, q = column[block], row[block] - dk
    margins[:, block] = apart[:, k] * selection.queries[i][:, q] / scale[block]
    data = {
        "A": sparse.csc_matrix(sparse.vstack([-sparse.csc_matrix(margins), -sparse.eye(len(row))])),
        "b": np.concatenate([-np.ones(len(i)), np.zeros(len(row))]),
        "c": 0.5 * (row == column),
    }  # fmt: skip
    found = scs.solve(data, {"l": len(i), "s": [dk + dq]}, verbose=False)["x"]
    weight = np.zeros((dk, dq))
    weight[k, q] = (found / scale)[block]
    return weight
