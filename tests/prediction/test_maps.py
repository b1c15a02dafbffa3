"""The value-output map of a head is what it adds to the stream, on models of many shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attoscope.prediction.documents import documents_of
from attoscope.prediction.maps import Maps, norm_of, value_maps
from attoscope.remedies import treat
from attoscope.trace import Batch, Layer, Subject, watch
from tests.models import HEADS, LAYERS, WIDTH, make

SIZE = WIDTH // HEADS
SHAPES = (
    "bert", "gpt2", "llama", "qwen3", "mixtral", "vit", "t5", "bloom", "deberta", "albert",
    "modernbert", "gemma2", "encoder", "encoder_time_first", "attention_time_first", "nano",
    "nano_fused",
)  # fmt: skip


def stirred(name: str) -> tuple[Subject, Batch]:
    """A tiny model whose norms and biases are not the ones and zeros that they start with, and
    whose maps are as large as they are."""
    subject, batch = make(name)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in subject.model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 2)
            elif float(parameter.std()) < 0.1:
                parameter.mul_(10)
    return subject, batch


def rest_of_heads(subject: Subject, batch: Batch, maps: Maps) -> dict[str, float]:
    """What is left of each head's writing when its map is taken off and then what is constant
    over tokens, beside the writing itself: the largest of all heads and documents."""
    left: dict[str, float] = {}

    def visit(layer: Layer, given: Batch) -> None:
        for call in layer.calls:
            if call.module not in maps.found:
                continue
            mine = maps.found[call.module]
            for one in documents_of(layer, given, call, mine):
                seen = one.x if mine.norm is None else mine.norm(one.x)
                made = one.attention @ (seen @ mine.value) @ mine.output
                rest = one.written.transpose(0, 1) - made
                rest = rest - rest.mean(1, keepdim=True)
                worst = float(rest.abs().max() / one.written.abs().max())
                left[str(call.site)] = max(left.get(str(call.site), 0.0), worst)

    watch(subject, batch, visit)
    return left


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", SHAPES)
def test_a_map_is_what_a_head_adds_up_to_a_constant(name: str) -> None:
    subject, batch = stirred(name)
    maps = value_maps(subject, batch)
    left = rest_of_heads(subject, batch, maps)
    assert len(left) >= (1 if name.startswith("attention") else 3)
    assert max(left.values()) < 1e-5
    assert all("cross" in reason for reason in maps.missing.values())


def test_the_comparison_notices_wrong_maps() -> None:
    subject, batch = stirred("gpt2")
    maps = value_maps(subject, batch)
    one = next(iter(maps.found.values()))
    assert one.norm is not None
    one.norm.gain[3] *= 1.01
    assert max(rest_of_heads(subject, batch, maps).values()) > 1e-4


def parts_of(maps: Maps, layer: int) -> tuple[Tensor, Tensor]:
    one = list(maps.found.values())[layer]
    return one.value, one.output


def test_separate_projections() -> None:
    subject, batch = stirred("bert")
    value, output = parts_of(value_maps(subject, batch), 1)
    attention = subject.model.encoder.layer[1].attention
    for head in range(HEADS):
        rows = slice(head * SIZE, (head + 1) * SIZE)
        assert torch.equal(value[head], attention.self.value.weight[rows].T.double())
        assert torch.equal(output[head], attention.output.dense.weight[:, rows].T.double())


def test_a_fused_transposed_projection() -> None:
    subject, batch = stirred("gpt2")
    value, output = parts_of(value_maps(subject, batch), 2)
    attention = subject.model.transformer.h[2].attn
    for head in range(HEADS):
        columns = slice(head * SIZE, (head + 1) * SIZE)
        expected = attention.c_attn.weight[:, 2 * WIDTH :][:, columns]
        assert torch.equal(value[head], expected.double())
        assert torch.equal(output[head], attention.c_proj.weight[columns].double())


def test_grouped_heads_share_the_values_of_their_key_head() -> None:
    subject, batch = stirred("llama")
    value, output = parts_of(value_maps(subject, batch), 0)
    assert value.shape == (HEADS, WIDTH, SIZE)
    weight = subject.model.model.layers[0].self_attn.v_proj.weight
    for head in range(HEADS):
        group = head // 2
        assert torch.equal(value[head], weight[group * SIZE : (group + 1) * SIZE].T.double())
    assert not torch.equal(output[0], output[1])


@pytest.mark.parametrize(
    ("name", "weight", "centred"),
    [
        ("gpt2", lambda m: m.transformer.h[0].ln_1.weight, True),
        ("vit", lambda m: m.layers[0].layernorm_before.weight, True),
        ("llama", lambda m: m.model.layers[0].input_layernorm.weight, False),
        ("gemma2", lambda m: 1 + m.model.layers[0].input_layernorm.weight, False),
        ("t5", lambda m: m.encoder.block[0].layer[0].layer_norm.weight, False),
    ],
)
def test_the_gain_in_front_and_whether_it_centres(
    name: str, weight: Callable[[Any], Tensor], centred: bool
) -> None:
    subject, batch = stirred(name)
    norm = next(iter(value_maps(subject, batch).found.values())).norm
    assert norm is not None and norm.centred is centred
    torch.testing.assert_close(
        norm.gain, weight(subject.model).detach().double(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", ["bert", "encoder", "bart", "deberta"])
def test_post_norm_blocks_have_no_gain_in_front(name: str) -> None:
    subject, batch = stirred(name)
    found = value_maps(subject, batch).found
    assert all(maps.norm is None for maps in found.values())


def test_effective_values_fold_gain_and_centring_in() -> None:
    subject, batch = stirred("gpt2")
    maps = next(iter(value_maps(subject, batch).found.values()))
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    assert maps.norm is not None
    scaled = x / maps.norm.scale(x)[:, None]
    torch.testing.assert_close(maps.norm(x) @ maps.value[1], scaled @ maps.effective()[1])
    plain = (x - x.mean(1, keepdim=True)) @ maps.value[1]
    torch.testing.assert_close(plain, x @ maps.effective(gain=False)[1])


def test_biases_beside_the_output_weight() -> None:
    for name, bias in (
        ("bert", lambda m: m.encoder.layer[0].attention.output.dense.bias),
        ("encoder", lambda m: m.layers[0].self_attn.out_proj.bias),
        ("llama", lambda m: None),
    ):
        subject, batch = stirred(name)
        found = next(iter(value_maps(subject, batch).found.values())).bias
        expected = bias(subject.model)
        assert found is None if expected is None else torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "joins"),
    [("bert", "alone"), ("llama", "alone"), ("gemma2", "changed"), ("attention", "replaces")],
)
def test_how_the_update_joins_the_stream(name: str, joins: str) -> None:
    subject, batch = stirred(name)
    assert {m.joins for m in value_maps(subject, batch).found.values()} == {joins}


class Parallel(nn.Module):
    """A block with attention and MLP side by side; `gated` values are no linear map."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            p.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for p in self.qkv(y).chunk(3, -1)
        )
        if self.gated:
            v = v * v.sigmoid()
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2)) + self.mlp(y)


