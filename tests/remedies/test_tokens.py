"""Tokens of the first and last block, caught on live models of many kinds."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import ViTConfig, ViTForImageClassification

from attoscope.errors import AttoscopeError
from attoscope.remedies.losses import cosine_loss, patch_contrastive_loss
from attoscope.remedies.tokens import BlockTokens
from tests.models import EXAMPLES, LAYERS, WIDTH, Nano, make


def vit() -> ViTForImageClassification:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        image_size=8, patch_size=2, num_channels=1, num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config)


PIXELS = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_the_tokens_are_the_stream_after_the_first_and_last_block() -> None:
    model = vit().train()
    with BlockTokens(model) as tokens:
        output = model(PIXELS, output_hidden_states=True)
        states = output.hidden_states
        assert torch.equal(tokens.first, states[1][:, 1:])
        final = model.vit.layernorm(torch.cat([states[-1][:, :1], tokens.last], 1))
        logits = model.classifier(model.vit.layernorm(states[-1])[:, 0])
        assert tokens.last.shape == (4, 16, 16)
        # transformers may hand out the last state before or after the final norm.
        given = [states[-1][:, 1:], final[:, 1:]]
        assert any(torch.allclose(tokens.last, one, atol=1e-6) for one in given)
        assert torch.allclose(logits, output.logits, atol=1e-5) or torch.allclose(
            model.classifier(states[-1][:, 0]), output.logits, atol=1e-5
        )


def test_the_model_computes_the_same_and_no_hook_is_left() -> None:
    model = vit().train()
    expected = model(PIXELS).logits
    with BlockTokens(model) as tokens:
        assert torch.equal(model(PIXELS).logits, expected)
        assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(AttoscopeError, match="run the model once"):
        _ = tokens.last


def test_losses_on_the_tokens_train_the_blocks() -> None:
    model = vit().train()
    with BlockTokens(model) as tokens:
        model(PIXELS)
        loss = cosine_loss(tokens.last) + patch_contrastive_loss(tokens.last, tokens.first)
        loss.backward()
    grads = [p.grad for name, p in model.named_parameters() if ".layers." in name]
    assert grads and all(g is not None and g.abs().max() > 0 for g in grads[:-2])


def test_a_second_pass_replaces_the_tokens() -> None:
    model = vit()
    with BlockTokens(model) as tokens:
        model(PIXELS)
        before = tokens.last
        model(PIXELS[:2] + 1.0)
        assert tokens.last.shape[0] == tokens.first.shape[0] == 2 and before.shape[0] == 4


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "albert", "encoder_time_first"])
def test_many_kinds_of_models(name: str) -> None:
    subject, batch = make(name)
    seen: list[Tensor] = []
    with BlockTokens(subject.model, skip=0) as tokens:
        subject.run(batch)
        seen = [tokens.first, tokens.last]
    assert all(x.shape[0] == len(batch) and x.shape[2] == WIDTH for x in seen)
    assert not torch.equal(seen[0], seen[1])
    assert EXAMPLES[name].stacks == (("encoder", LAYERS),) or EXAMPLES[name].causal


def test_several_stacks_need_a_choice() -> None:
    subject, batch = make("t5")
    with BlockTokens(subject.model) as tokens:
        with pytest.raises(AttoscopeError, match="stack: none was chosen; .*decoder"):
            subject.run(batch)
    with BlockTokens(subject.model, skip=0, stack="decoder") as tokens:
        subject.run(batch)
        assert tokens.last.shape[0] == len(batch)


class Checkpointed(Nano):
    """A decoder that runs its blocks a second time in the backward pass."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for block in self.h:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.ln_f(x))


def test_checkpointing_gives_the_same_gradients() -> None:
    ids = torch.randint(64, (2, 7))
    grads = []
    for reentrant in (None, False):
        torch.manual_seed(0)
        model = Checkpointed(reentrant)
        # Without it the second run of a block ends before its hooks are called.
        whole = set_checkpoint_early_stop(False)
        with BlockTokens(model, skip=0) as tokens, whole:
            model(ids)
            kept = tokens.last
            cosine_loss(kept).backward()
            assert tokens.last is kept or tokens.last.data_ptr() == kept.data_ptr()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) > 10
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*grads, strict=True))


def test_blocks_without_gradients_are_refused() -> None:
    model = Checkpointed(True)
    with BlockTokens(model), pytest.raises(AttoscopeError, match="reentrant"):
        model(torch.randint(64, (2, 7)))


def test_bad_input_is_refused_in_a_sentence() -> None:
    with pytest.raises(AttoscopeError, match="expected the torch module"):
        BlockTokens("model")
    with pytest.raises(AttoscopeError, match="skip"):
        BlockTokens(vit(), skip=-1)
    tokens = BlockTokens(vit())
    with pytest.raises(AttoscopeError, match="run the model once"):
        _ = tokens.first
    plain = nn.Sequential(nn.Linear(3, 3))
    with BlockTokens(plain), pytest.raises(AttoscopeError, match="attention"):
        plain(torch.randn(2, 3))


def test_a_model_is_copied_with_its_tokens_caught() -> None:
    model = vit().train()
    with BlockTokens(model) as tokens:
        model(PIXELS)
        kept = tokens.last
        twin = copy.deepcopy(model)
        twin(PIXELS)
        assert tokens.last is not None and torch.equal(tokens.last, kept)
        (cosine_loss(tokens.last)).backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_module_without_blocks_is_refused() -> None:
    for module in (nn.Linear(3, 3), nn.Sequential()):
        with pytest.raises(AttoscopeError, match="without any module in it"):
            BlockTokens(module)
    with pytest.raises(AttoscopeError, match="skip: got 1.5"):
        inspect.unwrap(BlockTokens.__init__)(BlockTokens.__new__(BlockTokens), vit(), skip=1.5)
