"""Models as people have them: compiled, offloaded, split, checkpointed, in half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.measuring import measure
from attoscope.trace import Batch, Subject, parameter_count
from attoscope.unchanged import compare_outputs
from tests.models import make


def entropies(subject: Subject, batch: Batch) -> torch.Tensor:
    readings = {r.name: r for r in measure(subject, [batch], null=False).readings()}
    return torch.from_numpy(readings["normalised_entropy"].values)


@pytest.mark.parametrize("name", ["nano_fused", "llama"])
def test_compiled_models_run_as_they_were_written(name: str) -> None:
    subject, batch = make(name)
    expected = entropies(subject, batch)
    compiled = Subject.of(torch.compile(subject.model, backend="eager"))
    torch.testing.assert_close(entropies(compiled, batch), expected, rtol=0, atol=0)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_weights_that_are_brought_in_layer_by_layer(place: str, tmp_path: Path) -> None:
    """The model's parameters rest on the meta device; only inputs and statistics move."""
    import accelerate

    subject, batch = make("bert")
    expected, count = entropies(subject, batch), parameter_count(subject.model)
    here = torch.device("cpu")
    if place == "memory":
        moved = accelerate.cpu_offload(subject.model, execution_device=here)
    else:
        moved = accelerate.disk_offload(subject.model, str(tmp_path), execution_device=here)
    assert next(moved.parameters()).device.type == "meta"
    offloaded = Subject.of(moved)
    torch.testing.assert_close(entropies(offloaded, batch), expected, rtol=0, atol=0)
    assert compare_outputs(offloaded, batch).equal
    assert parameter_count(moved) == count


def test_a_model_split_over_devices() -> None:
    """All on one device here: what is tried are the hooks that move tensors between modules."""
    import accelerate

    subject, batch = make("gpt2")
    expected = entropies(subject, batch)
    devices = {
        name: "cpu" for name in ("transformer.wte", "transformer.wpe", "transformer.drop")
    }
    devices |= {f"transformer.h.{i}": "cpu" for i in range(3)}
    devices |= {"transformer.ln_f": "cpu", "lm_head": "cpu"}
    split = accelerate.dispatch_model(subject.model, devices, force_hooks=True)
    torch.testing.assert_close(entropies(Subject.of(split), batch), expected, rtol=0, atol=0)


def test_weights_that_are_not_there() -> None:
    with torch.device("meta"):
        subject = Subject.of(nn.MultiheadAttention(8, 2, batch_first=True), name="empty")
    with pytest.raises(AttoscopeError, match="the weights of empty are on the meta device"):
        subject.layout(Batch((torch.ones(1, 2, 8),) * 3, (0,)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_modules_are_refused() -> None:
    with pytest.raises(AttoscopeError, match="torch.jit module"):
        Subject.of(torch.jit.script(nn.Linear(2, 2)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt_oss", "t5", "nano", "attention", "vit"])
def test_every_precision(name: str, dtype: torch.dtype) -> None:
    if (name, dtype) == ("gpt_oss", torch.float64):
        pytest.skip("its grouped experts are not computed in float64")
    subject, batch = make(name)
    expected = entropies(subject, batch)
    subject.model.to(dtype)
    tolerance = 1e-5 if dtype == torch.float64 else 2e-2
    fresh = Subject.of(subject.model)
    torch.testing.assert_close(entropies(fresh, batch), expected, rtol=0, atol=tolerance)


def test_gradient_checkpointing_and_training_mode() -> None:
    subject, batch = make("llama")
    expected = entropies(subject, batch)
    enable = getattr(subject.model, "activation_checkpointing_enable", None)
    (enable or subject.model.gradient_checkpointing_enable)()
    subject.model.train()
    torch.testing.assert_close(entropies(subject, batch), expected, rtol=0, atol=0)
    assert subject.model.training


def test_under_inference_mode_and_autocast() -> None:
    subject, batch = make("bert")
    expected = entropies(subject, batch)
    with torch.inference_mode():
        torch.testing.assert_close(entropies(subject, batch), expected, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(entropies(subject, batch), expected, rtol=0, atol=2e-2)


def test_tied_weights_count_once() -> None:
    subject, _ = make("gpt2")
    rest = parameter_count(subject.model.transformer)
    assert parameter_count(subject.model) == rest
    assert sum(p.numel() for p in subject.model.state_dict().values()) > rest
