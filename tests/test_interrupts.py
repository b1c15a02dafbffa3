"""An interrupted diagnosis: what was finished is kept, and nothing half-done is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attoscope import diagnosing
from attoscope.diagnosing import diagnose
from attoscope.trace import Subject
from tests.test_diagnosing import TEXTS, same


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Subject:
    return Subject.load(minilm)


def test_an_interrupt_keeps_what_was_finished(encoder: Subject) -> None:
    def texts() -> Iterator[str]:
        yield from TEXTS[:2]
        raise KeyboardInterrupt

    found = diagnose(encoder, texts(), batch_size=1, keep_finished=True)
    assert found.data["interrupted"] and found.data["documents"] == 2
    with pytest.raises(KeyboardInterrupt):
        diagnose(encoder, texts(), batch_size=1)


def test_an_interrupt_inside_a_batch_leaves_no_trace_of_it(encoder: Subject) -> None:
    """Layers that had already run on the unfinished batch must not count it."""
    passes = 0

    def interrupt(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == watched + 1:
            raise KeyboardInterrupt

    expected = diagnose(encoder, TEXTS[:2], batch_size=2, null=False)
    layer = encoder.model.encoder.layer[3]
    # How often that layer runs until one batch is finished; the next time is inside the second.
    watched = 10**9
    handle = layer.register_forward_pre_hook(interrupt)
    ends: list[int] = []  # later passes, for close-ups and predictions, are after the batches
    advance = lambda _: ends.append(passes)  # noqa: E731
    diagnose(encoder, TEXTS[:2], batch_size=2, null=False, progress=advance)
    (watched,), passes = ends, 0
    try:
        found = diagnose(encoder, TEXTS, batch_size=2, null=False, keep_finished=True)
    finally:
        handle.remove()
    assert found.data["interrupted"] and found.data["documents"] == 2
    same(expected, found)


@pytest.mark.parametrize("stage", ["smoothing_readings", "signal_readings"])
def test_an_interrupt_after_the_documents_leaves_out_what_weights_foretell(
    encoder: Subject, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnosing, stage, interrupt)
    found = diagnose(encoder, TEXTS[:2], null=False, keep_finished=True)
    assert found.data["interrupted"] and found.data["documents"] == 2
    names = {reading.name for reading in found.reading_list}
    assert "cosine" in names and "token_correlation" not in names
    assert ("smoothing_margin" in names) is (stage == "signal_readings")
    with pytest.raises(KeyboardInterrupt):
        diagnose(encoder, TEXTS[:2], null=False)
