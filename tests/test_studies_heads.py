"""The study of heads in its smallest form: it runs, and its nulls are where they must be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from studies import heads_figures as figures
from studies.heads import Part, kept, tables
from studies.heads_measure import FILTERS, records
from studies.heads_models import fresh, repeated, training
from studies.heads_rank import CUT, RankPart, cut, rank_record, rank_tables, solver
from studies.heads_summary import auc, discrimination, plain, pooled, share
from studies.heads_training import followed
from tests.test_maxmargin import at_random, subject_and_batch


def test_what_follows_is_where_the_study_says() -> None:
    ids, periods = repeated(8, np.random.default_rng(0))
    for row, p in zip(ids.tolist(), periods, strict=True):
        for t in range(int(p), len(row) - 1):
            # The key to choose from position t holds what comes next.
            assert row[t + 1] == row[t - p + 1]
        assert len(set(row[:p])) == p


def test_a_twin_has_other_weights_and_the_same_seed_the_same_ones() -> None:
    subject, _ = subject_and_batch()
    one, same, other = (fresh(subject, seed) for seed in (1, 1, 2))
    read = [next(s.model.parameters()) for s in (one, same, other)]
    assert torch.equal(read[0], read[1]) and not torch.equal(read[0], read[2])


def test_auc_and_shares() -> None:
    assert auc(np.array([1.0, 2.0]), np.array([0.0, 1.0])) == 0.875
    assert np.isnan(auc(np.array([np.nan]), np.array([1.0])))
    assert share([[1.0, 2], [2.0, 4]]) == 0.5
    records_ = [{"held_out": {"svm": [[1.0, 2], [3.0, 6]]}}] * 3
    row = pooled(records_, "svm", "held_out", 0)
    # Every head and document says one half: so does every replicate.
    assert row == {"value": 0.5, "interval": [0.5, 0.5], "heads": 3}


def test_the_smallest_study(tmp_path: Path) -> None:
    subject, data = subject_and_batch(documents=6)
    settings = {"queries": 48, "filters": FILTERS[:2], "workers": 1, "sites": ("decoder.1",)}
    found = {
        "trained": records(subject, data, **settings),
        "fresh": records(fresh(subject, 5), data, seed=1, **settings),
    }
    assert len(found["trained"]) == 4 * 2
    part = Part("llama", "head", 6, 11, 48, 1, 1, FILTERS[:2])
    made = plain(tables(part, found))
    # Nothing here is trained: the random selector is no worse, and both are above chance.
    shares = {(r["weights"], r["learner"]): r for r in made["held_out"] if r["filter"] == "all"}
    own, null = (shares[w, "svm"]["value"] for w in ("trained", "trained, random selector"))
    assert abs(own - null) < 0.25 and min(own, null) > shares["trained", "chance"]["value"]
    rows = discrimination(found["trained"][::2], found["fresh"][::2], 0)
    assert {r["statistic"] for r in rows} >= {"alignment", "SVM above random selector"}
    whole = {"scale": "test", "parts": {"llama": made}, "training": []}
    paths = figures.write(whole, tmp_path)
    assert [p.name for p in paths] == ["heads-held-out.svg", "heads-discriminate.svg"]
    assert all(p.read_text().startswith("<svg") for p in paths)


def test_the_cut_keeps_the_largest_directions() -> None:
    assert np.allclose(cut(np.diag([1.0, 3.0, 2.0]), 2), np.diag([0.0, 3.0, 2.0]))


def test_a_head_of_low_rank_beside_svms_under_its_rank() -> None:
    rng = np.random.default_rng(3)
    (left, _), (right, _) = (np.linalg.qr(rng.standard_normal((6, 2))) for _ in range(2))
    weight = left @ right.T
    head = at_random(0).rechosen(weight)
    assert head is not None
    record = rank_record(head, "trained", 5.0, 0)
    assert record["rank"] == 2
    for learner in ("SVM, own rank", CUT):
        assert 1.0 <= record["stable_rank"][learner] <= 2.0 + 1e-9
    ranks = {}
    for name in ("SVM, Frobenius", "SVM, own rank"):
        model = solver(name, 2, 5.0, [])(head)
        assert model is not None
        ranks[name] = int(np.linalg.matrix_rank(model.weight_, tol=1e-9))
    assert ranks == {"SVM, Frobenius": 6, "SVM, own rank": 2}
    assert record["cost"] > 0.0 and record["between"] < 1.0
    assert record["cosine"]["SVM, own rank"] > record["cosine"][CUT] > 0.5
    # Choices that no weight makes: no SVM, and nothing that stands for one.
    none = rank_record(at_random(0), "trained, random selector", 5.0, 0)
    assert none["held_out"]["SVM, Frobenius"] is None and set(none["cosine"]) == {CUT}
    made = rank_tables(RankPart("planted", 40, 8, 160, 1, (0,), 5.0), [record, none])
    rows = {row["learner"]: row for row in made["rows"]}
    own, null = (
        rows[CUT]["held_out"][k]["value"] for k in ("trained", "trained, random selector")
    )
    assert own > 0.5 > null and rows[CUT]["above"]["trained"]["value"] == pytest.approx(
        own - null
    )
    assert rows["SVM, own rank"]["held_out"]["trained"]["value"] > own
    assert rows["SVM, own rank"]["held_out"]["trained, random selector"] is None
    assert made["fits"]["SVM, Frobenius"] == {"fits": 6, "stopped": 0, "none": 3}
    # No time at all: a fit says that it was stopped.
    late: list[dict[str, object]] = []
    for name in ("SVM, Frobenius", "SVM, nuclear"):
        solver(name, 2, 1e-9, late)(head)
    assert [fit["stopped"] for fit in late] == [True, True]


def test_training_is_followed() -> None:
    rows = followed(0, 2, workers=1, queries=24, at=(0, 2))
    assert {r["space"] for r in rows} == {"head", "stream"}
    assert {r["step"] for r in rows} == {0, 2}
    last = [r for r in rows if r["step"] == 2 and r["space"] == "stream"]
    assert len(last) == 8 and all(-1 <= r["moved"] <= 1 for r in last)
    steps = [step for step, _, _ in training(0, 1, (0, 1))]
    assert steps == [0, 1]


def test_finished_parts_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTOSCOPE_CACHE", str(tmp_path))
    calls: list[int] = []

    def run() -> dict[str, float]:
        calls.append(1)
        return {"value": float("nan")}

    for again in (False, False, True):
        assert kept("a part", 1, run, again) == {"value": None}
    assert len(calls) == 2
    assert json.loads(next((tmp_path / "studies").glob("heads-*")).read_text()) == {
        "value": None
    }
