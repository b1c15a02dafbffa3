"""What the theory of smoothing does not cover in a model, in words, per layer and as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from attoscope.errors import AttoscopeError
from attoscope.prediction.maps import ValueMaps
from attoscope.prediction.smoothing import Smoothing
from attoscope.trace.subject import Subject

# Shares of attention below this that go to a sink change nothing that is shown.
_SINK = 0.01

# Options of remedies that are said, and the remedies whose term is in no value-output map.
_OPTIONS = ("strength", "shares", "mode")
_BESIDE = ("neutreno", "attnscale", "featscale", "centred", "value_residual")

ALWAYS = (
    "The theory has one head, the same attention map and the same value-output map in every layer, "
    "and no MLP: here maps change from layer to layer, attention changes with the tokens, and MLPs "
    "stand between. Margins explain; the steps and the curves are what happened.",
    "Biases (of the values, the norm in front and the output) are no part of the maps; they add "
    "the same vector to every token, and count in the measured steps.",
)
NORMED = (
    "The norm in front divides each token by its own size; the margins use one size per document, "
    "the median over tokens."
)


def check_finite(subject: Subject) -> None:
    """Raises `AttoscopeError`, naming them, where weights hold NaN or infinity."""
    bad = [
        name
        for name, weight in subject.model.named_parameters()
        if weight.is_floating_point() and not bool(torch.isfinite(weight).all())
    ]
    if bad:
        rest = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise AttoscopeError(
            f"{subject.name}: got weights that are not finite (NaN or infinity in "
            f"{', '.join(bad[:3])}{rest}); expected finite weights, from which alone something "
            "can be predicted; load the model anew, or see by `attoscope diagnose` what it does"
        )


@dataclass(frozen=True, slots=True)
class Treated:
    """A remedy in the model: what it is in words, at which modules, whether the maps lack it."""

    said: str
    modules: tuple[str, ...]
    beside: bool

    def touches(self, module: str) -> bool:
        """Whether the remedy works in, or around, this module."""
        return any(f"{one}.".startswith(f"{module}.") for one in self.modules if module) or any(
            f"{module}.".startswith(f"{one}.") for one in self.modules
        )


def treated(model: nn.Module) -> tuple[Treated, ...]:
    """The remedies that a model holds, as `attoscope.treat` put them there."""
    from attoscope.remedies.treatment import treatments_of

    found = []
    for path, part in model.named_modules():
        for one in treatments_of(part):
            chosen = [f"{n} {one.options[n]}" for n in _OPTIONS if n in one.options]
            options = f" ({', '.join(chosen)})" if chosen else ""
            done, every = one.layers
            said = f"treated with {one.remedy}{options}, {done} of {every} {one.counted}"
            modules = tuple(f"{path}.{c.module}" if path else c.module for c in one.changed)
            found.append(Treated(said, modules, one.remedy in _BESIDE))
    return tuple(found)


def warning(remedies: Sequence[Treated]) -> str:
    """The sentence that a verdict needs where remedies act outside the maps; else empty."""
    beside = [one.said for one in remedies if one.beside]
    if not beside:
        return ""
    return (
        f" The model is {', and '.join(beside)}: what the remedy adds is not in the maps, so the "
        "spectra speak of its attention without it."
    )


def outside(
    smoothing: Smoothing, remedies: Sequence[Treated] = ()
) -> dict[str, tuple[str, ...]]:
    """For each site, in words, what of it the theory does not cover."""
    found: dict[str, tuple[str, ...]] = {
        site: (f"not predicted: {why}",)
        for site, why in smoothing.reasons.items()
        if site in smoothing.heads.places
    }
    for site, maps in smoothing.used.items():
        beside = any(one.beside and one.touches(maps.module) for one in remedies)
        found[site] = tuple(_of_site(site, maps, smoothing, beside))
    return found


def _of_site(site: str, maps: ValueMaps, smoothing: Smoothing, beside: bool) -> list[str]:
    notes = []
    if beside:
        notes.append(
            "a remedy changes what attention adds to the stream, outside the maps"
            + (": the step of attention is not measured" * (maps.joins == "changed"))
        )
    if maps.norm is None:
        notes.append("no norm in front of attention: a norm behind it (post-norm) is left out")
    if maps.joins == "beside":
        notes.append("attention runs beside another branch of the block, not before it")
    if maps.joins == "changed" and not beside:
        notes.append(
            "what attention adds is normalised or scaled on its way to the stream: its step is not "
            "measured, and the size of the map is not what counts"
        )
    if maps.joins == "replaces":
        notes.append("no residual connection: eigenvalues are products, without the 1")
    sink = smoothing.sinks.get(site, 0.0)
    if sink > _SINK:
        notes.append(f"a sink takes up to {sink:.2f} of a row: rows were divided by the rest")
    if site in smoothing.capped:
        notes.append("scores are soft-capped (the attention map is as it is)")
    return notes


def summary(notes: dict[str, tuple[str, ...]], smoothing: Smoothing) -> tuple[str, ...]:
    """The same for the whole model: what always holds, then each note with its sites."""
    lines = list(ALWAYS)
    if any(maps.norm is not None for maps in smoothing.used.values()):
        lines.append(NORMED)
    sites: dict[str, list[str]] = {}
    for site, each in notes.items():
        for note in each:
            # A sink's number differs from layer to layer: the widest stands for all.
            sites.setdefault(note.partition(" takes up to ")[0], []).append(site)
    whole = {
        note.partition(" takes up to ")[0]: note for each in notes.values() for note in each
    }
    for short, where in sites.items():
        named = where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more"
        lines.append(f"{named}: {whole[short]}.")
    return tuple(lines)
