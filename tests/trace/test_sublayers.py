"""Residual branches, found without names: exact sums, kinds, norms, matrices and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attoscope.errors import AttoscopeError
from attoscope.trace import Batch, Subject
from attoscope.trace.sublayers import (
    Passing,
    Sublayer,
    find_sublayers,
    sublayers,
    watch_sublayers,
)
from tests.models import (
    _COMMON,
    _GROUPED,
    EXAMPLES,
    HEADS,
    LAYERS,
    WIDTH,
    _hf,
    make,
    make_batch,
)

ALONE = ("attention", "attention_time_first", "attention_fused")
RESIDUAL = [name for name in EXAMPLES if name not in ALONE]
NORMS = {
    "bert": "post", "roberta": "post", "distilbert": "post", "gpt2": "pre", "llama": "pre",
    "mistral": "pre", "mixtral": "pre", "qwen3": "pre", "gemma2": "sandwich", "gpt_oss": "pre",
    "modernbert": "pre", "albert": "post", "t5": "pre", "bart": "post", "vit": "pre",
    "deberta": "post", "deberta_v2": "post", "mpnet": "post", "bloom": "pre", "encoder": "post",
    "encoder_time_first": "post", "nano": "pre", "nano_fused": "pre",
}  # fmt: skip
RMS = ("llama", "mistral", "mixtral", "qwen3", "gemma2", "gpt_oss", "t5")
ACTIVATIONS = {
    "distilbert": "gelu", "gpt2": "gelu", "llama": "silu", "gemma2": "gelu", "t5": "relu",
    "encoder": "relu", "bloom": "gelu", "albert": "gelu", "modernbert": "gelu", "nano": "gelu",
}  # fmt: skip
GATED = ("llama", "mistral", "mixtral", "qwen3", "gemma2", "gpt_oss", "modernbert")


def passed(subject: Subject, batch: Batch, **options: Any) -> list[Passing]:
    seen: list[Passing] = []
    watch_sublayers(subject, batch, seen.append, **options)
    return seen


def plain(model: nn.Module, reads: str = "ids") -> tuple[Subject, Batch]:
    return Subject.of(model.eval()), make_batch(reads)


@pytest.mark.parametrize("name", RESIDUAL)
def test_every_branch_is_found_with_its_kind_and_norm(name: str) -> None:
    subject, batch = make(name)
    found = sublayers(subject, batch)
    for stack, count in EXAMPLES[name].stacks:
        mine = [one for one in found if one.site.stack == stack]
        crossing = EXAMPLES[name].reads == "pair" and stack == "decoder"
        kinds = ["attention", "cross", "mlp"] if crossing else ["attention", "mlp"]
        assert [one.kind for one in mine] == kinds * count
        assert [one.site.layer for one in mine] == [i for i in range(count) for _ in kinds]
        # The one exception: ModernBERT's first attention reads a stream that is normalised already.
        first = 1 if name == "modernbert" else 0
        assert {one.norm for one in mine[first:]} == {NORMS[name]}
        kind = "rms" if name in RMS else "layer"
        assert {one.norm_kind for one in mine[first:]} == {kind}
        assert all(one.skip == 1 and one.scale == 1 for one in mine)
        names = dict(subject.model.named_modules())
        assert all(one.module in names and set(one.norms) <= set(names) for one in mine)
        gated = {one.gated for one in mine if one.kind == "mlp"}
        assert gated == {name in GATED}
        if name in ACTIVATIONS:
            assert {one.activation for one in mine if one.kind == "mlp"} == {ACTIVATIONS[name]}


@pytest.mark.parametrize("name", RESIDUAL)
def test_roles_cover_each_branch(name: str) -> None:
    subject, batch = make(name)
    sizes = {key: tuple(p.shape) for key, p in subject.model.named_parameters()}
    for one in sublayers(subject, batch):
        roles = [role for matrix in one.matrices for role in matrix.roles]
        if one.kind == "mlp":
            assert roles.count("out") == 1 and "in" in roles or name == "gpt_oss"
            assert ("gate" in roles) == one.gated
        else:
            assert sorted(roles) == ["key", "output", "query", "value"]
        for matrix in one.matrices:
            stored = sizes[matrix.name][-2:]
            shape = (matrix.inputs, matrix.outputs)
            assert stored == (shape if matrix.transposed else shape[::-1])


@pytest.mark.parametrize("name", RESIDUAL)
def test_the_stream_is_the_sum_of_its_branches(name: str) -> None:
    subject, batch = make(name)
    seen = passed(subject, batch)
    assert len(seen) == len(sublayers(subject, batch))
    for one in seen:
        assert torch.equal(one.after, one.before + one.branch)
        assert one.before.shape[:2] == one.valid.shape
    for stack, _ in EXAMPLES[name].stacks:
        mine = [one for one in seen if one.sublayer.site.stack == stack]
        for earlier, later in zip(mine, mine[1:], strict=False):
            same = torch.equal(earlier.after, later.before)
            assert same == (NORMS[name] != "post")
            if NORMS[name] == "post":
                norm = subject.model.get_submodule(earlier.sublayer.sum_norm or "")
                with torch.no_grad():
                    torch.testing.assert_close(norm(earlier.after), later.before)
        if NORMS[name] != "post":
            total = mine[0].before + torch.stack([one.branch for one in mine]).sum(0)
            torch.testing.assert_close(total, mine[-1].after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["neox", "falcon", "gptj"])
def test_blocks_in_parallel_are_one_branch(name: str) -> None:
    model = {
        "neox": lambda: _hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **_COMMON),
        "falcon": lambda: _hf("FalconForCausalLM", "FalconConfig", **_COMMON),
        "gptj": lambda: _hf(
            "GPTJForCausalLM", "GPTJConfig", vocab_size=64, n_embd=WIDTH, n_layer=LAYERS,
            n_head=HEADS, n_positions=64, rotary_dim=4, n_inner=48, bos_token_id=1, eos_token_id=2,
        ),
    }[name]()  # fmt: skip
    found = sublayers(*plain(model))
    assert [one.kind for one in found] == ["parallel"] * LAYERS
    for one in found:
        roles = {role for matrix in one.matrices for role in matrix.roles}
        assert roles == {"query", "key", "value", "output", "in", "out"}
        assert one.norm == "pre"


def test_branches_added_one_after_the_other_are_two() -> None:
    found = sublayers(*plain(_hf("CohereForCausalLM", "CohereConfig", **_COMMON)))
    assert [one.kind for one in found] == ["attention", "mlp"] * LAYERS


def test_norms_of_the_branch_alone_and_factors() -> None:
    olmo = sublayers(*plain(_hf("Olmo2ForCausalLM", "Olmo2Config", **_COMMON)))
    assert {one.norm for one in olmo} == {"branch"}
    options = {**_GROUPED, "residual_multiplier": 0.25}
    granite = sublayers(*plain(_hf("GraniteForCausalLM", "GraniteConfig", **options)))
    assert {(one.skip, one.scale) for one in granite} == {(1.0, 0.25)}


class Scaled(nn.Module):
    """`x <- 0.8 x + 0.6 f(norm(x))` with attention, in place or not, and a skip inside the MLP."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = 0.8 * x
        update = self.attention(normed, normed, normed, need_weights=False)[0] * 0.6
        if self.in_place:
            x += update
        else:
            x = x + update
        hidden = torch.relu(self.first(x))
        return x + (hidden + self.second(hidden))


