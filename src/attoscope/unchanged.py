"""Does watching change what the model says? It must not: measured each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attoscope.trace import Batch, Subject, watch
from attoscope.trace.frames import undisturbed
from attoscope.trace.subject import head_of


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Largest absolute difference of the first output between a watched and a plain run.

    Compared at valid positions only. `max_difference` is None when there was nothing finite to
    compare. A torch module with a fused path of its own may differ in the last digits, since it
    takes its ordinary path when watched.
    """

    max_difference: float | None
    positions: int

    @property
    def equal(self) -> bool:
        """Bit-equal wherever both are finite."""
        return self.max_difference == 0.0

    @property
    def sentence(self) -> str:
        """The result in words."""
        if self.max_difference is None:
            return "outputs could not be compared: the model returned no finite floating tensor"
        if self.equal:
            return "outputs unchanged while watched (bit for bit)"
        return f"outputs while watched differ by at most {self.max_difference:.1e}"


def compare_outputs(subject: Subject, batch: Batch) -> Unchanged:
    """Run a small part of `batch` plain and watched, and compare."""
    small = head_of(batch)
    with undisturbed(subject.model):
        plain = first_output(subject.run(small))
    watched = first_output(watch(subject, small, lambda layer, batch: None))
    if plain is None or watched is None or plain.shape != watched.shape:
        return Unchanged(None, 0)
    difference = (plain.double() - watched.double()).abs()
    for mask in (small.valid, small.decoder_valid):
        if mask is not None and mask.shape == difference.shape[:2]:
            difference = difference[mask.to(difference.device)]
            break
    difference = difference[difference.isfinite()]
    if difference.numel() == 0:
        return Unchanged(None, 0)
    return Unchanged(float(difference.max()), difference.numel())


def first_output(output: Any) -> Tensor | None:
    """The first floating tensor that a model returned."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if hasattr(output, "values") else output
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return None
    for value in values:
        found = first_output(value) if value is not None else None
        if found is not None:
            return found
    return None
