"""The table, and what rows are passed on to."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from attoscope.monitor.table import Sinks, Table


class Run:
    """Like a Weights & Biases run."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, row: dict[str, float]) -> None:
        self.logged.append(row)


class Writer:
    """Like a TensorBoard writer."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def test_rows_reach_everything_that_logs() -> None:
    run, writer, seen = Run(), Writer(), []
    row = {"step": 3, "norm/a": 1.0}
    Sinks([run, writer, seen.append])(row)
    assert run.logged == seen == [row]
    assert writer.scalars == [("norm/a", 1.0, 3)]
    assert row == {"step": 3, "norm/a": 1.0}


def test_table_as_frame_and_csv(tmp_path: Path) -> None:
    table = Table()
    assert table.frame().empty
    table.rows = [{"step": 0, "norm/a": 1.0}, {"step": 5, "norm/a": 2.0, "loss": 4.0}]
    frame = table.frame()
    assert frame.loc[5, "loss"] == 4.0 and math.isnan(frame.loc[0, "loss"])
    assert table.reading("norm") == {"a": [1.0, 2.0]}
    table.to_csv(tmp_path / "log.csv")
    with open(tmp_path / "log.csv", encoding="utf-8") as file:
        assert [r["loss"] for r in csv.DictReader(file)] == ["", "4.0"]


def test_a_logger_that_fails_is_one_warning() -> None:
    class Broken:
        def log(self, row: dict[str, float]) -> None:
            raise RuntimeError("no connection")

    seen: list[dict[str, float]] = []
    sinks = Sinks([Broken(), seen.append])
    with pytest.warns(UserWarning, match="a logger failed at step 3: RuntimeError: no connec"):
        sinks({"step": 3})
    sinks({"step": 4})
    assert seen == [{"step": 3}, {"step": 4}]