@pytest.mark.parametrize("in_place", [False, True])
def test_factors_in_place_sums_and_inner_skips(in_place: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(in_place), Scaled(in_place)).double().eval()
    subject, batch = plain(model, "floats")
    found = sublayers(subject, batch)
    assert [one.kind for one in found] == ["attention", "mlp"] * 2
    assert [one.skip for one in found] == [0.8, 1.0] * 2
    assert [one.scale for one in found] == [0.6, 1.0] * 2
    assert [one.norm for one in found] == ["pre", "none"] * 2
    for one in passed(subject, batch):
        assert torch.equal(one.after, one.before + one.branch)


def test_gradients_are_those_of_autograd() -> None:
    """Against a run of our own in which the stream is cut and joined by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled()).double().eval().requires_grad_(False)
    subject, batch = plain(model, "floats")
    batch = Batch(batch.inputs.double(), batch.documents)
    weights = torch.randn(3, 11, WIDTH, dtype=torch.float64)
    seen = passed(subject, batch, gradient=lambda output: (output * weights).sum())
    x = batch.inputs.clone().requires_grad_(True)
    middle = model[0](x)
    middle.retain_grad()
    (model[1](middle) * weights).sum().backward()
    assert seen[0].sublayer.hops == 1
    torch.testing.assert_close(seen[0].before_gradient, x.grad)
    torch.testing.assert_close(seen[1].after_gradient, middle.grad)
    torch.testing.assert_close(seen[2].before_gradient, middle.grad)
    torch.testing.assert_close(seen[3].branch_gradient, weights)
    assert not any(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", RESIDUAL)
def test_gradients_of_every_model(name: str) -> None:
    subject, batch = make(name)
    state = torch.random.get_rng_state()
    flags = [p.requires_grad for p in subject.model.parameters()]

    def scalar(output: Any) -> Tensor:
        first = output if isinstance(output, Tensor) else output[0]
        return first.float().square().mean()

    seen = passed(subject, batch, gradient=scalar)
    assert all(one.before_gradient is not None for one in seen)
    for one in seen:
        assert one.after_gradient is not None and one.branch_gradient is not None
        torch.testing.assert_close(one.branch_gradient, one.after_gradient)
    if NORMS[name] != "post" and name != "t5":
        for earlier, later in zip(seen, seen[1:], strict=False):
            assert torch.equal(earlier.after_gradient, later.before_gradient)  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [p.requires_grad for p in subject.model.parameters()] == flags
    assert all(p.grad is None for p in subject.model.parameters())
    assert not any(m.training for m in subject.model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in subject.model.modules())


def test_training_mode_drops_and_comes_back() -> None:
    subject, batch = make("gpt2")
    calm = passed(subject, batch)
    torch.manual_seed(3)
    dropped = passed(subject, batch, train=True)
    assert not torch.equal(calm[0].branch, dropped[0].branch)
    share = float((dropped[1].branch == 0).double().mean())
    assert 0.05 < share < 0.15  # GPT-2 drops one in ten
    assert torch.equal(passed(subject, batch)[0].branch, calm[0].branch)


@pytest.mark.parametrize("name", ALONE)
def test_attention_without_a_residual_is_said(name: str) -> None:
    subject, batch = make(name)
    found = find_sublayers(subject, batch)
    assert not found.sublayers and len(found.notes) == 1
    with pytest.raises(
        AttoscopeError, match="no addition was found in which its output is added"
    ):
        sublayers(subject, batch)


def test_a_path_that_changes_is_said() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Scaled(), Scaled()])
            self.skip = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            return x if self.skip else self.blocks[1](x)

    model = Fickle()
    subject, batch = plain(model, "floats")
    found = sublayers(subject, batch)
    model.skip = True
    with pytest.raises(AttoscopeError, match="2 of 4 sub-layers did not run this time"):
        watch_sublayers(subject, batch, lambda one: None, found=found)


def test_a_visitors_error_is_its_own() -> None:
    subject, batch = make("gpt2")

    def fail(one: Passing) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        watch_sublayers(subject, batch, fail)
    with pytest.raises(ValueError, match="mine"):
        watch_sublayers(subject, batch, fail, gradient=lambda output: output[0].sum())


def test_a_gradient_that_is_no_scalar_is_said() -> None:
    subject, batch = make("gpt2")
    with pytest.raises(AttoscopeError, match="expected a scalar"):
        passed(subject, batch, gradient=lambda output: output[0])


def test_sites_are_told_apart() -> None:
    subject, batch = make("bart")
    sites = [str(one.site) for one in sublayers(subject, batch)]
    assert sites[:2] == ["encoder.0.attention", "encoder.0.mlp"]
    assert len(set(sites)) == len(sites) == 5 * LAYERS
    assert isinstance(sublayers(subject, batch)[0], Sublayer)


class Inner(nn.Module):
    """A skip of its own around attention, inside a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return x + self.map(h)


class Turned(nn.Module):
    """The stream turned by constants first: a sum of two of its multiples, but no branch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 0.6))
        self.blocks = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + x.roll(1, -1) * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def test_sums_that_are_no_branch_of_the_stream() -> None:
    found = sublayers(*plain(Turned(), "floats"))
    assert [str(one.site) for one in found] == ["encoder.0.attention", "encoder.1.attention"]
    assert [one.module for one in found] == ["blocks.0.map", "blocks.1.map"]
