"""DeepNet in live models: its constants, and the weights that it draws."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import attoscope
from attoscope import AttoscopeError
from attoscope.remedies.deepnet import constants
from tests.models import TOKENS, WIDTH
from tests.remedies.treated import output, sized

MATRICES = ("dense.weight", "query.weight", "key.weight", "value.weight")


def test_deepnet_constants() -> None:
    six, eighteen = constants(6, 6), constants(18, 18)
    assert six["encoder"] == pytest.approx((1.4179381407, 0.4969892408), abs=5e-11)
    assert six["decoder"] == pytest.approx((2.0597671439, 0.3432945240), abs=5e-11)
    assert eighteen["encoder"] == pytest.approx((1.9987463180, 0.3525710060), abs=5e-11)
    assert eighteen["decoder"] == pytest.approx((2.7108060108, 0.2608474300), abs=5e-11)
    assert constants(8) == {"encoder": (2.0, pytest.approx(64**-0.25))}
    assert constants(0, 8)["decoder"] == (2.0, pytest.approx(64**-0.25))
    with pytest.raises(AttoscopeError, match="expected at least one"):
        constants(0, 0)


# DeepNet.


def test_deepnet_draws_weights_with_its_gain_and_undo_gives_the_old_ones() -> None:
    subject, batch = sized("bert")
    model = subject.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = output(subject, batch)
    treatment = attoscope.treat(model, "deepnet")
    alpha, beta = constants(3)["encoder"]
    assert [float(m.omega) for m in treatment.modules] == pytest.approx([alpha] * 6)  # type: ignore[arg-type]
    for name, gain in (
        ("attention.self.query", 1.0), ("attention.self.key", 1.0), ("attention.self.value", beta),
        ("attention.output.dense", beta), ("intermediate.dense", beta), ("output.dense", beta),
    ):  # fmt: skip
        drawn = [model.get_parameter(f"encoder.layer.{i}.{name}.weight") for i in range(3)]
        std = float(torch.stack(drawn).detach().std())
        assert std == pytest.approx(gain * math.sqrt(2 / sum(drawn[0].shape)), rel=0.05), name
    for name, value in before.items():
        moved = "encoder.layer" in name and name.endswith(MATRICES)
        assert torch.equal(model.state_dict()[name], value) != moved, name
    treatment.undo()
    assert torch.equal(output(subject, batch), first)


def test_deepnet_of_an_encoder_and_a_decoder() -> None:
    subject, batch = sized("bart")
    before = copy.deepcopy(subject.model.state_dict())
    treatment = attoscope.treat(subject.model, "deepnet", batch, reinitialise=False)
    table = constants(3, 3)
    for module in treatment.modules:
        place: Any = module.place
        assert float(module.omega) == pytest.approx(table[place.stack][0])  # type: ignore[arg-type]
    state = subject.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    treatment.undo()
    attoscope.treat(subject.model, "deepnet", batch)
    value = subject.model.get_parameter("model.decoder.layers.1.encoder_attn.v_proj.weight")
    assert float(value.detach().std()) == pytest.approx(
        table["decoder"][1] * math.sqrt(1 / WIDTH), rel=0.08
    )


def test_deepnet_in_torch_s_own_layers_draws_each_part_of_the_fused_matrix() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, TOKENS, 64)
    before = copy.deepcopy(model.state_dict())
    treatment = attoscope.treat(model, "deepnet", x)
    layer: Any = model.layers[0]
    beta = constants(2)["encoder"][1]
    assert float(layer.self_attn.query.weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert float(layer.self_attn.value.weight.detach().std()) == pytest.approx(
        beta / 8, rel=0.05
    )
    treatment.undo()
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
