"""Every architecture: layers found, weights right, stream right, outputs untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attoscope.trace import AttentionCall, Layer, attention_rows, watch
from attoscope.unchanged import compare_outputs, first_output
from tests.models import EXAMPLES, HEADS, LAYERS, make

# Models whose own eager attention returns its weights: an independent route to compare with.
EAGER = [
    name
    for name, example in EXAMPLES.items()
    if example.route == "registry" or name in ("deberta", "deberta_v2", "mpnet", "bloom")
]


def layers_of(name: str, attention: str | None = None) -> tuple[list[Layer], Any, Any]:
    subject, batch = make(name, attention)
    seen: list[Layer] = []
    output = watch(subject, batch, lambda layer, _: seen.append(layer))
    return seen, output, (subject, batch)


def every_row(call: AttentionCall) -> torch.Tensor:
    positions = torch.arange(call.shape[2]).expand(call.shape[0], -1)
    return attention_rows(call, positions).weights


@pytest.mark.parametrize("name", EXAMPLES)
def test_layers_are_found(name: str) -> None:
    example = EXAMPLES[name]
    subject, batch = make(name)
    layout = subject.layout(batch)
    assert tuple((s.name, len(s.layers)) for s in layout.stacks) == example.stacks
    last = layout.stacks[-1]
    assert (last.heads, last.key_heads) == (HEADS, example.key_heads)
    assert last.causal == (example.causal or example.reads == "pair")
    assert {route for stack in layout.stacks for route, _ in stack.routes} == {example.route}
    assert (last.final is not None) == example.final
    assert not layout.plain


# torch's own encoder warns about nested tensors when it is fed padding and nobody watches.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", EXAMPLES)
def test_watching_leaves_the_output_equal(name: str) -> None:
    subject, batch = make(name)
    unchanged = compare_outputs(subject, batch)
    assert unchanged.positions > 0
    # torch's own modules take a fused path when nobody watches; the rest is bit-equal.
    fused = name in ("encoder", "encoder_time_first", "attention", "attention_fused")
    assert unchanged.max_difference is not None
    assert unchanged.max_difference <= (1e-5 if fused else 0.0)


@pytest.mark.parametrize("name", EXAMPLES)
def test_layers_come_in_order_with_their_calls(name: str) -> None:
    seen, _, _ = layers_of(name)
    example = EXAMPLES[name]
    for stack, count in example.stacks:
        mine = [layer for layer in seen if layer.stack == stack]
        assert [layer.index for layer in mine if not layer.final] == list(range(count))
        crossing = example.reads == "pair" and stack == "decoder"
        for layer in (layer for layer in mine if not layer.final):
            names = [call.site.call for call in layer.calls]
            assert names == (["self", "cross"] if crossing else ["self"])
            assert layer.stream_in is not None and layer.stream_out is not None
            assert layer.stream_in.shape == layer.stream_out.shape


@pytest.mark.parametrize("name", EXAMPLES)
def test_rows_sum_to_one_at_valid_queries(name: str) -> None:
    for layer in layers_of(name)[0]:
        for call in layer.calls:
            positions = torch.arange(call.shape[2]).expand(call.shape[0], -1)
            rows = attention_rows(call, positions)
            total = (rows.weights.sum(-1) + rows.sink_mass).transpose(1, 2)[layer.valid]
            torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-5)
            assert bool((rows.sink_mass > 0).any()) == (name == "gpt_oss")


@pytest.mark.parametrize("name", EAGER)
def test_weights_are_those_of_eager_attention(name: str) -> None:
    """Against the weights that the model itself returns, made from another implementation."""
    seen, _, (subject, batch) = layers_of(name)
    peer, _ = make(name, "eager") if EXAMPLES[name].route == "registry" else (subject, batch)
    peer.model.load_state_dict(subject.model.state_dict())
    with torch.no_grad():
        output = peer.model(**batch.inputs, output_attentions=True)
    found: dict[str, list[torch.Tensor]] = {}
    for layer in seen:
        for call in layer.calls:
            kind = "cross" if call.site.call == "cross" else layer.stack
            weights = every_row(call).transpose(1, 2)
            found.setdefault(kind, []).append(weights[layer.valid])
    pair = EXAMPLES[name].reads == "pair"
    given = {
        "encoder": output.encoder_attentions if pair else output.attentions,
        "decoder": output.decoder_attentions if pair else output.attentions,
        "cross": output.cross_attentions if pair else (),
    }
    assert sum(map(len, found.values())) == (3 * LAYERS if pair else LAYERS)
    for kind, mine in found.items():
        valid = batch.valid
        if kind != "encoder" and pair:
            valid = batch.decoder_valid
        for ours, theirs in zip(mine, given[kind], strict=True):
            theirs = theirs.transpose(1, 2)
            theirs = theirs.flatten(0, 1) if valid is None else theirs[valid]
            torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2", "albert", "vit", "mpnet"])
def test_the_stream_is_the_models_hidden_states(name: str) -> None:
    seen, _, (subject, batch) = layers_of(name)
    with torch.no_grad():
        states = subject.model(**batch.inputs, output_hidden_states=True).hidden_states
    blocks = [layer for layer in seen if not layer.final]
    for index, layer in enumerate(blocks):
        torch.testing.assert_close(layer.stream_in, states[index], rtol=0, atol=0)
    # Decoders report their last hidden state after the final norm.
    final = next((layer for layer in seen if layer.final), None)
    last = blocks[-1] if name in ("bert", "albert", "mpnet", "vit") else final
    assert last is not None
    torch.testing.assert_close(last.stream_out, states[-1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    ["bert", "gpt2", "llama", "gemma2", "gpt_oss", "t5", "nano", "nano_fused", "encoder"],
)
def test_heads_add_up_to_what_attention_writes(name: str) -> None:
    """Sum over heads of output · W_O (plus its bias) is the projection's own output."""
    subject, batch = make(name)
    subject.layout(batch)
    projected: list[torch.Tensor] = []
    owners = ("o_proj", "c_proj", "o", "dense", "out_proj")
    hooks = [
        module.register_forward_hook(lambda m, _, out: projected.append(out))
        for path, module in subject.model.named_modules()
        if path.rpartition(".")[2] in owners and ("att" in path.lower() or "c_proj" in path)
        and "mlp" not in path and "intermediate" not in path
    ]  # fmt: skip
    calls: list[AttentionCall] = []
    watch(subject, batch, lambda layer, _: calls.extend(layer.calls))
    for hook in hooks:
        hook.remove()
    if name == "encoder":  # projects inside a function: no module to compare with
        assert all(call.output_weight is not None for call in calls)
        return
    assert len(projected) == len(calls)
    for call, whole in zip(calls, projected, strict=True):
        assert call.output is not None and call.output_weight is not None
        parts = torch.einsum("bqhs,hsw->bqw", call.output, call.output_weight)
        rest = whole.reshape(parts.shape) - parts
        torch.testing.assert_close(
            rest, rest[:1, :1].expand_as(rest), rtol=0, atol=1e-5
        )  # the bias alone


def test_first_output_of_nested_structures() -> None:
    wanted = torch.ones(2)
    assert first_output((None, {"a": torch.ones(2, dtype=torch.long), "b": wanted})) is wanted
    assert first_output("text") is None
