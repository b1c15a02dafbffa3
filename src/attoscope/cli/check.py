"""`attoscope check`."""

from __future__ import annotations

import typer

from attoscope.cli.inputs import gather
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


def check(
    model: Model,
    more: More = None,
    text: Text = None,
    images: Images = None,
    batch: ReadyBatch = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """Try the promises of the trace on your own model; a line for each, exit 1 when one fails.

    In Python: attoscope.check(model, data).
    """
    from attoscope.checking import check as run
    from attoscope.checking import lines

    inputs = gather([*(text or []), *(more or [])], images, batch, lines=False)
    promises = run(
        model, inputs.data if inputs else None, dtype=dtype, device=device,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    for line in lines(promises):
        typer.echo(line)
    return int(any(promise.held is False for promise in promises))
