"""Treated Hugging Face models on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import attoscope
from attoscope import AttoscopeError
from attoscope.remedies import treatments_of
from attoscope.trace import Batch, Subject
from tests.remedies.treated import KINDS, output, sized


def moved(treatment: Any) -> None:
    with torch.no_grad():
        for parameter in treatment.parameters():
            parameter.add_(torch.rand(parameter.shape) * 0.2)


def saved(name: str, kind: str, folder: Path, **options: Any) -> tuple[Subject, Batch]:
    subject, batch = sized(name)
    moved(attoscope.treat(subject.model, kind, **options))
    subject.model.save_pretrained(folder)
    return subject, batch


def loaded(folder: Path, **options: Any) -> Subject:
    return Subject.of(attoscope.load_treated(folder, **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_treated_model_comes_back_equal(tmp_path: Path, name: str, kind: str) -> None:
    subject, batch = saved(name, kind, tmp_path)
    back = loaded(tmp_path)
    assert type(back.model) is type(subject.model)
    assert not back.model.training
    assert torch.equal(output(back, batch), output(subject, batch))
    assert list(back.model.state_dict()) == list(subject.model.state_dict())
    (treatment,) = treatments_of(back.model)
    (mine,) = treatments_of(subject.model)
    assert str(treatment).splitlines()[0] == str(mine).splitlines()[0]
    assert treatment.record == mine.record


def test_two_treatments_with_options_come_back(tmp_path: Path) -> None:
    subject, batch = sized("llama")
    attoscope.treat(subject.model, "value_residual", shares=(0.2, 0.7), learnable=True)
    moved(attoscope.treat(subject.model, "attnscale", layers=(1, 3)))
    subject.model.save_pretrained(tmp_path)
    records = json.loads((tmp_path / "config.json").read_text())["attoscope_treatments"]
    assert [record["remedy"] for record in records] == ["value_residual", "attnscale"]
    assert records[0]["options"] == {"shares": [0.2, 0.7], "learnable": True}
    back = loaded(tmp_path)
    assert torch.equal(output(back, batch), output(subject, batch))
    # Saved again and loaded again, and undone.
    back.model.save_pretrained(tmp_path / "again")
    again = loaded(tmp_path / "again")
    assert torch.equal(output(again, batch), output(subject, batch))
    for treatment in treatments_of(again.model):
        treatment.undo()
    plain, _ = sized("llama")
    assert torch.equal(output(again, batch), output(plain, batch))


def test_a_loaded_spectral_model_folds_into_a_plain_one(tmp_path: Path) -> None:
    subject, batch = saved("bert", "spectral", tmp_path)
    back = loaded(tmp_path)
    (treatment,) = treatments_of(back.model)
    treatment.fold()
    back.model.save_pretrained(tmp_path / "plain")
    import transformers

    plain, info = transformers.BertModel.from_pretrained(
        tmp_path / "plain", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(output(Subject.of(plain), batch), output(subject, batch))


def test_half_precision_keeps_the_strength_exact(tmp_path: Path) -> None:
    subject, batch = sized("bert")
    subject.model.bfloat16()
    attoscope.treat(subject.model, "neutreno", strength=0.6)
    subject.model.save_pretrained(tmp_path)
    back = loaded(tmp_path)
    assert next(back.model.parameters()).dtype == torch.bfloat16
    assert torch.equal(output(back, batch), output(subject, batch))
    (treatment,) = treatments_of(back.model)
    assert all(m.strength.dtype == torch.float32 for m in treatment.modules)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_load_is_not_silent(tmp_path: Path, kind: str) -> None:
    subject, _ = saved("bert", kind, tmp_path)
    _, info = type(subject.model).from_pretrained(tmp_path, output_loading_info=True)
    assert any(f"attoscope_{kind}" in key for key in info["unexpected_keys"])


@pytest.mark.parametrize("kind", ["neutreno", "spectral"])
def test_a_directory_is_diagnosed_as_treated(tmp_path: Path, kind: str) -> None:
    """What reads a model from a directory reads the treated one, and says so."""
    subject, batch = saved("bert", kind, tmp_path)
    back = Subject.load(tmp_path)
    assert torch.equal(output(back, batch), output(subject, batch))
    assert any(f"treated with {kind}" in note for note in back.notes)


def test_what_is_not_a_whole_treated_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AttoscopeError, match=r"got no config\.json"):
        attoscope.load_treated(tmp_path)
    subject, _ = sized("bert")
    subject.model.save_pretrained(tmp_path / "plain")
    with pytest.raises(AttoscopeError, match="records no treatment"):
        attoscope.load_treated(tmp_path / "plain")
    saved("bert", "attnscale", tmp_path / "treated")
    with pytest.raises(AttoscopeError, match="dtype: got 'int8'"):
        attoscope.load_treated(tmp_path / "treated", dtype="int8")
    path = tmp_path / "treated" / "config.json"
    config = json.loads(path.read_text())
    broken: list[tuple[str, dict[str, Any]]] = [
        ("got the class Mine in config.json", {"architectures": ["Mine"]}),
        ("cannot be read", {"attoscope_treatments": [{"remedy": "attnscale"}]}),
        ("cannot be read", {"attoscope_treatments": [{**config["attoscope_treatments"][0],
                                                      "remedy": "other"}]}),
    ]  # fmt: skip
    for message, change in broken:
        path.write_text(json.dumps(config | change))
        with pytest.raises(AttoscopeError, match=message):
            attoscope.load_treated(tmp_path / "treated")
    # Weights of another treatment: some are missing, some left over.
    saved("bert", "featscale", tmp_path / "other")
    path.write_text(json.dumps(config))
    weights = (tmp_path / "other" / "model.safetensors").read_bytes()
    (tmp_path / "treated" / "model.safetensors").write_bytes(weights)
    with pytest.raises(AttoscopeError, match="3 missing keys"):
        attoscope.load_treated(tmp_path / "treated")
