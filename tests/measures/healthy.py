"""A model of plain numbers in which nothing is wrong, for tests that break it."""

from __future__ import annotations

import torch

from attoscope.measures import Selection, Smoothness, Stream, findings_of
from tests.measures.build import batch, call, layer

LAYERS, HEADS, TOKENS, WIDTH = 6, 4, 24, 32


class Model:
    """Six layers of numbers such as a working model has; tests break them."""

    def __init__(self):
        torch.manual_seed(0)
        self.scores = 1.5 * torch.randn(LAYERS, 2, HEADS, TOKENS, TOKENS)
        self.output = torch.randn(LAYERS, 2, TOKENS, HEADS, 8)
        self.weight = 0.3 * torch.randn(LAYERS, HEADS, 8, WIDTH)
        x = torch.randn(2, TOKENS, WIDTH)
        self.stream = [x]
        for _ in range(LAYERS):
            x = x + 0.5 * torch.randn_like(x)
            self.stream.append(x)

    def findings(self):
        measures = [Selection(), Smoothness(), Stream()]
        for i in range(LAYERS):
            one = call(self.scores[i], index=i)
            one.output, one.output_weight = self.output[i], self.weight[i]
            before, after = self.stream[i], self.stream[i + 1]
            seen = layer(after, before=before, calls=[one], index=i)
            for measure in measures:
                measure.update(seen, batch(0, 1))
        return findings_of(measures, [r for m in measures for r in m.read()])


def only(found):
    assert len(found) == 1, [f.id for f in found]
    return found[0]


def sites(*layers):
    return tuple(f"encoder.{i}" for i in layers)
