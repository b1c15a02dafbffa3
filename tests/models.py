"""Tiny random models of many architectures, built from configurations; no hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attoscope.trace import Batch, Subject

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 3
TOKENS, DECODER_TOKENS = 11, 9

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}


class Nano(nn.Module):
    """A hand-written decoder, with a softmax of its own or a fused kernel."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(NanoBlock(fused) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class NanoBlock(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(width, 2)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (width // HEADS) ** -0.5
            allowed = torch.tril(torch.ones(length, length, dtype=torch.bool))
            y = F.softmax(scores.masked_fill(~allowed, float("-inf")), dim=-1) @ v
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` attending to its own input, as people write it."""

    def __init__(self, batch_first: bool = True, need_weights: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def _hf(model: str, config: str, attention: str | None = None, **options: Any) -> nn.Module:
    import transformers

    made = getattr(transformers, config)(**options)
    if attention is not None:
        made._attn_implementation = attention
    built: nn.Module = getattr(transformers, model)(made)
    return built


@dataclass(frozen=True)
class Example:
    """How to build a model, what it reads, and what the survey must find."""

    build: Callable[..., nn.Module]
    reads: str = "ids"
    stacks: tuple[tuple[str, int], ...] = (("encoder", LAYERS),)
    key_heads: int = HEADS
    causal: bool = False
    route: str = "registry"
    final: bool = False


def _bare(config: str, model: str, **options: Any) -> Callable[..., nn.Module]:
    def build(attention: str | None = None) -> nn.Module:
        return _hf(model, config, attention, **options)

    return build


_DECODER: dict[str, Any] = {"stacks": (("decoder", LAYERS),), "causal": True, "final": True}
_PAIR = (("encoder", LAYERS), ("decoder", LAYERS))
_DEBERTA = {**_COMMON, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_BART = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip

EXAMPLES: dict[str, Example] = {
    "bert": Example(_bare("BertConfig", "BertModel", **_COMMON)),
    "roberta": Example(_bare("RobertaConfig", "RobertaModel", **_COMMON)),
    "distilbert": Example(
        _bare("DistilBertConfig", "DistilBertModel", vocab_size=VOCABULARY, dim=WIDTH,
              n_layers=LAYERS, n_heads=HEADS, hidden_dim=48, max_position_embeddings=64)
    ),
    "gpt2": Example(
        _bare("GPT2Config", "GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=WIDTH,
              n_layer=LAYERS, n_head=HEADS, n_positions=64, bos_token_id=1, eos_token_id=2),
        **_DECODER,
    ),
    "llama": Example(
        _bare("LlamaConfig", "LlamaForCausalLM", **_GROUPED), key_heads=2, **_DECODER
    ),
    "mistral": Example(
        _bare("MistralConfig", "MistralForCausalLM", **_GROUPED, sliding_window=4),
        key_heads=2, **_DECODER,
    ),
    "mixtral": Example(
        _bare("MixtralConfig", "MixtralForCausalLM", **_GROUPED, num_local_experts=4),
        key_heads=2, **_DECODER,
    ),
    "qwen3": Example(
        _bare("Qwen3Config", "Qwen3ForCausalLM", **_GROUPED, head_dim=8), key_heads=2, **_DECODER
    ),
    "gemma2": Example(
        _bare("Gemma2Config", "Gemma2ForCausalLM", **_GROUPED, head_dim=8, sliding_window=4,
              attn_logit_softcapping=0.5),
        key_heads=2, **_DECODER,
    ),
    "gpt_oss": Example(
        _bare("GptOssConfig", "GptOssForCausalLM", **_GROUPED, head_dim=8, num_local_experts=4,
              num_experts_per_tok=2, sliding_window=4,
              rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        key_heads=2, **_DECODER,
    ),
    "modernbert": Example(
        _bare("ModernBertConfig", "ModernBertModel", **_COMMON, cls_token_id=1, sep_token_id=2,
              local_attention=4),
        final=True,
    ),
    "albert": Example(_bare("AlbertConfig", "AlbertModel", **_COMMON, embedding_size=16)),
    "t5": Example(
        _bare("T5Config", "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=WIDTH,
              d_kv=8, d_ff=48, num_layers=LAYERS, num_heads=HEADS, decoder_start_token_id=0),
        reads="pair", stacks=_PAIR, final=True,
    ),
    "bart": Example(
        _bare("BartConfig", "BartForConditionalGeneration", **_BART), reads="pair", stacks=_PAIR
    ),
    "vit": Example(
        _bare("ViTConfig", "ViTModel", hidden_size=WIDTH, num_hidden_layers=LAYERS,
              num_attention_heads=HEADS, intermediate_size=48, image_size=8, patch_size=2,
              num_channels=1),
        reads="pixels", final=True,
    ),
    "deberta": Example(_bare("DebertaConfig", "DebertaModel", **_DEBERTA), route="softmax"),
    "deberta_v2": Example(
        _bare("DebertaV2Config", "DebertaV2Model", **_DEBERTA, position_buckets=8),
        route="softmax",
    ),
    "mpnet": Example(_bare("MPNetConfig", "MPNetModel", **_COMMON), route="softmax"),
    "bloom": Example(
        _bare("BloomConfig", "BloomModel", vocab_size=VOCABULARY, hidden_size=WIDTH,
              n_layer=LAYERS, n_head=HEADS),
        route="softmax", **_DECODER,
    ),
    "encoder": Example(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True), LAYERS
        ),
        reads="padded floats", route="sdpa",
    ),
    "encoder_time_first": Example(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 48), LAYERS, enable_nested_tensor=False
        ),
        reads="floats, time first", route="sdpa",
    ),
    "attention": Example(
        SelfAttention, reads="floats", stacks=(("encoder", 1),), route="softmax"
    ),
    "attention_time_first": Example(
        lambda: SelfAttention(batch_first=False), reads="floats, time first",
        stacks=(("encoder", 1),), route="softmax",
    ),
    "attention_fused": Example(
        lambda: SelfAttention(need_weights=False), reads="floats", stacks=(("encoder", 1),),
        route="sdpa",
    ),
    "nano": Example(Nano, reads="bare ids", route="softmax", **_DECODER),
    "nano_fused": Example(lambda: Nano(fused=True), reads="bare ids", route="sdpa", **_DECODER),
}  # fmt: skip


def make(name: str, attention: str | None = None) -> tuple[Subject, Batch]:
    """A model by name, in evaluation mode, and a batch of three sequences, one of them padded."""
    torch.manual_seed(0)
    example = EXAMPLES[name]
    model = example.build(attention) if attention else example.build()
    return Subject.of(model.eval(), name=name), make_batch(example.reads)


def make_batch(reads: str) -> Batch:
    """Three sequences of the kind that an example reads; the second is padded where it can be."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, TOKENS), generator=generator)
    valid = torch.ones(3, TOKENS, dtype=torch.bool)
    documents = (0, 1, 2)
    floats = torch.randn(3, TOKENS, WIDTH, generator=generator)
    if reads == "bare ids":
        return Batch({"input_ids": ids}, documents)
    if reads == "pixels":
        return Batch({"pixel_values": torch.randn(3, 1, 8, 8, generator=generator)}, documents)
    if reads == "floats":
        return Batch(floats, documents)
    if reads == "floats, time first":
        return Batch(floats.transpose(0, 1).contiguous(), documents)
    valid[1, 7:] = False
    if reads == "padded floats":
        return Batch({"src": floats, "src_key_padding_mask": ~valid}, documents, valid)
    ids[1, 7:] = 0
    inputs = {"input_ids": ids, "attention_mask": valid.long()}
    if reads == "pair":
        read = torch.randint(3, VOCABULARY, (3, DECODER_TOKENS), generator=generator)
        everywhere = torch.ones_like(read, dtype=torch.bool)
        return Batch(
            {**inputs, "decoder_input_ids": read}, documents, valid, decoder_valid=everywhere
        )
    return Batch(inputs, documents, valid)
