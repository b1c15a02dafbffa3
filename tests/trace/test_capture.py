"""What the trace refuses, and that it leaves no trace of its own."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.trace import Batch, PeakBytes, Subject, batches, watch
from attoscope.trace.capture import capturing
from tests.models import Nano, NanoBlock, SelfAttention, make, make_batch


def test_a_model_without_attention_says_what_was_looked_for() -> None:
    subject = Subject.of(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))
    with pytest.raises(
        AttoscopeError, match="no attention was seen.*looked for.*found 0"
    ) as got:
        subject.layout(make_batch("floats"))
    assert "scaled_dot_product_attention" in str(got.value)


def test_a_state_space_model_says_so() -> None:
    from transformers import MambaConfig, MambaModel

    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(AttoscopeError, match="no attention was seen in MambaModel"):
        Subject.of(MambaModel(config).eval()).layout(make_batch("ids"))


def test_a_router_softmax_is_not_attention() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.out = nn.Linear(32, 4), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x) * torch.softmax(self.gate(x), -1).amax(-1, keepdim=True)

    with pytest.raises(AttoscopeError, match="1 softmax calls"):
        Subject.of(Router()).layout(make_batch("floats"))


class Unseen(NanoBlock):
    """Attends without a softmax that could be watched."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)).exp()
        return x + self.c_proj(scores / scores.sum(-1, keepdim=True) @ v)


def test_a_missed_layer_is_an_error_that_names_it() -> None:
    class UnseenAttention(Unseen):
        pass

    model = Nano()
    model.h[1] = UnseenAttention(False)
    with pytest.raises(AttoscopeError, match=r"1 attention module.*h\.1; UnseenAttention"):
        Subject.of(model.eval()).layout(make_batch("bare ids"))
    layout = Subject.of(model, ignore=("h.1",)).layout(make_batch("bare ids"))
    assert layout.plain == ("h.1",)
    assert layout.stacks[0].layers == (0, 2)


def test_a_kernel_with_an_unknown_term_is_refused() -> None:
    """A registry function that does more than its arguments say must not be misreported."""
    from transformers import AttentionInterface

    def secret(module, query, key, value, attention_mask, scaling=None, **kwargs):
        weights = torch.exp2(query @ key.transpose(-1, -2) * scaling).sqrt()
        weights = weights / weights.sum(-1, keepdim=True)
        return (weights @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("secret", secret)
    try:
        subject, batch = make("bert", "secret")
        with pytest.raises(AttoscopeError, match="cannot be reproduced.*term"):
            subject.layout(batch)
    finally:
        AttentionInterface._global_mapping.pop("secret")


def test_everything_is_put_back_also_after_an_error() -> None:
    from transformers.modeling_utils import AttentionInterface

    plain = AttentionInterface.get_interface
    subject, batch = make("gpt2")
    subject.model.train()
    subject.model.transformer.h[0].eval()
    flags = [module.training for module in subject.model.modules()]
    state = torch.get_rng_state()
    watch(subject, batch, lambda layer, _: torch.rand(3))

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    def fail_like_the_model(*_: object) -> None:
        raise RuntimeError("mine")

    with pytest.raises(ZeroDivisionError):
        watch(subject, batch, fail)
    with pytest.raises(RuntimeError, match="^mine$"):
        watch(subject, batch, fail_like_the_model)
    assert AttentionInterface.get_interface is plain
    assert [module.training for module in subject.model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in subject.model.modules()]
    assert not any(hooks)
    assert all(p.grad is None for p in subject.model.parameters())
    assert not watch(subject, batch, lambda *_: None).logits.requires_grad


def test_nothing_keeps_the_model_alive() -> None:
    subject, batch = make("bert")
    watch(subject, batch, lambda *_: None)
    gone = weakref.ref(subject.model)
    del subject
    gc.collect()
    assert gone() is None


def test_other_threads_are_not_watched() -> None:
    subject, batch = make("bert")
    seen: list[object] = []

    def other() -> None:
        with torch.no_grad():
            subject.model(**batch.inputs)

    with capturing(seen.append, 3), torch.no_grad():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert not seen
        subject.model(**batch.inputs)
    assert len(seen) == 3


def test_what_a_visitor_computes_is_not_taken_for_the_models() -> None:
    subject, batch = make("nano")
    calls: list[int] = []

    def visit(layer, _):
        calls.append(len(layer.calls))
        q = torch.randn(3, 4, 11, 8)
        F.softmax(q @ q.transpose(-1, -2), -1) @ q
        F.scaled_dot_product_attention(q, q, q)

    watch(subject, batch, visit)
    assert calls == [1, 1, 1, 0]


def test_weights_returned_by_multihead_attention_are_those_seen() -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 6, 32)
    mask = torch.triu(torch.full((6, 6), float("-inf")), 1)

    def feed(module, inputs):
        return module(inputs, inputs, inputs, attn_mask=mask, average_attn_weights=False)

    seen = []
    output = watch(
        Subject.of(model, feed=feed),
        Batch(x, (0, 1)),
        lambda layer, _: seen.extend(layer.calls),
    )
    torch.testing.assert_close(seen[0].probabilities, output[1], rtol=0, atol=0)
    assert Subject.of(model, feed=feed).layout(Batch(x, (0, 1))).stacks[0].causal


def test_layers_that_depend_on_the_input_are_an_error() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList(SelfAttention() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, block in enumerate(self.h):
                if index == 0 or x.mean() > 0:
                    x = block(x)
            return x

    subject = Subject.of(Sometimes().eval())
    subject.layout(Batch(torch.ones(1, 4, 32), (0,)))
    with pytest.raises(AttoscopeError, match="1 of 2 attention calls.*layer 1"):
        watch(subject, Batch(-torch.ones(1, 4, 32), (0,)), lambda *_: None)


def test_the_models_own_failure_is_one_sentence() -> None:
    subject, _ = make("bert")
    ids = torch.full((1, 5), 10_000)
    with pytest.raises(
        AttoscopeError, match="the model failed on this input.*input_ids: int64"
    ):
        subject.layout(Batch({"input_ids": ids}, (0,)))


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("z"), AssertionError("a"), StopIteration()]
)
def test_whatever_a_model_raises_is_one_sentence(error: Exception) -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    with pytest.raises(AttoscopeError, match=type(error).__name__):
        watch(Subject.of(Failing()), Batch(torch.ones(1, 2, 3), (0,)), lambda *_: None)


def test_memory_is_that_of_one_layer_and_not_of_length_squared() -> None:
    """Peak bytes beyond the plain pass grow with the length, not with its square."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=12, n_head=4, n_positions=1024,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    from attoscope.measuring import measure

    subject = Subject.of(GPT2Model(config).eval())

    def beyond(length: int) -> int:
        ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(0))
        batch = next(batches(subject, {"input_ids": ids}, max_tokens=1024))
        with PeakBytes() as plain, torch.no_grad():
            subject.run(batch)
        with PeakBytes() as watched:
            measure(subject, [batch], null=False)
        return watched.peak - plain.peak

    short, long = beyond(256), beyond(1024)
    one_layer_of_rows = 4 * 128 * 1024 * 4
    assert long < 3 * one_layer_of_rows
    assert long < 6 * short  # length squared would be 16 times
