"""Names of places in words: sites such as "decoder.3.cross", points such as "encoder.in"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LABEL = re.compile(r"^(?P<stack>.+?)\.(?P<index>\d+|in|final)(?:\.(?P<call>.+))?$")


@dataclass(frozen=True, slots=True)
class Place:
    """A place taken apart: `index` is a layer number, "in" or "final"."""

    label: str
    stack: str
    index: str
    call: str

    @property
    def track(self) -> str:
        """What runs along depth: the stack, and the call where there is more than one."""
        return self.stack if self.call == "self" else f"{self.stack} {self.call}"

    @property
    def words(self) -> str:
        """ "layer 3", "the input", "the final norm"."""
        special = {"in": "the input of the first layer", "final": "the final norm"}
        return special.get(self.index, f"layer {self.index}")


def parse(label: str) -> Place:
    """Take a label apart; one that follows no pattern is a place of its own."""
    found = _LABEL.match(label)
    if found is None:
        return Place(label, label, "", "self")
    return Place(label, found["stack"], found["index"], found["call"] or "self")


def phrase(places: Sequence[Place], one_track: bool) -> str:
    """Places of one track in words: "layers 3–5 and the final norm of the encoder"."""
    layers = sorted(int(p.index) for p in places if p.index.isdigit())
    parts = [p.words for p in places if p.index == "in"]
    if layers:
        word = "layer" if len(layers) == 1 else "layers"
        parts.append(f"{word} {join(_ranges(layers))}")
    parts += [p.words for p in places if p.index == "final"]
    if not parts:
        return join([p.label for p in places])
    text = join(parts)
    if places[0].call != "self":
        text = f"the {places[0].call.replace('_', ' ')} attention of {text}"
    return text if one_track else f"{text} of the {places[0].stack}"


def join(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _ranges(layers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = []
    for run in runs:
        parts += [str(i) for i in run] if len(run) < 3 else [f"{run[0]}–{run[-1]}"]
    return parts
