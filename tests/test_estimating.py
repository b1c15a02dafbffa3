"""The dry run's peak of tensor bytes, against the peak counted in the real run."""

from __future__ import annotations

import pytest
import torch

from attoscope.errors import AttoscopeError
from attoscope.estimating import estimate
from attoscope.measuring import measure
from attoscope.trace import PeakBytes, Subject, batches
from tests.models import EXAMPLES, make


def decoder(attention: str) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=64, n_layer=4, n_head=4, n_positions=512,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config._attn_implementation = attention
    return Subject.of(GPT2LMHeadModel(config).eval())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("length", [100, 512])
def test_expected_peak_is_within_half_of_the_counted_one(attention: str, length: int) -> None:
    subject = decoder(attention)
    ids = torch.randint(3, 64, (4, length), generator=torch.Generator().manual_seed(0))
    expected = estimate(subject, {"input_ids": ids}, batch_size=4)
    (batch,) = batches(subject, {"input_ids": ids}, batch_size=4)
    with PeakBytes() as counter:
        measure(subject, [batch], null=False)
    assert counter.peak / 1.5 <= expected.peak_bytes <= counter.peak * 1.5
    assert (expected.documents, expected.tokens) == (4, 4 * length)
    assert expected.parameter_bytes == 4 * expected.parameters


def test_images_and_floats_are_measured_as_they_are() -> None:
    for name in ("vit", "attention"):
        subject, batch = make(name)
        assert estimate(subject, batch).peak_bytes > 0
    assert "vit" in EXAMPLES


def test_nothing_to_estimate() -> None:
    subject, _ = make("bert")
    with pytest.raises(AttoscopeError, match="no text or image was given"):
        estimate(subject, [])


def test_peak_bytes_counts_what_is_alive() -> None:
    before = torch.ones(1000)
    with PeakBytes() as counter:
        first = before + 1  # 4,000 bytes
        view = first.view(10, 100)
        del first
        second = torch.empty(500)  # 2,000 more while the view keeps the first alive
        del view, second
        torch.zeros(100)
    assert counter.peak == 6000
    assert counter.current <= 400
