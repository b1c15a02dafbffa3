"""How near a trained weight is to the max-margin one, from training alone: no solver is run."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from attoscope.svm import Certificate, Norm, Selection, certify


def training_certificate(
    selection: Selection,
    weight: Float[np.ndarray, "key_width query_width"],
    coefficients: Any,
    norm: str | Norm = "frobenius",
) -> Certificate:
    """Bounds on the attention SVM's optimum from a trained weight and its summed gradients.

    Minus the gradient is `sum c_it x_it z_i^T` with `sum_t c_it = 0`, hence `sum mu_it A_it` with
    `mu_it = -c_it` for every token t but the selected one: multipliers of the SVM. Summed over
    steps they approach the optimal ones. `upper = ||W|| / least margin` (infinite while the weight
    does not separate), `lower = sum(mu) / ||sum mu A||_dual`; negative multipliers count as 0.

    Args:
        selection: what the weight selects.
        weight: the trained weight.
        coefficients: (sample, token), as `Gradient.coefficients`, at one step or summed.
        norm: whose optimum is bounded: "frobenius" for W, "nuclear" for factors.

    Source: weak duality; arXiv 2308.16898 for the problem.
    """
    return certify(selection, weight, -np.asarray(coefficients), norm)
