"""`attoscope predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from attoscope.cli.inputs import gather, made, writable
from attoscope.cli.options import (
    Device,
    Dtype,
    Images,
    Model,
    More,
    ReadyBatch,
    Text,
    TrustRemoteCode,
)
from attoscope.errors import AttoscopeError


def predict(
    model: Model,
    more: More = None,
    text: Text = None,
    images: Images = None,
    batch: ReadyBatch = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line is a document.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write prediction.json there.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="Cut documents to N tokens.")
    ] = 128,
    documents: Annotated[int, typer.Option(metavar="N", help="Read the first N.")] = 4,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
    seed: Annotated[
        int, typer.Option(metavar="N", help="For intervals, shuffles and random maps.")
    ] = 0,
    init: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Predict fresh weights by this initialiser."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Predict from weights what a model does along depth: smoothing, variance, gradients.

    A line for each layer, prediction beside what happened on the data. MODEL may be a config.json
    or a directory with nothing else: then fresh weights are predicted (--init: xavier,
    deepscalelm, admin or deepnet instead of its own). In Python: attoscope.predict(model, data).
    """
    from attoscope.prediction import predict as run

    if more and not text:
        raise AttoscopeError(
            f"got {' '.join(more[:3])} after the model; to read files, name them with --text"
        )
    inputs = gather([*(text or []), *(more or [])], images, batch, lines)
    folder = None if out is None else writable(out)
    found = run(
        model, inputs.data if inputs else None, max_tokens=max_tokens, documents=documents,
        seed=seed, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
        init=init,
    )  # fmt: skip
    written = None if folder is None else found.to_json(made(folder) / "prediction.json")
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False, allow_nan=False))
        return 0
    typer.echo(str(found))
    if written is not None:
        typer.echo(f"Written: {written}")
    return 0
