"""Where readings go: a table of plain rows, and anything that logs."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attoscope.errors import AttoscopeError

if TYPE_CHECKING:
    import pandas

Row = dict[str, int | float]


class Table:
    """Rows of plain dicts, one per look; keys are "reading/site", and "step"."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> list[str]:
        """All keys, in the order in which they came."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def reading(self, name: str) -> dict[str, list[float]]:
        """One reading's values over the looks, by site (by "" where it has none)."""
        sites = [c for c in self.columns() if c.partition("/")[0] == name]
        missing = float("nan")
        return {c.partition("/")[2]: [r.get(c, missing) for r in self.rows] for c in sites}

    def frame(self) -> pandas.DataFrame:
        """The rows as a pandas `DataFrame`, indexed by step."""
        import pandas

        frame = pandas.DataFrame(self.rows, columns=self.columns())
        return frame.set_index("step") if len(frame) else frame

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as a CSV file with a header."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns())
            writer.writeheader()
            writer.writerows(self.rows)


class Sinks:
    """Passes rows on: to `log(dict)`, to `add_scalar(tag, value, step)`, or to a function.

    One that fails is a warning, once: a training does not end for its logger.
    """

    def __init__(self, loggers: Iterable[Any] = ()) -> None:
        self.send = [_sender(logger) for logger in loggers]
        self._warned = False

    def __call__(self, row: Row) -> None:
        for send in self.send:
            try:
                send(dict(row))
            except Exception as error:
                if not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"attoscope.watch: a logger failed at step {row['step']}: "
                        f"{type(error).__name__}: {error}; the training goes on and log.rows are "
                        "kept",
                        stacklevel=2,
                    )


def _sender(logger: Any) -> Any:
    if callable(getattr(logger, "log", None)):
        return logger.log
    if callable(getattr(logger, "add_scalar", None)):

        def scalars(row: Row) -> None:
            step = int(row.pop("step"))
            for name, value in row.items():
                logger.add_scalar(name, value, step)

        return scalars
    if callable(logger):
        return logger
    raise AttoscopeError(
        f"loggers: got a {type(logger).__name__}; expected objects with log(dict) or "
        "add_scalar(tag, value, step), or functions of a dict, as loggers=[wandb.init()]"
    )
