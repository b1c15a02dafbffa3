"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model directory, a hub id or a GGUF file.")
]
# The files that a shell makes of `--text *.txt` behind the first one.
More = Annotated[
    list[str] | None, typer.Argument(metavar="FILE", help="More files for --text.", hidden=True)
]
Text = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE…", help="Text files, one document each; folders; - for stdin."),
]
Images = Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of images.")]
ReadyBatch = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A ready batch: .safetensors, .npz or .pt."),
]
Dtype = Annotated[
    str, typer.Option(help="auto (the checkpoint's own), float32, float16 or bfloat16.")
]
Device = Annotated[str, typer.Option(help="Where the model runs.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
