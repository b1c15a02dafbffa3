"""The colours of maps: steps of a scale, as CSS variables so that light and dark both work."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEPS = 21


def _blend(stops: list[str], steps: int = STEPS) -> tuple[str, ...]:
    """Steps between the stops, even in OKLab (so that equal steps look equal)."""
    lab = np.array([_to_lab(stop) for stop in stops])
    at = np.linspace(0, len(stops) - 1, steps)
    mixed = np.stack([np.interp(at, range(len(stops)), lab[:, c]) for c in range(3)], axis=1)
    return tuple(_to_hex(each) for each in mixed)


_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def _to_lab(colour: str) -> NDArray[np.float64]:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    lab: NDArray[np.float64] = _LAB @ np.cbrt(_LMS @ linear)
    return lab


def _to_hex(lab: NDArray[np.float64]) -> str:
    linear = np.clip(np.linalg.solve(_LMS, np.linalg.solve(_LAB, lab) ** 3), 0, 1)
    rgb = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * c):02x}" for c in np.clip(rgb, 0, 1))


# Lightness runs one way in the sequential scales; the diverging ones go from blue to orange.
# Both can be told apart with any of the common colour-vision deficiencies.
SCALES: dict[str, dict[str, tuple[str, ...]]] = {
    "light": {
        "s": _blend(["#edf5f2", "#a5d3cd", "#4a9fb0", "#256691", "#1c2f5f"]),
        "d": _blend(["#1f5fa8", "#7fb0dc", "#f1f1ed", "#e8a464", "#a84a06"]),
    },
    "dark": {
        "s": _blend(["#1d2a33", "#1f5669", "#2f8c9b", "#77c6bf", "#e6f7e4"]),
        "d": _blend(["#86c1ff", "#3d78b0", "#262e35", "#b06d2c", "#ffb26b"]),
    },
}


def variables(theme: str) -> str:
    """The steps as CSS declarations: `--s0:#edf5f2;…`."""
    return "".join(
        f"--{scale}{i}:{colour};"
        for scale, steps in SCALES[theme].items()
        for i, colour in enumerate(steps)
    )


def step(share: NDArray[np.float64]) -> NDArray[np.int64]:
    """Step numbers for shares in [0, 1]; −1 where not a number."""
    bounded = np.clip(np.nan_to_num(share, nan=0.0), 0, 1)
    index: NDArray[np.int64] = np.where(
        np.isfinite(share), np.minimum((bounded * STEPS).astype(np.int64), STEPS - 1), -1
    )
    return index
