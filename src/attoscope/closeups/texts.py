"""What a close-up shows of a document: words, patches of an image, or bare positions."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from attoscope.closeups.rows import reads_another
from attoscope.diagnosis import Text
from attoscope.measuring import Measurement
from attoscope.trace import AttentionCall, Batch, Layer, Subject
from attoscope.words import pieces

# A class token, a distillation token, registers: no model puts more before its patches.
MOST_BEFORE = 8


class Texts:
    """The tokens of each document as each stack reads them; the same one is made once."""

    def __init__(self, subject: Subject, measurement: Measurement, batch: Batch) -> None:
        self.subject, self.measurement, self.batch = subject, measurement, batch
        self._made: dict[tuple[str, int, int, int], Text] = {}

    def of_call(
        self, call: AttentionCall, layer: Layer, batch: Batch, sequence: int
    ) -> tuple[Text, Text | None]:
        """What the queries of a call are, and its keys where they are others."""
        amount, _, queries, keys = call.shape
        text = self.of(layer.stack, batch, sequence, amount, queries)
        if not reads_another(call):
            return text, None
        return text, self.of("encoder", batch, sequence, amount, keys)

    def of(self, stack: str, batch: Batch, sequence: int, amount: int, tokens: int) -> Text:
        """The text of one of a layer's `amount` sequences, of `tokens` tokens in that stack."""
        document = batch.documents[sequence]
        parts = max(1, amount // len(self.batch))
        key = (stack, document, sequence % parts, tokens)
        if key not in self._made:
            self._made[key] = self._make(stack, document, tokens, sequence % parts, parts)
        return self._made[key]

    def _make(self, stack: str, document: int, tokens: int, part: int, parts: int) -> Text:
        if parts == 1:
            words = self._words(stack, document, tokens)
            if words is not None:
                return Text(document, "words", words)
            grid = self._grid(tokens)
            if grid is not None:
                return Text(document, "patches", _patches(grid, tokens), grid)
        return Text(document, "positions", tuple(map(str, range(tokens))), None, part)

    def _words(self, stack: str, document: int, tokens: int) -> tuple[str, ...] | None:
        valid, inputs = self.batch.valid, self.batch.inputs
        row = self.batch.documents.index(document)
        read = inputs.get("decoder_input_ids") if isinstance(inputs, dict) else None
        readers = self.measurement.readers
        several = isinstance(read, Tensor) and "decoder" in stack and stack not in readers
        if several:
            assert isinstance(read, Tensor)
            return (
                pieces(self.subject.tokenizer, read[row]) if read.shape[1] == tokens else None
            )
        ids = self.measurement.ids.get(document)
        if ids is None or stack not in readers or valid is None or valid.shape[1] != tokens:
            return None
        return pieces(self.subject.tokenizer, ids[: int(valid[row].sum())])

    def _grid(self, tokens: int) -> tuple[int, int] | None:
        """Rows and columns of the patches of an image, when `tokens` can be those."""
        inputs = self.batch.inputs
        pixels = inputs.get("pixel_values") if isinstance(inputs, dict) else inputs
        if not isinstance(pixels, Tensor) or pixels.dim() != 4:
            return None
        size = _patch_size(self.subject.config)
        if size is not None:
            rows, columns = pixels.shape[2] // size[0], pixels.shape[3] // size[1]
            return (rows, columns) if 0 <= tokens - rows * columns <= MOST_BEFORE else None
        for before in (0, 1):
            side = math.isqrt(max(0, tokens - before))
            if side > 1 and side * side == tokens - before:
                return side, side
        return None


def _patch_size(config: Any) -> tuple[int, int] | None:
    size = getattr(getattr(config, "vision_config", config), "patch_size", None)
    if isinstance(size, int) and size > 0:
        return size, size
    if isinstance(size, tuple | list) and len(size) == 2:
        return int(size[0]), int(size[1])
    return None


def _patches(grid: tuple[int, int], tokens: int) -> tuple[str, ...]:
    """ "[CLS]", then "row 1, column 1" and so on; what else stands before is numbered."""
    before = tokens - grid[0] * grid[1]
    extra = ["[CLS]", *(f"[extra {i}]" for i in range(1, before))][:before]
    spots = (
        f"row {r}, column {c}" for r in range(1, grid[0] + 1) for c in range(1, grid[1] + 1)
    )
    return (*extra, *spots)
