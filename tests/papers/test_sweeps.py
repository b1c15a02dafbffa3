"""Sweeps: finished items are kept, safely, and each is computed once, wherever it runs."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from attoscope import AttoscopeError
from attoscope.papers import Paper, Run, reproduce
from attoscope.papers.running import Workers
from attoscope.papers.trials import Trials, digest, pack, unpack
from tests.papers import fakes


def ran(log: Path) -> int:
    """How many items ran, by the lines that they left."""
    return len(processes(log)) if log.exists() else 0


def processes(log: Path) -> list[int]:
    """The process in which each item ran."""
    return [int(line) for line in log.read_text().splitlines()]


# Kept trials: what went in comes out, and nothing else does.

VALUES: list[Any] = [
    None, True, 3, 10**30, -0.0, float("inf"), "ä\n", [], (), {}, [1, (2, [3.5])],
    {"a": 1, 2: (3,), "tuple": [1]}, np.arange(6.0).reshape(2, 3), np.float64(0.1),
    np.array(["x", "yz"]), np.bool_(True), np.zeros((0, 3), np.float32), np.array(2 + 1j),
]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_with_their_types(value: Any) -> None:
    assert same(unpack(pack(value)), value)


def test_different_values_have_different_names() -> None:
    values = [*VALUES, np.arange(6.0), np.arange(6), 3.0, "3", False, [()], {"a": 1}]
    values += [np.zeros(6), np.zeros((2, 3))]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": np.ones(3)}) == digest({"a": np.ones(3)})


@pytest.mark.parametrize("value", [{1}, object(), b"x", np.array([object()]), Path("x")])
def test_only_plain_data_is_kept(value: Any) -> None:
    with pytest.raises(TypeError, match="expected plain data"):
        pack([value])


def test_a_pickle_in_the_place_of_an_entry_is_not_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harm",))

    np.savez(tmp_path / "key.npz", tree=np.array([Evil()], dtype=object))
    assert Trials(tmp_path).get("key") is None
    assert not (tmp_path / "harm").exists()


# Sweeps: once each, whatever happens.


def test_a_second_run_computes_nothing_and_says_the_same(tmp_path: Path) -> None:
    log = tmp_path / "log"
    out = tmp_path / "out"
    first = reproduce(fakes.sweeping(log), jobs=1, out=out)
    assert ran(log) == 6 and first.as_expected
    second = reproduce(fakes.sweeping(log), jobs=1, out=out)
    assert ran(log) == 6
    assert without_seconds(first.to_dict()) == without_seconds(second.to_dict())


def without_seconds(data: dict[str, Any]) -> dict[str, Any]:
    return data | {"claims": [{**claim, "seconds": 0} for claim in data["claims"]]}


def test_other_seeds_scales_and_fresh_runs_compute_again(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    first = reproduce(fakes.sweeping(log), jobs=1, out=out)
    other = reproduce(fakes.sweeping(log), jobs=1, out=out, seed=1)
    assert ran(log) == 12
    assert first.to_dict()["claims"][0]["measured"] != other.to_dict()["claims"][0]["measured"]
    reproduce(fakes.sweeping(log), jobs=1, out=out, scale="paper")
    assert ran(log) == 18
    reproduce(fakes.sweeping(log), jobs=1, out=out, fresh=True)
    assert ran(log) == 24
    reproduce(fakes.sweeping(log), jobs=1, out=out, seed=1)
    assert ran(log) == 24


@pytest.mark.parametrize("other", [Run(seed=1), Run("paper")])
def test_a_kept_item_is_of_one_seed_scale_and_label(tmp_path: Path, other: Run) -> None:
    trials = Trials(tmp_path / "trials")
    for run, label in ((Run(), "a"), (Run(), "b"), (other, "a"), (Run(), "a")):
        item = {"seed": 1, "log": str(tmp_path / "log")}
        replace(run, trials=trials).map(fakes.walk, [item], label)
    assert ran(tmp_path / "log") == 3


def test_a_longer_sweep_computes_only_what_is_new(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    reproduce(fakes.sweeping(log, count=4), jobs=1, out=out)
    reproduce(fakes.sweeping(log, count=7), jobs=1, out=out)
    assert ran(log) == 7


def test_without_a_folder_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reproduce(fakes.sweeping(), jobs=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", [b"", b"nonsense", "cut", "flipped"])
def test_a_corrupted_entry_is_computed_again(tmp_path: Path, damage: bytes | str) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    first = reproduce(fakes.sweeping(log), jobs=1, out=out)
    entry = sorted((out / ".trials").rglob("*.npz"))[2]
    whole = entry.read_bytes()
    middle = whole.index(np.float64(unpack(whole)["path"][5]).tobytes())
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    entry.write_bytes({"cut": whole[:-40], "flipped": flipped}.get(damage, damage))  # type: ignore[call-overload]
    again = reproduce(fakes.sweeping(log), jobs=1, out=out)
    assert ran(log) == 7
    assert without_seconds(first.to_dict()) == without_seconds(again.to_dict())
    assert unpack(entry.read_bytes())["end"] == unpack(whole)["end"]


def stopping(log: Path, stop: bool) -> Paper:
    """A claim without a sweep, then one whose fifth item is interrupted."""
    paper = fakes.paper()
    paper.claim(name="first", **fakes.TEXTS)(lambda run: fakes.evidence())

    @paper.claim(name="second", **fakes.TEXTS)
    def second(run: Run) -> Any:
        # The item must be the same in both runs, so that the interrupt comes from outside it.
        items = [{"seed": s, "log": str(log)} for s in range(8)]
        if stop:
            run.map(fakes.walk, items[:4], "walks")
            raise KeyboardInterrupt
        run.map(fakes.walk, items, "walks")
        return fakes.evidence()

    return paper


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        reproduce(stopping(log, stop=True), jobs=1, out=out)
    data = json.loads((out / "evidence.json").read_text())
    assert [claim["name"] for claim in data["claims"]] == ["first"]
    assert (data["complete"], data["as_expected"]) == (False, False)
    kept = reproduce(stopping(log, stop=True), jobs=1, out=out, keep_finished=True)
    assert [o.name for o in kept.claims] == ["first"] and not kept.complete
    assert ran(log) == 4
    ledger = reproduce(stopping(log, stop=False), jobs=1, out=out)
    assert ran(log) == 8 and ledger.as_expected
    assert json.loads((out / "evidence.json").read_text())["complete"]


def test_an_interrupt_inside_an_item_keeps_the_items_before_it(tmp_path: Path) -> None:
    run = Run(trials=Trials(tmp_path / "trials"))
    items = [{"seed": s, "stop": s == 3} for s in range(5)]
    with pytest.raises(KeyboardInterrupt):
        run.map(fakes.walk, items)
    assert len(list((tmp_path / "trials").iterdir())) == 3


def test_the_same_evidence_whatever_the_jobs(tmp_path: Path) -> None:
    one = reproduce(fakes.sweeping(), jobs=1, out=tmp_path / "1").to_dict()
    log = tmp_path / "log"
    two = reproduce(fakes.sweeping(log), jobs=2, out=tmp_path / "2").to_dict()
    assert ran(log) == 6 and os.getpid() not in processes(log)
    assert without_seconds(one) == without_seconds(two)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_item_is_computed_on_one_thread(jobs: int) -> None:
    with threadpool_limits(2):
        assert fakes.threads(0) == 2
        assert Run(workers=Workers(jobs)).map(fakes.threads, [0, 1]) == [1, 1]
        assert fakes.threads(0) == 2


def test_results_come_in_the_order_of_the_items() -> None:
    items = [{"seed": s} for s in range(9)]
    results = Run(workers=Workers(2)).map(fakes.walk, items)
    ends = [fakes.walk(item)["end"] for item in items]
    assert [r["end"] for r in results] == ends


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_in_an_item_is_the_claims_error(jobs: int) -> None:
    paper = fakes.paper()
    paper.claim(name="only", **fakes.TEXTS)(lambda run: run.map(fakes.walk, [{}, {}]))
    (outcome,) = reproduce(paper, jobs=jobs).claims
    assert outcome.error == "KeyError: 'seed'"


def test_functions_whose_results_cannot_be_kept_are_refused() -> None:
    shift = 1

    def local(item: int) -> int:
        return item + shift

    for function in (local, lambda item: item, np.sum):
        with pytest.raises(TypeError, match="expected a function of a module"):
            Run().map(function, [1])
    with pytest.raises(TypeError, match="got a set"):
        Run(trials=Trials(Path("never"))).map(fakes.walk, [{1}])


def test_a_changed_source_computes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "changing_paper.py"
    results = []
    for body in ("item + 1", "item + 1", "item + 22"):
        module.write_text(f"def step(item):\n    return {body}\n")
        importlib.invalidate_caches()
        sys.modules.pop("changing_paper", None)
        step = importlib.import_module("changing_paper").step
        results += Run(trials=Trials(tmp_path / "trials")).map(step, [1])
    assert results == [2, 2, 23]
    assert len(list((tmp_path / "trials").iterdir())) == 2


def test_random_numbers_depend_on_seed_and_keys_alone() -> None:
    def first(seed: int, *keys: Any) -> float:
        return float(Run(seed=seed).rng(*keys).random())

    assert first(0, "data", 1) == first(0, "data", np.int64(1))
    draws = {first(0), first(1), first(0, "data"), first(0, "data", 1), first(0, "data", "1")}
    assert len(draws) == 5
    assert Run(scale="paper").rng("data").random() == first(0, "data")


def test_pick() -> None:
    assert Run().pick(quick=3, paper=100) == 3
    assert Run("paper").pick(quick=3, paper=100) == 100


# A cluster.


def test_on_a_cluster_the_evidence_is_the_same(tmp_path: Path) -> None:
    distributed = pytest.importorskip(
        "distributed", reason="the extra attoscope[cluster] is not installed"
    )
    here = reproduce(fakes.sweeping(), jobs=1)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        there = reproduce(
            fakes.sweeping(tmp_path / "log"), scheduler=cluster.scheduler_address, out=tmp_path
        )
    assert there.as_expected and ran(tmp_path / "log") == 6
    assert os.getpid() not in processes(tmp_path / "log")
    assert without_seconds(here.to_dict()) == without_seconds(there.to_dict())


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense", "what://x:1", ""])
def test_a_cluster_that_cannot_be_reached(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed", reason="the extra attoscope[cluster] is not installed")
    monkeypatch.setattr("attoscope.papers.running._REACH_SECONDS", 1)
    with pytest.raises(AttoscopeError, match="cannot be reached"):
        reproduce(fakes.declared(), scheduler=address)


def test_a_cluster_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(AttoscopeError, match=r"pip install 'attoscope\[cluster\]'"):
        reproduce(fakes.declared(), scheduler="tcp://127.0.0.1:1")
