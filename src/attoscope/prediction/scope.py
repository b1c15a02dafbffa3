"""What the theory of smoothing does not cover in a model, in words, per layer and as a whole."""

from __future__ import annotations

from attoscope.prediction.maps import ValueMaps
from attoscope.prediction.smoothing import Smoothing

# Shares of attention below this that go to a sink change nothing that is shown.
_SINK = 0.01

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


def outside(smoothing: Smoothing) -> dict[str, tuple[str, ...]]:
    """For each site, in words, what of it the theory does not cover."""
    found: dict[str, tuple[str, ...]] = {
        site: (f"not predicted: {why}",)
        for site, why in smoothing.reasons.items()
        if site in smoothing.heads.places
    }
    for site, maps in smoothing.used.items():
        found[site] = tuple(_of_site(site, maps, smoothing))
    return found


def _of_site(site: str, maps: ValueMaps, smoothing: Smoothing) -> list[str]:
    notes = []
    if maps.norm is None:
        notes.append("no norm in front of attention: a norm behind it (post-norm) is left out")
    if maps.joins == "beside":
        notes.append("attention runs beside another branch of the block, not before it")
    if maps.joins == "changed":
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
