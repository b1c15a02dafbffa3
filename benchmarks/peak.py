"""Peak bytes of tensors, counted exactly, on a 12-layer toy as the text gets longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attoscope.measuring import measure
from attoscope.trace import Batch, PeakBytes, Subject
from benchmarks.methods import Peer, plain

LENGTHS = (512, 1024, 2048, 4096)
LAYERS, HEADS, WIDTH, VOCABULARY = 12, 4, 64, 64


def toy(implementation: str) -> Any:
    """A random decoder: 12 layers of 4 heads, width 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=max(LENGTHS),
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).eval()


def sequence(length: int) -> Batch:
    """One document of random tokens."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, VOCABULARY, (1, length), generator=generator)
    mask = torch.ones_like(ids)
    return Batch(
        {"input_ids": ids, "attention_mask": mask},
        documents=(0,),
        valid=mask.bool(),
        special=torch.zeros_like(mask, dtype=torch.bool),
    )


def peaks(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, float]]:
    """Per length: the plain pass, attoscope and the peer, in bytes alive at once."""
    subject, peer = Subject.of(toy("sdpa")), Peer(toy("eager"))
    subject.layout(sequence(64))
    rows = []
    for length in lengths:
        batch = sequence(length)
        rows.append(
            {
                "tokens": length,
                "plain": counted(lambda batch=batch: plain(subject, [batch])),
                "measure": counted(lambda batch=batch: measure(subject, [batch], null=False)),
                "measure_all_rows": counted(
                    lambda batch=batch: measure(subject, [batch], rows=None, null=False)
                ),
                "peer": counted(lambda batch=batch: peer([batch])),
            }
        )
    return rows


def counted(run: Callable[[], Any]) -> int:
    """Peak bytes of the tensors made while `run` runs."""
    with PeakBytes() as peak:
        run()
    return peak.peak
