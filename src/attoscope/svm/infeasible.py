"""Selections that no weight can make, with a proof that anyone can check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from attoscope.errors import AttoscopeError
from attoscope.svm.certificate import dual_image, dual_total, multipliers
from attoscope.svm.selection import Selection

# A combination of constraints this small, relative to its terms, counts as zero in float64.
ZERO = 1e-12


@dataclass(frozen=True, eq=False)
class Farkas:
    """Multipliers whose combination of constraints says 0 >= 1.

    `dual` (query, token) is non-negative (free between chosen keys) and scaled so that the sum
    of multipliers times required margins is 1, while
    `sum dual_it (key_chosen - key_t) query_i^T` is zero.
    """

    selection: Selection
    dual: Any

    @property
    def residual(self) -> float:
        """||sum dual A||_F over the sum of ||dual A||_F: 0 for a perfect proof."""
        dual = multipliers(self.selection, self.dual)
        if not len(dual):
            return float("inf")
        s = self.selection
        seq = s.sequence[dual.row]
        apart = s.keys[seq, s.reference[dual.row]] - s.keys[seq, dual.col]
        sizes = np.linalg.norm(apart, axis=1) * np.linalg.norm(s.queries[dual.row], axis=1)
        terms = float(np.abs(dual.data) @ sizes)
        image = float(np.linalg.norm(dual_image(s, dual)[0]))
        # Equal keys give the zero constraint: a proof by itself.
        return image / terms if terms > 0.0 else 0.0

    @property
    def excluded_norm(self) -> float:
        """No weight of Frobenius norm below this has the required margins; ideally infinite."""
        dual = multipliers(self.selection, self.dual)
        image = float(np.linalg.norm(dual_image(self.selection, dual)[0]))
        total = dual_total(self.selection, dual)
        return total / image if image > 0.0 else float("inf")

    def verify(self) -> bool:
        """Whether the proof holds, computed from the data and the multipliers alone."""
        dual = multipliers(self.selection, self.dual)
        return dual_total(self.selection, dual) > 0.0 and self.residual <= ZERO

    def __len__(self) -> int:
        return int(sparse.coo_array(self.dual).nnz)


class InfeasibleSelection(AttoscopeError):
    """No weight makes this selection; `certificate` proves it, `verify()` checks the proof."""

    def __init__(self, certificate: Farkas) -> None:
        self.certificate = certificate
        super().__init__(
            f"no weight selects these keys: {len(certificate)} constraints contradict each other "
            f"(none of norm below {certificate.excluded_norm:.0e}); expected separable keys, so "
            "choose others, drop duplicates with selection.without(selection.duplicates()), or "
            "give a finite C"
        )

    def __reduce__(self) -> tuple[type[InfeasibleSelection], tuple[Farkas]]:
        # Exceptions are pickled by their message; worker processes hand over the proof.
        return type(self), (self.certificate,)

    def verify(self) -> bool:
        """Whether the Farkas certificate holds; independent of the solver."""
        return self.certificate.verify()
