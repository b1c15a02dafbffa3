"""A map with many cells as a picture: one palette PNG, light and dark."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

MOST_CELLS = 256


def down_sample(values: NDArray[np.float64], most: int = MOST_CELLS) -> NDArray[np.float64]:
    """Means of equal blocks so that neither side exceeds `most`; NaN cells are left out."""
    for axis in (0, 1):
        size = values.shape[axis]
        if size > most:
            edges = np.linspace(0, size, most + 1).astype(int)
            blocks = np.split(values, edges[1:-1], axis=axis)
            values = np.stack([_mean(block, axis) for block in blocks], axis=axis)
    return values


def _mean(block: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    finite = np.isfinite(block)
    amount = finite.sum(axis=axis)
    total = np.where(finite, block, 0.0).sum(axis=axis)
    mean: NDArray[np.float64] = np.where(amount > 0, total / np.maximum(amount, 1), np.nan)
    return mean


def png(steps: NDArray[np.int64], colours: tuple[str, ...]) -> str:
    """A data address of a PNG: `steps (row, column)` index `colours`, −1 is transparent."""
    height, width = steps.shape
    index = np.where(steps < 0, len(colours), steps).astype(np.uint8)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), index], axis=1)
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in (*colours, "#000000"))
    alpha = b"\xff" * len(colours) + b"\x00"
    data = (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        + _chunk(b"PLTE", palette)
        + _chunk(b"tRNS", alpha)
        + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + _chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
