"""The promises hold on every architecture, and a broken promise is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attoscope.checking import check, lines
from attoscope.trace import Subject
from tests.models import EXAMPLES, Nano, make

FUSED = ("encoder", "encoder_time_first", "attention_fused")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_promise_holds(name: str) -> None:
    subject, batch = make(name)
    promises = check(subject, batch if name in FUSED or "floats" in EXAMPLES[name].reads else
                     batch.inputs)  # fmt: skip
    failed = [p for p in promises if p.held is False]
    assert not failed
    padded = [p.held for p in promises if p.name.startswith("padding")]
    masked = isinstance(batch.inputs, dict) and "input_ids" in batch.inputs
    assert padded == ([True, True] if masked else [None, None])


def test_half_precision() -> None:
    subject, batch = make("llama")
    subject.model.to(torch.bfloat16)
    assert not [p for p in check(subject, batch.inputs) if p.held is False]


def test_a_model_that_attends_to_padding_is_found_out() -> None:
    """The control: this module takes a mask and does not use it."""

    class Careless(Nano):
        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor
        ) -> torch.Tensor:
            del attention_mask
            return self.head(self.ln_f(self.read(self.wte(input_ids))))

        def read(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, x, x, need_weights=False)[0] + x
            return x

        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList()
            self.blocks = nn.ModuleList(
                nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2)
            )

    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0]])
    promises = {
        p.name: p
        for p in check(
            Subject.of(Careless().eval()),
            {"input_ids": ids, "attention_mask": (ids > 0).long()},
        )
    }
    assert promises["padding on the right"].held is False
    assert promises["outputs unchanged"].held is True


def test_a_model_with_dropout_that_never_sleeps_is_found_out() -> None:
    class Noisy(Nano):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.wte(input_ids)
            x = x + torch.rand(x.shape, generator=self.noise)
            for block in self.h:
                x = block(x)
            return x

        noise = torch.Generator()

    promises = {
        p.name: p
        for p in check(Subject.of(Noisy().eval()), {"input_ids": torch.ones(2, 6).long()})
    }
    assert promises["repeatable"].held is False
    assert promises["outputs unchanged"].held is False


def test_lines_are_one_a_promise() -> None:
    subject, batch = make("gpt_oss")
    promises = check(subject, batch.inputs)
    written = list(lines(promises))
    assert len(written) == len(promises)
    assert any("sink that takes up to" in line for line in written)
    assert any("4 heads on 2 key heads" in line for line in written)
