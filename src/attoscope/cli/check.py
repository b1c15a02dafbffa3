"""`attoscope check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attoscope.cli.inputs import gather


def check(
    model: Annotated[str, typer.Argument(help="A model directory, a hub id or a GGUF file.")],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="", help="More files for --text.", hidden=True)
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(metavar="FILE…", help="Text files to try it on.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of images.")
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A ready batch: .safetensors, .npz or .pt."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's own), float32, float16 or bfloat16.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
) -> int:
    """Try the promises of the trace on your own model; a line for each, exit 1 when one fails.

    In Python: attoscope.check(model, data).
    """
    from attoscope.checking import check as run
    from attoscope.checking import lines

    inputs = gather([*(text or []), *(more or [])], images, batch, lines=False)
    promises = run(model, inputs.data if inputs else None, dtype=dtype, device=device)
    for line in lines(promises):
        typer.echo(line)
    return int(any(promise.held is False for promise in promises))
