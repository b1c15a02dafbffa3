"""The examples' assets are what they say they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, AutoTokenizer

from examples import assets


def test_the_vision_transformer_reads_digits_through_its_own_preprocessor(
    vit_digits: Path, tmp_path: Path
) -> None:
    # Test images of train_vit.py and training images alike: a smoke test, not a measurement.
    paths = assets.digits(tmp_path, 100)
    processor = AutoImageProcessor.from_pretrained(vit_digits)
    pixels = processor([Image.open(path) for path in paths], return_tensors="pt")
    assert pixels["pixel_values"].shape == (100, 3, 8, 8)
    model = AutoModelForImageClassification.from_pretrained(vit_digits).eval()
    with torch.no_grad():
        guesses = model(**pixels).logits.argmax(-1).tolist()
    right = sum(
        path.stem.endswith(f"is-{guess}") for path, guess in zip(paths, guesses, strict=True)
    )
    assert right >= 95


def test_articles_are_distinct_and_topics_take_turns(bbc: list[Path]) -> None:
    texts = [path.read_bytes() for path in bbc]
    assert len(set(texts)) == len(bbc) == 16
    assert {path.parent.name for path in bbc[:5]} == set(assets.BBC_TOPICS)


def test_copies_with_other_spacing_are_duplicates(tmp_path: Path) -> None:
    for name, text in {"a": "one  two\n", "b": "one two", "c": "three", "d": " \n"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    assert [path.stem for path in assets.distinct(tmp_path)] == ["a", "c"]


def test_more_articles_than_there_are_is_an_error(bbc: list[Path]) -> None:
    with pytest.raises(ValueError, match="99999 articles were asked for and there are"):
        assets.bbc(99999)


def test_reactions_are_split_into_atoms_and_nothing_is_unknown(reaction_bert: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reaction_bert)
    for reaction in assets.REACTIONS:
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(reaction)["input_ids"])
        assert "".join(tokens[1:-1]) == reaction
        assert [tokens[0], tokens[-1]] == ["[CLS]", "[SEP]"]


def test_a_package_that_is_not_there_is_named_with_the_way_to_get_it() -> None:
    with pytest.raises(assets.MissingAsset, match="no-such-thing is not.*pip install"):
        assets.locate("no-such-thing", "model")


def test_a_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTOSCOPE_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("a file")
        raise RuntimeError("stopped half way")

    with pytest.raises(RuntimeError, match="half way"):
        assets.cached("model", fail)
    assert list(tmp_path.iterdir()) == []
    built = assets.cached("model", lambda folder: (folder / "whole").touch())
    assert [path.name for path in built.iterdir()] == ["whole"]
