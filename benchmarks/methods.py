"""What is compared: the plain pass, attoscope, and the usual way to get at attention.

Each method takes the same batches and gives nothing back; only its time and its bytes count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attoscope.diagnosing import diagnose
from attoscope.measuring import measure
from attoscope.trace import Batch, Subject

Method = Callable[[], None]


@dataclass(frozen=True)
class Peer:
    """The usual way: eager attention that returns all weights and all hidden states."""

    model: Any

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Runs, and computes what people compute: entropy per layer and head, norms."""
        with torch.no_grad():
            for batch in batches:
                output = self.model(
                    **batch.inputs,
                    use_cache=False,
                    output_attentions=True,
                    output_hidden_states=True,
                )
                self.statistics(output.attentions, output.hidden_states)

    @staticmethod
    def statistics(
        attentions: Sequence[Tensor], hidden_states: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(layer, head) mean entropy in nats and (layer,) mean norm."""
        if not attentions:
            raise RuntimeError("no attention came back: the model is not eager")
        entropy = [-(a * (a + 1e-12).log()).sum(-1).mean((0, 2)) for a in attentions]
        norm = [state.norm(dim=-1).mean() for state in hidden_states]
        return torch.stack(entropy), torch.stack(norm)


def plain(subject: Subject, batches: Sequence[Batch]) -> None:
    """The model's own forward pass, as it stands, without gradients."""
    with torch.no_grad():
        for batch in batches:
            subject.run(batch)


def methods(subject: Subject, peer: Peer, batches: Sequence[Batch]) -> dict[str, Method]:
    """By name, in the order in which they take turns; the first is what ratios are taken to."""
    return {
        "plain": lambda: plain(subject, batches),
        "measure": lambda: void(measure(subject, batches, null=False)),
        "measure_null": lambda: void(measure(subject, batches)),
        "measure_all_rows": lambda: void(measure(subject, batches, rows=None, null=False)),
        "diagnose": lambda: void(diagnose(subject, list(batches))),
        "peer": lambda: peer(batches),
    }


def void(result: Any) -> None:
    """Drops a result."""
    del result


TITLES = {
    "plain": "plain forward pass",
    "measure": "attoscope, 128 rows, no null",
    "measure_null": "attoscope, 128 rows, null on 1 document in 4",
    "measure_all_rows": "attoscope, all rows, no null",
    "diagnose": "the whole of `attoscope.diagnose`",
    "peer": "`output_attentions` + `output_hidden_states`, eager, entropy and norms",
}
