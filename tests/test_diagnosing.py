"""A diagnosis as a whole: determinism, padding, half precision, and the model handed back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import attoscope
from attoscope.diagnosing import diagnose
from attoscope.diagnosis import Diagnosis
from attoscope.errors import AttoscopeError
from attoscope.sample import SAMPLE_TEXTS
from attoscope.trace import Subject, batches
from tests.models import EXAMPLES, make

TEXTS = (
    "The captain told the crew that the storm would pass, but the crew did not believe it.",
    "Bread needs flour, water, salt and time.",
    "Short.",
    "To sort a list, split it in two, sort each half, and merge the two halves into one list.",
)


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Subject:
    return Subject.load(minilm)


@pytest.fixture(scope="module")
def reading(encoder: Subject) -> Diagnosis:
    return diagnose(encoder, TEXTS)


def same(first: Diagnosis, second: Diagnosis, tolerance: float = 0.0) -> None:
    """All readings agree, relative to their size."""
    assert set(first.readings) == set(second.readings)
    for name in first.readings:
        if name.endswith(("_low", "_high", "_null", "_row_error")):
            continue
        a, b = first.readings[name].values, second.readings[name].values
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


def test_it_reads_every_layer_and_head(reading: Diagnosis) -> None:
    entropy = reading.readings["normalised_entropy"]
    assert entropy.dims == ("site", "head") and entropy.shape == (6, 12)
    assert reading.readings["cosine"].sizes["point"] == 7
    assert np.isfinite(entropy).all() and ((entropy > 0) & (entropy < 1)).all()
    for end in ("low", "high", "null"):
        assert f"normalised_entropy_{end}" in reading.readings
    low, high = (reading.readings[f"normalised_entropy_{end}"] for end in ("low", "high"))
    assert (low <= entropy + 1e-9).all() and (entropy <= high + 1e-9).all()


def test_its_facts(reading: Diagnosis) -> None:
    assert reading.model["kind"] == "encoder"
    assert reading.model["parameters"] == 22_713_216
    assert reading.model["unchanged"] == {
        "equal": True, "max_difference": 0.0,
        "sentence": "outputs unchanged while watched (bit for bit)",
    }  # fmt: skip
    assert (reading.data["documents"], reading.data["truncated_documents"]) == (4, 0)
    assert not [f for f in reading.findings if f.severity != "note"]


def test_the_same_seed_gives_the_same_report(encoder: Subject, reading: Diagnosis) -> None:
    from attoscope.report.json import to_dict

    first, second = to_dict(reading), to_dict(diagnose(encoder, TEXTS))
    first.pop("timings"), second.pop("timings")
    assert json.dumps(first) == json.dumps(second)


def test_batches_padding_and_order_do_not_matter(encoder: Subject, reading: Diagnosis) -> None:
    same(reading, diagnose(encoder, TEXTS, batch_size=1), 1e-5)
    same(reading, diagnose(encoder, TEXTS[::-1], batch_size=3), 1e-5)


def test_left_padding_does_not_matter(encoder: Subject, reading: Diagnosis) -> None:
    (batch,) = batches(encoder, TEXTS)
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    shifts = (mask.shape[1] - mask.sum(1)).tolist()
    left = {
        name: torch.stack([row.roll(by) for row, by in zip(value, shifts, strict=True)])
        for name, value in (("input_ids", ids), ("attention_mask", mask))
    }
    assert left["attention_mask"][2, 0] == 0
    same(reading, diagnose(encoder, left), 1e-5)


def test_left_padding_without_help_would_matter(encoder: Subject) -> None:
    """The control: the model itself, fed the left-padded batch, says something else."""
    (batch,) = batches(encoder, TEXTS[2:])
    ids, mask = batch.inputs["input_ids"][:1], batch.inputs["attention_mask"][:1]
    shift = int(mask.shape[1] - mask.sum())
    with torch.no_grad():
        plain = encoder.model(ids, attention_mask=mask).last_hidden_state[0, 0]
        moved = encoder.model(
            ids.roll(shift, 1), attention_mask=mask.roll(shift, 1)
        ).last_hidden_state[0, shift]
    assert (plain - moved).abs().max() > 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.02), ("bfloat16", 0.12)])
def test_half_precision_agrees(
    minilm: Path, reading: Diagnosis, dtype: str, tolerance: float
) -> None:
    half = diagnose(minilm, TEXTS, dtype=dtype)
    assert half.model["dtype"] == dtype
    for name in ("normalised_entropy", "first_share", "cosine", "effective_rank", "norm"):
        a, b = reading.readings[name].values, half.readings[name].values
        assert np.abs(a - b).max() <= tolerance * max(1.0, np.abs(a).max()), name


def test_all_rows_and_a_sample_agree_within_the_stated_error(encoder: Subject) -> None:
    long = " ".join(SAMPLE_TEXTS)
    exact = diagnose(encoder, [long], rows=None, max_tokens=256, null=False).readings
    some = diagnose(encoder, [long], rows=64, max_tokens=256, null=False).readings
    error = some["normalised_entropy_row_error"].values
    gap = np.abs(exact["normalised_entropy"].values - some["normalised_entropy"].values)
    assert (error > 0).all()
    assert np.mean(gap <= 2.5 * error) > 0.9
    assert np.nanmax(exact["normalised_entropy_row_error"].values) == 0


def test_chosen_layers_only(encoder: Subject) -> None:
    some = diagnose(encoder, TEXTS[:2], layers=(2, 4), null=False)
    assert list(some.readings["site"].values) == ["encoder.2", "encoder.3"]
    with pytest.raises(
        AttoscopeError, match="layers: got 9:12, but the model's layers are 0 to 5"
    ):
        diagnose(encoder, TEXTS[:1], layers=(9, 12))
    with pytest.raises(AttoscopeError, match="FIRST < END"):
        diagnose(encoder, TEXTS[:1], layers=(3, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rows": 0}, "rows: got 0"), ({"batch_size": 0}, "batch_size: got 0")],
)
def test_bad_options(encoder: Subject, options: dict[str, int], message: str) -> None:
    with pytest.raises(AttoscopeError, match=message):
        diagnose(encoder, TEXTS[:1], **options)  # type: ignore[arg-type]


def test_one_token_is_a_diagnosis_with_reasons() -> None:
    subject, _ = make("gpt2")
    one = diagnose(subject, {"input_ids": torch.tensor([[5]])})
    entropy = next(r for r in one.reading_list if r.name == "normalised_entropy")
    assert np.isnan(entropy.values).all() and entropy.reason
    assert not [f for f in one.findings if f.severity != "note"]


def test_weights_that_are_not_numbers_are_a_finding() -> None:
    subject, batch = make("gpt2")
    with torch.no_grad():
        subject.model.transformer.h[1].mlp.c_fc.weight[0, 0] = float("nan")
    found = diagnose(subject, batch)
    worst = found.findings[0]
    assert (worst.id, worst.severity) == ("non_finite", "severe")
    assert worst.sites[0] == "decoder.1"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_architecture_gives_a_report(name: str, tmp_path: Path) -> None:
    subject, batch = make(name)
    found = diagnose(subject, batch)
    report = json.loads(found.to_json(tmp_path / "report.json").read_text())
    assert report["readings"]["normalised_entropy"]["values"]
    if name in ("gpt_oss", "t5", "vit"):
        assert found.to_html(tmp_path / "report.html").stat().st_size > 10_000
    assert found.model["layers"] == sum(n for _, n in EXAMPLES[name].stacks)
    assert not [f for f in found.findings if f.severity == "severe"]


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
    diagnose(encoder, TEXTS[:2], batch_size=2, null=False)
    watched, passes = passes - 1, 0  # the close-ups run it once more, after the batches
    try:
        found = diagnose(encoder, TEXTS, batch_size=2, null=False, keep_finished=True)
    finally:
        handle.remove()
    assert found.data["interrupted"] and found.data["documents"] == 2
    same(expected, found)


def test_without_data_the_sample_is_read(encoder: Subject) -> None:
    found = diagnose(encoder, max_tokens=16, null=False)
    assert any("built-in sample" in note for note in found.data["notes"])
    subject, _ = make("bert")
    with pytest.raises(AttoscopeError, match="no data was given"):
        diagnose(subject)


def test_close_ups_show_real_words(reading: Diagnosis) -> None:
    assert reading.closeups
    for one in reading.closeups:
        assert len(one.tokens) == len(one.weights)
        assert abs(sum(one.weights) - 1) < 1e-4
        assert "captain" in one.tokens


def test_words_do_not_hang_on_what_was_read_first(minilm: Path) -> None:
    """The survey of the layers is kept; the text that it was made on is another one."""
    subject = Subject.load(minilm)
    diagnose(subject, "Short.", null=False)
    assert diagnose(subject, TEXTS, null=False).closeups


def test_evidence_is_in_words(encoder: Subject) -> None:
    from attoscope.ward import broken

    (batch,) = batches(encoder, TEXTS)
    with broken(encoder, batch, "saturated attention", (3,)):
        found = diagnose(encoder, TEXTS)
    finding = next(f for f in found.findings if f.id == "saturated_attention")
    assert finding.evidence
    assert all(e.token and e.text for e in finding.evidence)


def test_sinks_are_shown_by_rows_that_rest_on_them(reading: Diagnosis) -> None:
    finding = next(f for f in reading.findings if f.id == "attention_sink")
    assert finding.evidence
    for one in finding.evidence:
        assert (one.chosen_position, one.chosen_token) == (0, "[CLS]")
        assert one.value is not None and one.value > 0.3


def test_a_second_tower_has_no_words_of_the_text() -> None:
    """CLIP: the vision tower's tokens are patches, whatever the text says."""
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2,
            "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64,
            "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 48, "image_size": 8, "patch_size": 2}  # fmt: skip
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).eval()
    data = {
        "pixel_values": torch.randn(2, 3, 8, 8),
        "input_ids": torch.randint(3, 60, (2, 11)),
    }
    found = diagnose(model, data)
    towers = {site.rpartition(".")[0] for site in found.readings["site"].values}
    assert len(towers) == 2
    assert {one.site.split("/")[0] for one in found.closeups} <= {"text_model"}
    for finding in found.findings:
        for evidence in finding.evidence:
            assert evidence.site.startswith("text_model") or evidence.token is None


@pytest.mark.parametrize(
    "options",
    [{"rows": "all"}, {"rows": 2.5}, {"seed": -1}, {"seed": None}, {"batch_size": 1.5}],
)
def test_options_of_the_wrong_kind(encoder: Subject, options: dict[str, object]) -> None:
    from jaxtyping import TypeCheckError

    # Shape checking, on in tests only, may be first to object.
    with pytest.raises((AttoscopeError, TypeCheckError)):
        diagnose(encoder, TEXTS[:1], **options)  # type: ignore[arg-type]


def test_public_names() -> None:
    assert attoscope.diagnose is diagnose
    assert attoscope.Diagnosis is Diagnosis
