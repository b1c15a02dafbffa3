"""Hard to predict: weights that are not finite, treated models, large images, bad masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

import attoscope
from attoscope.diagnosing import diagnose
from attoscope.errors import AttoscopeError
from attoscope.measures.base import Reading
from attoscope.measures.rules import Book
from attoscope.measures.smoothness_rules import UNDECIDED, by_their_spectra
from attoscope.prediction import spectra
from attoscope.prediction.agreement import compare
from attoscope.prediction.verdicts import _ranked
from attoscope.ward.faults import broken
from tests.models import make

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
IDS = {"input_ids": torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))}


def vit(side: int, patch: int) -> tuple[ViTModel, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = ViTModel(ViTConfig(**SIZES, image_size=side, patch_size=patch)).eval()
    return model, {"pixel_values": torch.randn(4, 3, side, side)}


def bert() -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES, vocab_size=50, max_position_embeddings=32)).eval()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("bert", "encoder.layer.1.attention.self.value.weight"),
        ("bert", "encoder.layer.1.attention.self.query.weight"),
        ("bert", "encoder.layer.1.intermediate.dense.weight"),
        ("vit", "v_proj.weight"),
        ("vit", "q_proj.weight"),
        ("vit", "fc1.weight"),
    ],
)
def test_weights_that_are_not_finite(kind: str, weight: str, value: float) -> None:
    model, data = (bert(), IDS) if kind == "bert" else vit(16, 4)
    names = [name for name, _ in model.named_parameters() if name.endswith(weight)]
    chosen = names[len(names) // 2]
    with torch.no_grad():
        model.get_parameter(chosen)[0, 0] = value
    with pytest.raises(AttoscopeError, match=f"not finite.*{chosen}"):
        attoscope.predict(model, data)
    found = {finding.id for finding in diagnose(model, data).findings}
    assert found & {"non_finite", "non_finite_scores"}


def test_activations_that_overflow_leave_a_partial_prediction() -> None:
    model = bert()
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight.fill_(3e38)
    found = attoscope.predict(model, IDS)
    assert np.isfinite(found.layers[0].margin)
    assert found.layers[2].kind == "not predicted"


@pytest.mark.parametrize("remedy", ["neutreno", "attnscale", "featscale", "centred"])
def test_a_treated_model_says_so(remedy: str) -> None:
    subject, batch = make("vit")
    treatment = attoscope.treat(subject.model, remedy)
    found = attoscope.predict(subject, batch)
    said = diagnose(subject, batch).model["notes"]
    assert any(f"treated with {remedy}" in n and "3 of 3 attention layers" in n for n in said)
    assert said[-1] in found.verdict and "not in the maps" in found.verdict
    assert "normalised or scaled on its way" not in str(found)
    assert all("a remedy changes what attention adds" in one.sentence for one in found.layers)
    treatment.undo()
    assert "treated" not in str(attoscope.predict(subject, batch))


def test_the_strength_is_said_and_a_spectral_remedy_is_in_the_maps() -> None:
    subject, batch = make("vit")
    first = attoscope.treat(subject.model, "neutreno", strength=0.3)
    notes = diagnose(subject, batch).model["notes"]
    assert "treated with neutreno (strength 0.3), 3 of 3 attention layers" in notes
    first.undo()
    attoscope.treat(subject.model, "spectral", mode="sharpen")
    found = attoscope.predict(subject, batch)
    assert "treated with spectral (mode sharpen)" in found.notes[0]
    assert "not in the maps" not in found.verdict


@pytest.mark.parametrize(("side", "tokens"), [(32, 65), (56, 197), (96, 577)])
def test_images_of_many_tokens_have_intervals(side: int, tokens: int) -> None:
    model, data = vit(side, 4)
    found = {reading.name: reading for reading in diagnose(model, data).reading_list}
    for name in ("smoothing_margin", "attention_step", "attention_second"):
        reading = found[name]
        assert reading.low is not None and np.isfinite(reading.low).all()
        assert f"of {tokens} tokens" in reading.reason


def test_predict_reads_images_of_577_tokens() -> None:
    model, data = vit(96, 4)
    found = attoscope.predict(model, data, documents=2)
    assert found.tokens == 577 and np.isfinite([one.margin for one in found.layers]).all()


@pytest.mark.parametrize("shape", [(4, 8), (2, 9), (9,)])
def test_masks_of_another_shape(shape: tuple[int, ...]) -> None:
    data = {**IDS, "attention_mask": torch.ones(shape, dtype=torch.long)}
    model = bert()
    for act in (attoscope.predict, diagnose, lambda m, d: attoscope.treat(m, "neutreno", d)):
        with pytest.raises(AttoscopeError, match="got an attention_mask of shape"):
            act(model, data)


def test_broken_reads_what_batches_reads() -> None:
    subject, _ = make("bert")
    whole = subject.model.state_dict()
    before = {name: value.clone() for name, value in whole.items()}
    with broken(subject, [[5, 6, 7, 8], [9, 8, 7]], "dead head", (1,)) as model:
        changed = [n for n, v in model.model.state_dict().items() if not v.equal(before[n])]
        assert len(changed) == 1
    assert all(value.equal(before[name]) for name, value in whole.items())


def test_the_verdict_says_where_a_correlation_lies() -> None:
    places = np.arange(20.0)
    assert "above the" in _ranked(compare("heads", "margin", "step", places, -places))
    assert "below the" in _ranked(compare("heads", "margin", "step", places, places))
    few = compare("heads", "margin", "step", places[:3], -places[:3])
    assert "+1.00 (within the" in _ranked(few)
    subject, batch = make("bert")
    verdict = attoscope.predict(subject, batch).verdict
    assert "chance" not in verdict and "over 12 heads" in verdict and "over 3 layers" in verdict


def test_over_smoothing_leads_to_the_spectra_of_its_layers() -> None:
    def reading(name: str, dims: tuple[str, ...], labels: list[str], values: object) -> Reading:
        array = np.array(values)
        coords: dict[str, tuple[str | int, ...]] = {dims[0]: tuple(labels)}
        if len(dims) > 1:
            coords[dims[1]] = tuple(range(array.shape[1]))
        return Reading(name, name, "", "", (None, None), dims, coords, array)

    points = ["encoder.in", "encoder.0", "encoder.1", "encoder.2"]
    cosine = reading("cosine", ("point",), points, [0.1, 0.5, 0.9, 0.95])
    margins = [[0.5, 0.3], [0.2, -0.1], [0.1, 0.005]]
    margin = reading("smoothing_margin", ("site", "head"), points[1:], margins)
    book = Book({"cosine": cosine, "smoothing_margin": margin}, {}, {})
    text = by_their_spectra(book, (2, 3))
    assert text.startswith("By their spectra 2 of the 4 heads of these layers smooth")
    assert text.index("layer 0 (0.4)") < text.index("layer 1 (0.05)")
    assert by_their_spectra(Book({"cosine": cosine}, {}, {}), (2, 3)) == ""
    assert UNDECIDED == spectra.UNDECIDED
