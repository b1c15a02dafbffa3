"""Attention as people write it by hand: every form gives the same layers and weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attoscope.diagnosing import diagnose
from attoscope.errors import AttoscopeError
from attoscope.trace import AttentionCall, Batch, Subject, attention_rows, watch

WIDTH, HEADS, TOKENS, BATCH = 32, 4, 10, 3
CAUSAL = torch.tril(torch.ones(TOKENS, TOKENS, dtype=torch.bool))


class Attention(nn.Module):
    """Projections, split into heads; `attend` is the form that is tried."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        return self.out(self.attend(*parts).flatten(2))


class Model(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(attend) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def scale(scores: Tensor) -> Tensor:
    return scores * (WIDTH // HEADS) ** -0.5


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scale(torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(~CAUSAL, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def by_product(mask: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A batched product with an additive mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = scale(q @ k.transpose(-1, -2)) + mask
        return (F.softmax(scores, -1) @ v).transpose(1, 2)

    return attend


def by_kernel(mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        causal = mask is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return y.transpose(1, 2)

    return attend


def by_folded_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).reshape(-1, TOKENS, WIDTH // HEADS) for x in (q, k, v))
    scores = scale(torch.bmm(q, k.transpose(1, 2))).masked_fill(~CAUSAL, -torch.inf)
    y = torch.bmm(torch.softmax(scores, dim=2), v)
    return y.reshape(-1, HEADS, TOKENS, WIDTH // HEADS).transpose(1, 2)


def additive(low: float) -> Tensor:
    return (~CAUSAL).float() * low


FORMS = {
    "einsum": by_einsum,
    "folded heads": by_folded_heads,
    "minus infinity": by_product(torch.zeros(TOKENS, TOKENS).masked_fill(~CAUSAL, -torch.inf)),
    "minus 1e4": by_product(additive(-1e4)),
    "minus 9999": by_product(additive(-9999.0)),
    "minus 1e9": by_product(additive(-1e9)),
    "lowest": by_product(additive(torch.finfo(torch.float32).min)),
    "kernel": by_kernel(None),
    "kernel, minus 1e4": by_kernel(additive(-1e4)),
    "kernel, boolean": by_kernel(CAUSAL),
}


def calls_of(model: nn.Module, x: Tensor) -> tuple[Subject, list[AttentionCall]]:
    subject, batch = Subject.of(model.eval()), Batch(x, tuple(range(BATCH)))
    seen: list[AttentionCall] = []
    watch(subject, batch, lambda layer, _: seen.extend(layer.calls))
    return subject, seen


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(FORMS[name])


def inputs() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_the_same_attention(name: str) -> None:
    subject, seen = calls_of(built(name), inputs())
    _, reference = calls_of(built("kernel"), inputs())
    (stack,) = subject.layout(Batch(inputs(), (0, 1, 2))).stacks
    assert (stack.heads, len(stack.layers), stack.causal) == (HEADS, 2, True)
    positions = torch.arange(TOKENS).expand(BATCH, -1)
    for ours, theirs in zip(seen, reference, strict=True):
        rows, wanted = attention_rows(ours, positions), attention_rows(theirs, positions)
        torch.testing.assert_close(rows.weights, wanted.weights, rtol=0, atol=1e-5)
        allowed = rows.allowed.expand_as(rows.weights)
        assert torch.equal(allowed, wanted.allowed.expand_as(allowed))
        assert ours.output_weight is not None
        torch.testing.assert_close(ours.value, theirs.value, rtol=0, atol=1e-5)


def test_heads_that_are_modules_are_heads() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, 8, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            scores = (q @ k.transpose(-2, -1) * 8**-0.5).masked_fill(~CAUSAL, -torch.inf)
            return scores.softmax(dim=-1) @ v

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(Head() for _ in range(HEADS))
            self.out = nn.Linear(HEADS * 8, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(torch.cat([head(x) for head in self.heads], -1))

    model = nn.Sequential(Block(), Block())
    subject, seen = calls_of(model, inputs())
    (stack,) = subject.layout(Batch(inputs(), (0, 1, 2))).stacks
    assert (stack.heads, stack.key_heads, len(stack.layers)) == (HEADS, HEADS, 2)
    assert [str(call.site) for call in seen] == ["decoder.0", "decoder.1"]
    direct = model[0].heads[2]
    x = inputs()
    scores = direct.q(x) @ direct.k(x).transpose(-2, -1) * 8**-0.5
    expected = scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1)
    weights = attention_rows(seen[0], torch.arange(TOKENS).expand(BATCH, -1)).weights
    torch.testing.assert_close(weights[:, 2], expected)


def test_talking_heads_are_refused_and_named() -> None:
    mix = torch.eye(HEADS) + 0.3

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        weights = F.softmax(scale(q @ k.transpose(-1, -2)), -1)
        return (torch.einsum("hg,bgqk->bhqk", mix, weights) @ v).transpose(1, 2)

    with pytest.raises(AttoscopeError, match=r"layers\.0: its output cannot be.*talking heads"):
        calls_of(Model(attend), inputs())


def test_a_layer_built_like_the_others_that_attends_unseen_is_an_error() -> None:
    def unseen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        weights = scale(q @ k.transpose(-1, -2)).exp()
        return (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2)

    class Mixer(Attention):
        """A name that does not give it away."""

    model = Model(by_kernel(None))
    model.layers = nn.ModuleList(Mixer(f) for f in (by_kernel(None), unseen, by_kernel(None)))
    with pytest.raises(
        AttoscopeError, match=r"1 attention module.*layers\.1; Mixer|layer layers\.1"
    ):
        calls_of(model, inputs())


@pytest.mark.parametrize("tokens", [6, BATCH, 24])
def test_time_first_is_found_out(tokens: int) -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention(by_kernel(torch.zeros(1, 1, 1, 1)))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x.transpose(0, 1)).transpose(0, 1)

    x = torch.randn(tokens, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    found = diagnose(
        nn.Sequential(TimeFirst(), TimeFirst()).eval(), x, batch_size=2, null=False
    )
    assert found.data["documents"] == 4
    assert found.readings["effective_keys"].max() > tokens / 2


def test_cross_attention_is_told_apart_whatever_the_lengths() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).eval()
    x, short, long = (torch.randn(2, n, WIDTH) for n in (12, 7, 12))
    for memories in ((short, long), (long, short)):
        found = diagnose(model, [(x, memory) for memory in memories], null=False)
        sites = ["encoder.0", "encoder.0.cross", "encoder.1", "encoder.1.cross"]
        assert list(found.readings["site"].values) == sites
