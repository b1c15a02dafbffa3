"""Many problems side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from joblib import Parallel, delayed
from sklearn.base import clone

from attoscope.errors import AttoscopeError
from attoscope.svm import _checks as checks
from attoscope.svm.estimator import AttentionSVM
from attoscope.svm.infeasible import InfeasibleSelection
from attoscope.svm.selection import Selection, as_selection


def fit_many(
    selections: Sequence[Selection],
    estimator: Any = None,
    *,
    n_jobs: int | None = -1,
) -> list[AttentionSVM | InfeasibleSelection]:
    """Fit one estimator per selection, in parallel; results in the order of `selections`.

    A selection that no weight can make gives its `InfeasibleSelection`, with the proof, in place
    of an estimator. Runs on joblib's current backend: inside
    `joblib.parallel_config(backend="dask")` or `"ray"` the problems go to other machines.

    Args:
        selections: the problems, as the heads of a model.
        estimator: what to clone for each; `AttentionSVM()` when left out.
        n_jobs: workers; -1 for all cores, 1 for none.
    """
    base = AttentionSVM() if estimator is None else estimator
    if not isinstance(base, AttentionSVM):
        raise AttoscopeError(
            f"estimator: got {base!r}; expected an AttentionSVM with the settings to use"
        )
    if not isinstance(selections, Iterable):
        raise AttoscopeError(
            f"selections: got {type(selections).__name__}; expected a list of Selection"
        )
    if n_jobs is not None and not (checks.is_number(n_jobs, whole=True) and n_jobs != 0):
        raise AttoscopeError(
            f"n_jobs: got {n_jobs!r}; expected a number of workers, -1 for all cores, or None"
        )
    problems = [as_selection(selection) for selection in selections]
    # Threads would share the interpreter; processes inherit one BLAS thread each from joblib.
    jobs = (delayed(_fit)(clone(base), selection) for selection in problems)
    return list(Parallel(n_jobs=n_jobs)(jobs))


def _fit(model: AttentionSVM, selection: Selection) -> AttentionSVM | InfeasibleSelection:
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    try:
        with warnings.catch_warnings():
            # `status_` and `gap_` say it for each; seventy warnings would not.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model.fit_selection(selection)
    except InfeasibleSelection as proof:
        return proof
