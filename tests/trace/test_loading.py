"""Loading: what is a model, what is not, and in what words that is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attoscope.errors import AttoscopeError
from attoscope.trace import Subject, batches, subject_of
from tests.models import EXAMPLES


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    EXAMPLES["bert"].build().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """The folder's weights with some replaced, or dropped where None."""
    file = folder / "model.safetensors"
    weights = {**load_file(file), **changes}
    save_file({k: v for k, v in weights.items() if v is not None}, file, {"format": "pt"})


def test_a_directory(saved: Path) -> None:
    subject = Subject.load(saved)
    assert type(subject.model).__name__ == "BertModel"
    assert (subject.name, subject.notes, subject.tokenizer) == ("bert", (), None)
    assert subject.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_on_request(saved: Path, dtype: str) -> None:
    assert Subject.load(saved, dtype=dtype).dtype == getattr(torch, dtype)


def test_the_architecture_of_the_checkpoint_is_loaded_with_its_head(tmp_path: Path) -> None:
    EXAMPLES["gpt2"].build().save_pretrained(tmp_path)
    assert type(Subject.load(tmp_path).model).__name__ == "GPT2LMHeadModel"


def test_an_old_pickle_is_read_without_running_code(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(weights, saved / "pytorch_model.bin")
    assert Subject.load(saved).dtype == torch.float32


def test_a_gguf_file(smollm2_gguf: Path) -> None:
    subject = Subject.load(smollm2_gguf)
    (batch,) = batches(subject, ["The capital of France is"])
    assert type(subject.model).__name__ == "LlamaForCausalLM"
    assert "GGUF" in subject.notes[0]
    token = subject.run(batch).logits[0, -1].argmax()
    assert subject.tokenizer.decode([int(token)]).strip() == "Paris"


def test_missing_weights_inside_a_layer_are_an_error(saved: Path) -> None:
    rewrite(saved, **{"encoder.layer.1.attention.self.query.weight": None})
    with pytest.raises(
        AttoscopeError, match=r"weights of its layers are missing.*random \(1: "
    ):
        Subject.load(saved)


def test_missing_weights_outside_the_layers_are_a_note(saved: Path) -> None:
    rewrite(saved, **{"pooler.dense.weight": None})
    assert "pooler.dense.weight" in Subject.load(saved).notes[0]


def test_unexpected_weights_are_a_note(saved: Path) -> None:
    rewrite(saved, extra=torch.ones(2))
    assert "not used by this architecture: extra (1)" in Subject.load(saved).notes[0]


def test_weights_of_another_size(saved: Path) -> None:
    rewrite(saved, **{"encoder.layer.1.attention.self.query.weight": torch.ones(3, 3)})
    with pytest.raises(AttoscopeError, match="weights cannot be loaded"):
        Subject.load(saved)


def test_weights_of_another_model(saved: Path) -> None:
    other = saved.parent / "other"
    EXAMPLES["distilbert"].build().save_pretrained(other)
    shutil.copy(other / "model.safetensors", saved)
    with pytest.raises(AttoscopeError, match="missing from the checkpoint.*others instead"):
        Subject.load(saved)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all"])
def test_a_damaged_weights_file(saved: Path, content: bytes) -> None:
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(AttoscopeError, match="weights"):
        Subject.load(saved)


def test_no_weights(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(AttoscopeError, match="has a config.json but no weights"):
        Subject.load(saved)


def test_no_model_directory(tmp_path: Path) -> None:
    with pytest.raises(AttoscopeError, match="neither config.json nor a GGUF file"):
        Subject.load(tmp_path)


@pytest.mark.parametrize("config", ["{}", "not json", json.dumps({"model_type": "unheard_of"})])
def test_a_configuration_that_says_nothing(saved: Path, config: str) -> None:
    (saved / "config.json").write_text(config)
    with pytest.raises(AttoscopeError, match="configuration cannot be read"):
        Subject.load(saved)


def test_code_in_the_directory_does_not_run(saved: Path) -> None:
    marker = saved.parent / "ran"
    (saved / "modeling.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((saved / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling.Model", "AutoConfig": "modeling.Config"}
    config["model_type"] = "unheard_of"
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(AttoscopeError, match="configuration cannot be read"):
        Subject.load(saved)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/place", "does not exist"),
        ("two words", "does not exist"),
        ("some/hub-model", "configuration cannot be read"),
        (__file__, "is a file that is no GGUF model"),
    ],
)
def test_no_model_at_all(source: str, message: str) -> None:
    with pytest.raises(AttoscopeError, match=message) as got:
        Subject.load(source)
    assert "\n" not in str(got.value)


def test_bad_dtype_and_device(saved: Path) -> None:
    with pytest.raises(AttoscopeError, match="dtype: got 'int8'; expected one of auto"):
        Subject.load(saved, dtype="int8")
    with pytest.raises(AttoscopeError, match="device 'nonsense' cannot be used"):
        Subject.load(saved, device="nonsense")
    with pytest.raises(AttoscopeError, match="model: got int; expected a torch nn.Module"):
        subject_of(7)
