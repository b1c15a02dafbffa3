"""What is no treated model on disk: one sentence each, whatever is wrong with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attoscope
from attoscope import AttoscopeError
from tests.remedies.treated import sized

CANNOT = "cannot be read"


@pytest.fixture(scope="module")
def treated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("treated")
    subject, _ = sized("bert")
    attoscope.treat(subject.model, "neutreno", anchor="mean")
    subject.model.save_pretrained(folder)
    return folder


def refused(folder: Path, config: str, match: str = CANNOT) -> None:
    path = folder / "config.json"
    before = path.read_text()
    path.write_text(config)
    try:
        with pytest.raises(AttoscopeError, match=match) as caught:
            attoscope.load_treated(folder)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    finally:
        path.write_text(before)


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    return json.dumps(config)


def test_the_untouched_directory_loads(treated: Path) -> None:
    model = attoscope.load_treated(treated)
    assert attoscope.treatments_of(model)[0].remedy == "neutreno"


@pytest.mark.parametrize("value", [5, "x", [5], {}, [{}], [[]], [None], True])
def test_records_of_other_types(treated: Path, value: Any) -> None:
    refused(treated, edited(treated, lambda c: c.update(attoscope_treatments=value)))


FIELDS: list[tuple[str, Any]] = [
    *(("options", v) for v in (None, "x", 5, [], {"strength": 10**400}, {"strength": "a"},
                               {"strength": 0.6, "other": 1}, {"anchor": ["first"]})),
    *(("split", v) for v in ([[[]]], 5, "x", [5], [None])),
    *(("layers", v) for v in (None, -1, 0, 10**30, "4", 2.5, True)),
    *(("places", v) for v in (None, 5, [], [5], {}, [None], "x")),
    *(("remedy", v) for v in (None, 5, [], {}, "other")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), FIELDS)
def test_fields_of_other_types(treated: Path, name: str, value: Any) -> None:
    text = edited(treated, lambda c: c["attoscope_treatments"][0].update({name: value}))
    refused(treated, text)


WRONG: list[Any] = [None, -1, 10**30, "x", 2.5, [], {}, [[[]]], True]


def kept(old: Any, new: Any) -> bool:
    """Whether a value is of the same type as before and may be read (it fails elsewhere)."""
    return type(old) is type(new) and new not in (-1, 10**30)


def test_every_field_of_a_place_is_checked(treated: Path) -> None:
    config = json.loads((treated / "config.json").read_text())
    place = config["attoscope_treatments"][0]["places"][1]
    tried = 0
    for inside in ((), ("heads",), ("sees",), ("sees", "masks", 0)):
        held: Any = place
        for step in inside:
            held = held[step]
        for name, old in held.items():
            for new in WRONG:
                optional = name in ("sees", "position") and (new is None or kept(0, new))
                if kept(old, new) or optional:
                    continue
                changed = copy.deepcopy(config)
                at: Any = changed["attoscope_treatments"][0]["places"][1]
                for step in inside:
                    at = at[step]
                at[name] = new
                refused(treated, json.dumps(changed), match=rf"{CANNOT}.*{name}")
                tried += 1
            missing = copy.deepcopy(config)
            at = missing["attoscope_treatments"][0]["places"][1]
            for step in inside:
                at = at[step]
            del at[name]
            if name != "sees":
                refused(treated, json.dumps(missing))
    assert tried > 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", 0),
        ("count", 2**20),
        ("size", 1),
        ("repeat", 2**20),
        ("start", 1),
        ("stride", 0),
    ],
)
def test_heads_that_do_not_fit_the_model(treated: Path, field: str, value: int) -> None:
    def change(config: dict[str, Any]) -> None:
        config["attoscope_treatments"][0]["places"][1]["heads"][field] = value

    refused(treated, edited(treated, change), match=f"{CANNOT}.*do not fit")


@pytest.mark.parametrize("text", ["{", "", "[]", "5", "[" * 10**5, '{"a":' * 10**5, "\udcff"])
def test_broken_json(treated: Path, text: str) -> None:
    refused(treated, text) if text != "\udcff" else None
    if text == "\udcff":
        path = treated / "config.json"
        before = path.read_bytes()
        path.write_bytes(b"\xff\xfe{")
        with pytest.raises(AttoscopeError, match=CANNOT):
            attoscope.load_treated(treated)
        path.write_bytes(before)


@pytest.mark.parametrize("value", [["pipeline"], ["AutoModel"], ["Mine"], 5, [5], "x", None])
def test_a_class_that_is_no_model_of_transformers(treated: Path, value: Any) -> None:
    text = edited(treated, lambda c: c.update(architectures=value))
    refused(treated, text, match=f"{CANNOT}|expected a model of transformers")


def test_an_unknown_model_type_and_sizes_of_no_model(treated: Path) -> None:
    for change in ({"model_type": "mine"}, {"model_type": 5}, {"hidden_size": "x"},
                   {"num_hidden_layers": 1}):  # fmt: skip
        refused(treated, edited(treated, lambda c, new=change: c.update(new)), "cannot|has no")


def test_missing_weights_and_what_is_no_path(treated: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((treated / "config.json").read_text())
    with pytest.raises(AttoscopeError, match=CANNOT):
        attoscope.load_treated(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(AttoscopeError, match=CANNOT):
        attoscope.load_treated(tmp_path)
    for value in (None, 5):
        with pytest.raises(Exception, match="cannot be read|directory"):
            attoscope.load_treated(value)  # type: ignore[arg-type]