def test_parallel_branches_are_seen_as_such() -> None:
    subject = Subject.of(nn.Sequential(Parallel(), Parallel()).eval())
    batch = Batch(torch.randn(2, 7, WIDTH), (0, 1))
    maps = value_maps(subject, batch)
    assert {m.joins for m in maps.found.values()} == {"beside"} and len(maps.found) == 2
    assert max(rest_of_heads(subject, batch, maps).values()) < 1e-5


def test_values_that_are_no_linear_map_are_left_out_with_a_reason() -> None:
    subject = Subject.of(nn.Sequential(Parallel(gated=True)).eval())
    maps = value_maps(subject, Batch(torch.randn(2, 7, WIDTH), (0, 1)))
    assert not maps.found
    assert list(maps.missing.values()) == [
        "the values are not a linear map of what the value projection reads"
    ]


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


@pytest.mark.parametrize(
    "module",
    [
        nn.Identity(),
        nn.Dropout(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        Scale(),
        nn.GroupNorm(2, 4),
    ],
)
def test_what_is_no_norm(module: nn.Module) -> None:
    assert norm_of(module.eval(), WIDTH) is None


@pytest.mark.parametrize("width", [7, WIDTH])
def test_norms_by_what_they_do(width: int) -> None:
    plain = norm_of(nn.LayerNorm(width, elementwise_affine=False), width)
    assert plain is not None and plain.centred
    assert plain.epsilon == pytest.approx(1e-5, rel=1e-6)
    torch.testing.assert_close(plain.gain, torch.ones(width, dtype=torch.float64))
    rms = nn.RMSNorm(width, eps=1e-12)
    with torch.no_grad():
        rms.weight.copy_(torch.linspace(-2, 2, width))
    found = norm_of(rms, width)
    assert found is not None and not found.centred
    assert found.epsilon == pytest.approx(1e-12, rel=1e-3)
    torch.testing.assert_close(found.gain, rms.weight.detach().double(), atol=1e-7, rtol=1e-6)


def test_the_model_is_handed_back_as_it_was() -> None:
    subject, batch = make("llama")
    model = subject.model.train()
    frozen = next(model.parameters()).requires_grad_(False)
    state = torch.get_rng_state()
    value_maps(subject, batch)
    assert model.training and not frozen.requires_grad
    assert sum(p.requires_grad for p in model.parameters()) == len(list(model.parameters())) - 1
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["vit", "gpt2", "bert"])
@pytest.mark.parametrize("mode", ["sharpen", "smooth"])
def test_parametrized_weights_are_read_as_the_model_computes_with_them(
    name: str, mode: str
) -> None:
    subject, batch = make(name)
    treat(subject.model, "spectral", batch.inputs, mode=mode, start="random")
    maps = value_maps(Subject.of(subject.model), batch)
    assert len(maps.found) == LAYERS and not maps.missing
    for one in maps.found.values():
        whole = torch.einsum("hws,hsv->wv", one.value, one.output)
        values = torch.linalg.eigvalsh(whole if mode == "smooth" else -whole)
        assert torch.allclose(whole, whole.T, atol=1e-6)
        assert values.min() > 0.04 and values.max() < 0.96
        assert one.joins == "alone"
