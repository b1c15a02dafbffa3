"""Numbers and plurals in sentences."""

from __future__ import annotations

import math


class Number(float):
    """A number that prints itself: plainly, or as a percentage with the format `percent`."""

    def __format__(self, spec: str) -> str:
        if not math.isfinite(self):
            return "not computed"
        if spec == "percent":
            share = 100 * float(self)
            if share == 0 or 10 <= share < 99 or share == 100:
                return f"{share:.0f} %"
            return f"{share:.3g} %" if share >= 99 else f"{share:.2g} %"
        if spec:
            return float.__format__(self, spec)
        size = abs(self)
        if size == 0:
            return "0"
        if size >= 1e6 or size < 1e-3:
            return f"{float(self):.1e}"
        if size >= 100:
            return f"{float(self):,.0f}"
        return f"{float(self):.3g}"


class Plural(int):
    """A count that chooses between two words: f"{n:is|are}"."""

    def __format__(self, spec: str) -> str:
        if "|" not in spec:
            return int.__format__(self, spec)
        one, many = spec.split("|")
        return one if self == 1 else many


def heads_phrase(count: int, of: int) -> str:
    """ "the only head", "1 of 12 heads", "all 24 heads"."""
    if of == 1:
        return "the only head"
    if count == of:
        return "both heads" if of == 2 else f"all {of} heads"
    return f"{count} of {of} heads"
