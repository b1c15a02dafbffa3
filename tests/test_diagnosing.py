"""A diagnosis as a whole: determinism, padding, half precision, and the model handed back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import attoscope
from attoscope.diagnosing import diagnose
from attoscope.diagnosis import Closeup, Diagnosis
from attoscope.errors import AttoscopeError
from attoscope.sample import SAMPLE_TEXTS
from attoscope.trace import Subject, batches
from attoscope.ward import FAULTS, broken
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
    assert reading.data["loss"] == (
        "none: the model gives no logits of tokens, and the batch holds no labels"
    )
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


def test_without_data_the_sample_is_read(encoder: Subject) -> None:
    found = diagnose(encoder, max_tokens=16, null=False)
    assert any("built-in sample" in note for note in found.data["notes"])
    subject, _ = make("bert")
    with pytest.raises(AttoscopeError, match="no data was given"):
        diagnose(subject)


def own_rows(found: Diagnosis) -> dict[tuple[str, int | None], Closeup]:
    """The row that every head has."""
    return {(c.site, c.head): c for c in found.closeups if c.finding is None and not c.why}


def test_every_head_has_a_row_of_real_words(reading: Diagnosis) -> None:
    own = own_rows(reading)
    assert set(own) == {(f"encoder.{i}", h) for i in range(6) for h in range(12)}
    telling = [c for c in reading.closeups if c.finding is None and c.why]
    assert len(telling) == 3 and all(c.why.startswith("At “") for c in telling)
    for one in reading.closeups:
        assert one.text.kind == "words" and one.text.tokens[0] == "[CLS]"
        assert one.text.document < 3
        assert one.rest is not None
        assert abs(sum(m.value for m in one.marks) + one.rest - 1) < 1e-5
    assert any("captain" in one.text.tokens for one in reading.closeups)


def test_rows_are_those_of_the_model(reading: Diagnosis, minilm: Path) -> None:
    """Weights that transformers itself gives; margins are the logarithms of their ratios."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(minilm, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    weights = []
    for text in TEXTS[:3]:
        with torch.no_grad():
            output = model(**tokenizer(text, return_tensors="pt"), output_attentions=True)
        weights.append([layer[0] for layer in output.attentions])
    for (site, head), one in own_rows(reading).items():
        layer = weights[one.text.document][int(site.rpartition(".")[2])]
        row = layer[head, one.query]
        best = row.topk(4)
        assert [m.position for m in one.marks] == best.indices.tolist(), (site, head)
        np.testing.assert_allclose([m.value for m in one.marks], best.values, atol=1e-5)
        expected = (best.values[0].log() - best.values.log()).numpy()
        np.testing.assert_allclose([m.margin for m in one.marks], expected, atol=1e-3)


def test_a_heads_row_is_its_most_decided_choice_of_a_distant_word(
    reading: Diagnosis, minilm: Path
) -> None:
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(minilm, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    most: dict[tuple[str, int], float] = {}
    for text in TEXTS[:3]:
        with torch.no_grad():
            output = model(**tokenizer(text, return_tensors="pt"), output_attentions=True)
        for i, layer in enumerate(output.attentions):
            words = layer[0, :, 1:-1, 1:-1]
            steps = torch.arange(words.shape[-1])
            words = words * ((steps[:, None] - steps).abs() > 1)
            for head, value in enumerate(words.flatten(1).amax(1).tolist()):
                spot = (f"encoder.{i}", head)
                most[spot] = max(most.get(spot, 0.0), value)
    for spot, one in own_rows(reading).items():
        assert one.query is not None
        last = len(one.text.tokens) - 1
        distant = [
            m.value for m in one.marks
            if abs(m.position - one.query) > 1 and 0 < m.position < last
        ]  # fmt: skip
        assert max(distant) == pytest.approx(most[spot[0], spot[1] or 0], abs=1e-5), spot


def test_the_rows_of_a_sink_rest_on_the_first_token(reading: Diagnosis) -> None:
    number = next(i for i, f in enumerate(reading.findings) if f.id == "attention_sink")
    rows = [c for c in reading.closeups if c.finding == number]
    assert len(rows) == 3
    for one in rows:
        assert (one.site, one.head) in reading.findings[number].heads
        assert one.marks[0].position == 0 and "first token" in one.why
        assert one.marks[0].value > own_rows(reading)[one.site, one.head].marks[0].value - 1e-6


def test_images_show_patches(vit_digits: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (4, 8, 8, 3), dtype=np.uint8)
    found = diagnose(str(vit_digits), list(images), null=False)
    assert len(own_rows(found)) == 24
    text = found.closeups[0].text
    assert (text.kind, text.grid, len(text.tokens)) == ("patches", (4, 4), 17)
    assert text.tokens[:2] == ("[CLS]", "row 1, column 1")
    assert text.tokens[-1] == "row 4, column 4"


def test_tokens_of_unknown_meaning_show_their_positions() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    found = diagnose(model, torch.randn(3, 7, 16), null=False)
    assert len(own_rows(found)) == 4
    for one in found.closeups:
        assert (one.text.kind, one.text.tokens) == ("positions", tuple("0123456"))


@pytest.mark.parametrize("fault", list(FAULTS))
def test_every_finding_has_rows_or_places_that_show_it(encoder: Subject, fault: str) -> None:
    (batch,) = batches(encoder, TEXTS)
    with broken(encoder, batch, fault, tuple(range(3, 3 + FAULTS[fault].least))):
        found = diagnose(encoder, TEXTS, null=False)
    assert any(f.id == FAULTS[fault].finding for f in found.findings)
    for number, finding in enumerate(found.findings):
        shown = [c for c in found.closeups if c.finding == number]
        assert shown, finding.id
        for one in shown:
            assert one.why and one.site in finding.sites
            if finding.heads:
                assert (one.site, one.head) in finding.heads and one.query is not None
            else:
                assert one.head is None and one.query is None and one.rest is None


def test_a_massive_channel_is_shown_by_its_tokens(encoder: Subject) -> None:
    (batch,) = batches(encoder, TEXTS)
    with broken(encoder, batch, "massive channel", (3,)):
        found = diagnose(encoder, TEXTS, null=False)
    number = next(i for i, f in enumerate(found.findings) if f.id == "massive_channel")
    for one in (c for c in found.closeups if c.finding == number):
        values = [m.value for m in one.marks]
        assert 0.8 < values[0] <= 1 and values == sorted(values, reverse=True)
        assert all(one.text.tokens[m.position] not in ("[CLS]", "[SEP]") for m in one.marks)


def test_only_measured_layers_have_rows(encoder: Subject) -> None:
    found = diagnose(encoder, TEXTS, null=False, layers=(2, 4))
    assert {site for site, _ in own_rows(found)} == {"encoder.2", "encoder.3"}


def test_words_do_not_hang_on_what_was_read_first(minilm: Path) -> None:
    """The survey of the layers is kept; the text that it was made on is another one."""
    subject = Subject.load(minilm)
    diagnose(subject, "Short.", null=False)
    assert diagnose(subject, TEXTS, null=False).closeups


def test_evidence_is_in_words(encoder: Subject) -> None:
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
    for one in found.closeups:
        kind = "words" if one.site.startswith("text_model") else "patches"
        assert one.text.kind == kind, one.site
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
