"""`attoscope svm`."""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attoscope.errors import AttoscopeError

if TYPE_CHECKING:
    from attoscope.svm import AttentionSVM, InfeasibleSelection

NEEDED, MAY = ("keys", "queries", "selected"), ("sequence", "allowed", "required", "bias")


def svm(
    file: Annotated[Path, typer.Argument(metavar="FILE.npz", help="keys, queries, selected.")],
    norm: Annotated[
        str,
        typer.Option(help="frobenius, nuclear, spectral, max, l1, schatten:P or entrywise:P."),
    ] = "frobenius",
    price: Annotated[
        float | None,
        typer.Option("--C", metavar="C", help="Soft margin: price of a shortfall."),
    ] = None,
    max_rank: Annotated[
        int | None, typer.Option(metavar="N", help="Bound on the rank.")
    ] = None,
    tol: Annotated[float, typer.Option(help="Certified relative gap to stop at.")] = 1e-6,
    max_iter: Annotated[int, typer.Option(metavar="N", help="Passes at most.")] = 20_000,
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop with the best so far.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write weight and multipliers (.npz).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the certificate as JSON.")
    ] = False,
) -> int:
    """Find the smallest weight that makes each query choose its keys, and certify it.

    Reads arrays: keys (sequence, token, width), queries (query, width), selected (query, token)
    booleans or (query,) positions; also sequence, allowed, required and bias where they are
    there. Exit code 1 when no weight selects (with a proof) or a limit was reached.
    In Python: attoscope.svm.AttentionSVM(norm).fit(keys, queries, selected).
    """
    from attoscope.svm import AttentionSVM, InfeasibleSelection

    arrays = _arrays(file)
    target = None if out is None else _target(out, file)
    model = AttentionSVM(
        _norm(norm), C=float("inf") if price is None else price, max_rank=max_rank, tol=tol,
        max_iter=max_iter, time_limit=time_limit,
    )  # fmt: skip
    try:
        with warnings.catch_warnings():
            # The status line says the same.
            warnings.simplefilter("ignore")
            model.fit(**arrays)
    except InfeasibleSelection as proof:
        _say(_infeasible(proof), as_json)
        if target is not None:
            _write(target, {"farkas": proof.certificate.dual.toarray()})
        return 1
    _say(_summary(model), as_json)
    if target is not None:
        _write(target, {
            "weight": model.weight_, "dual": model.dual_.toarray(), "support": model.support_,
            "lower_bound": model.lower_bound_, "objective": model.objective_,
        })  # fmt: skip
    asked_for = max_rank is not None and model.gap_ < float("inf")
    return int(not model.status_.startswith("optimal") and not asked_for)


def _arrays(file: Path) -> dict[str, Any]:
    import numpy as np

    if not file.is_file():
        raise AttoscopeError(f"{file}: no such file; expected an .npz file with {_names()}")
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except Exception as error:  # a broken archive fails in a dozen ways, none of them ours
        raise AttoscopeError(
            f"{file}: not an .npz file of plain arrays ({type(error).__name__}); write one with "
            "numpy.savez(file, keys=…, queries=…, selected=…)"
        ) from None
    missing = [name for name in NEEDED if name not in arrays]
    unknown = [name for name in arrays if name not in NEEDED + MAY]
    if missing or unknown:
        raise AttoscopeError(
            f"{file}: got {', '.join(arrays) or 'nothing'}; expected {_names()}, and perhaps "
            f"{', '.join(MAY)}"
        )
    return arrays


def _names() -> str:
    return ", ".join(NEEDED)


def _norm(name: str) -> Any:
    from attoscope.svm import Entrywise, Schatten

    kind, _, power = name.partition(":")
    kinds = {"schatten": Schatten, "entrywise": Entrywise}
    if not power:
        return name
    try:
        return kinds[kind](float(power))
    except (KeyError, ValueError) as error:
        if isinstance(error, AttoscopeError):
            raise
        raise AttoscopeError(
            f"--norm: got {name!r}; expected a name, schatten:P or entrywise:P with a number P"
        ) from None


def _target(out: Path, file: Path) -> Path:
    """A path that can be written, found out before anything is solved."""
    target = out if out.suffix == ".npz" else out.with_name(out.name + ".npz")
    for path in (out, target):
        if path.exists() and not path.is_file():
            raise AttoscopeError(
                f"--out: got {path}, no regular file; expected one, or a new one"
            )
    if not target.parent.is_dir():
        raise AttoscopeError(f"--out: got {target}; expected a file in a folder that exists")
    if target.exists() and target.samefile(file):
        raise AttoscopeError(f"--out: got {target}, the problem itself; expected another file")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except OSError as error:
        raise AttoscopeError(
            f"--out: {target.parent} cannot be written to ({error.strerror}); choose another "
            "folder"
        ) from None


def _write(target: Path, arrays: dict[str, Any]) -> None:
    import numpy as np

    from attoscope.report.files import write_whole

    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_whole(target, content.getvalue())


def _summary(model: AttentionSVM) -> dict[str, Any]:
    c = model.certificate_
    return {
        "status": model.status_, "norm": c.norm, "objective": c.upper, "lower_bound": c.lower,
        "gap": c.gap, "margin": c.margin, "rank": model.rank_, "support": len(model.support_),
        "constraints": model.selection_.constraint_count, "passes": model.n_iter_,
    }  # fmt: skip


def _infeasible(proof: InfeasibleSelection) -> dict[str, Any]:
    farkas = proof.certificate
    return {
        "status": "infeasible: " + str(proof), "constraints": len(farkas),
        "residual": farkas.residual, "verified": proof.verify(),
    }  # fmt: skip


def _say(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        finite = {
            k: None if isinstance(v, float) and v in (float("inf"), float("-inf")) else v
            for k, v in summary.items()
        }
        typer.echo(json.dumps(finite))
        return
    wide = max(map(len, summary))
    for name, value in summary.items():
        shown = f"{value:.10g}" if isinstance(value, float) else value
        typer.echo(f"{name.replace('_', ' '):<{wide}}  {shown}")
