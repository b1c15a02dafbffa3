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
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Predict from weights and attention maps whether tokens become alike with depth.

    A line for each layer: what its spectra say, and what attention and the rest of the block did
    on the data. In Python: attoscope.predict(model, data).
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
    )  # fmt: skip
    written = None if folder is None else found.to_json(made(folder) / "prediction.json")
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False, allow_nan=False))
        return 0
    typer.echo(str(found))
    if written is not None:
        typer.echo(f"Written: {written}")
    return 0
