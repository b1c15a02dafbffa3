"""Feeding: truncation, padding on either side, special tokens, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from attoscope.errors import AttoscopeError
from attoscope.trace import Batch, Counts, Subject, batches, shuffled
from tests.models import make


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Subject:
    return Subject.load(minilm)


def test_texts_are_padded_on_the_right_and_marked(encoder: Subject) -> None:
    counts = Counts()
    (batch,) = batches(encoder, ["A cat sat.", "One", "A much longer text"], counts=counts)
    assert batch.documents == (0, 1, 2)
    assert batch.valid is not None and batch.special is not None
    assert batch.valid.sum(1).tolist() == [6, 3, 6]
    assert batch.special[:, 0].all() and batch.special.sum(1).tolist()[1] == 2 + 3
    assert (counts.documents, counts.tokens, counts.truncated) == (3, 15, 0)


def test_documents_are_numbered_on(encoder: Subject) -> None:
    made = list(batches(encoder, [f"text {i}" for i in range(5)], batch_size=2))
    assert [b.documents for b in made] == [(0, 1), (2, 3), (4,)]


def test_truncation_is_counted_and_keeps_the_closing_token(encoder: Subject) -> None:
    counts = Counts()
    (batch,) = batches(encoder, "word " * 50, max_tokens=10, counts=counts)
    ids = batch.inputs["input_ids"][0]
    assert len(ids) == 10 and ids[-1] == encoder.tokenizer.sep_token_id
    assert (counts.truncated, counts.dropped_tokens) == (1, 52 - 10)


def test_texts_beyond_the_position_table_are_cut_to_it() -> None:
    subject, _ = make("bert")
    ids = torch.randint(3, 60, (2, 200), generator=torch.Generator().manual_seed(0))
    counts = Counts()
    (batch,) = batches(subject, {"input_ids": ids}, max_tokens=10_000, counts=counts)
    assert batch.inputs["input_ids"].shape == (2, 64)
    assert (counts.truncated, counts.dropped_tokens) == (2, 2 * 136)
    subject.run(batch)


def test_a_table_that_starts_after_the_padding_index_is_shorter() -> None:
    """RoBERTa's first position is 2 when the padding index is 1."""
    subject, _ = make("roberta")
    ids = torch.randint(3, 60, (1, 100), generator=torch.Generator().manual_seed(0))
    (batch,) = batches(subject, {"input_ids": ids}, max_tokens=10_000)
    assert batch.inputs["input_ids"].shape[1] == 63  # padding index 0
    subject.run(batch)


def test_empty_documents_are_left_out_and_counted(encoder: Subject) -> None:
    counts = Counts()
    (batch,) = batches(encoder, ["", "  \n", "a word"], counts=counts)
    assert batch.documents == (0,) and counts.empty == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no text or image was given"),
        (["", " "], "2 text.s. given and none holds a token"),
        (7, "data: got int; expected a text"),
        ([3, 4], "an iterable of int"),
        (["fine", 5], "text number 1 is a int; expected a string"),
        ({}, "a mapping of nothing; expected at least one tensor"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long),
          "attention_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])},
         "1 of 2 sequences are padding only"),
        (np.zeros((2, 2, 2, 2, 2), np.int64), "got an array of torch.int64 with shape"),
        (torch.zeros(3, 0, 8), "in which there is nothing"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, "with something in it"),
        ({"input_ids": [[1, 2], [1]]}, "input_ids cannot be made a tensor"),
    ],
)  # fmt: skip
def test_what_cannot_be_fed(encoder: Subject, data: object, message: str) -> None:
    with pytest.raises(AttoscopeError, match=message):
        list(batches(encoder, data))


def test_text_without_a_tokenizer_says_what_to_do() -> None:
    subject, _ = make("bert")
    with pytest.raises(AttoscopeError, match="has no tokenizer.*--batch"):
        list(batches(subject, "text"))


def test_max_tokens_must_be_positive(encoder: Subject) -> None:
    with pytest.raises(AttoscopeError, match="max_tokens: got 0"):
        list(batches(encoder, "text", max_tokens=0))
    with pytest.raises(AttoscopeError, match="got 2, but the tokenizer adds 2 special tokens"):
        list(batches(encoder, "text", max_tokens=2))
    (batch,) = batches(encoder, "some text", max_tokens=3)
    assert batch.inputs["input_ids"].shape == (1, 3)


def test_left_padding_is_moved_with_everything_that_is_per_token() -> None:
    subject, _ = make("bert")
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    embeddings = ids[..., None].float()
    (batch,) = batches(
        subject, {"input_ids": ids, "attention_mask": mask, "inputs_embeds": embeddings}
    )
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 0, 0], [8, 9, 10, 11, 12]]
    assert batch.valid is not None and batch.valid[0].tolist() == [True] * 3 + [False] * 2
    assert batch.inputs["inputs_embeds"][0, :3, 0].tolist() == [5.0, 6.0, 7.0]


def test_one_sequence_without_a_batch_axis() -> None:
    subject, _ = make("gpt2")
    (batch,) = batches(subject, {"input_ids": torch.tensor([4, 5, 6])})
    assert batch.inputs["input_ids"].shape == (1, 3)
    (batch,) = batches(subject, torch.tensor([4, 5, 6]))
    assert batch.inputs["input_ids"].shape == (1, 3)


def test_an_endless_iterator_is_read_as_needed(encoder: Subject) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield f"text number {read}"

    stream = batches(encoder, endless(), batch_size=2)
    assert next(stream).documents == (0, 1)
    assert read <= 3


def test_a_tokenizer_without_a_padding_token(encoder: Subject, minilm: Path) -> None:
    subject = Subject.load(minilm)
    subject.tokenizer.pad_token = None
    (plain,) = batches(encoder, ["one two three", "one"])
    (bare,) = batches(subject, ["one two three", "one"])
    assert plain.valid is not None and bare.valid is not None
    assert torch.equal(plain.valid, bare.valid)


def test_an_encoder_decoder_reads_the_text_shifted() -> None:
    subject, _ = make("t5")
    ids = torch.tensor([[5, 6, 7, 8]])
    (batch,) = batches(subject, {"input_ids": ids})
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 5, 6, 7]]
    assert batch.decoder_valid is not None and batch.decoder_valid.all()


def test_images_go_through_the_models_own_processor(
    vit_digits: Path, digit_images: Path
) -> None:
    from PIL import Image

    subject = Subject.load(vit_digits)
    files = sorted(digit_images.glob("*.png"))[:3]
    images = [Image.open(file) for file in files]
    (batch,) = batches(subject, images)
    arrays = np.stack([np.asarray(image) for image in images])
    (same,) = batches(subject, arrays)
    torch.testing.assert_close(batch.inputs["pixel_values"], same.inputs["pixel_values"])
    assert batch.documents == (0, 1, 2)


def test_images_without_a_processor() -> None:
    subject, _ = make("vit")
    with pytest.raises(AttoscopeError, match="no image processor"):
        list(batches(subject, np.zeros((2, 8, 8, 3), np.uint8)))
    (batch,) = batches(subject, torch.zeros(2, 1, 8, 8))
    assert set(batch.inputs) == {"pixel_values"}


def test_shuffling_keeps_the_words_and_the_special_tokens(encoder: Subject) -> None:
    (batch,) = batches(encoder, ["one two three four five six seven", "short text"])
    mixed = shuffled(encoder, batch, seed=0)
    assert mixed is not None and batch.valid is not None and batch.special is not None
    before, after = batch.inputs["input_ids"], mixed.inputs["input_ids"]
    assert not torch.equal(before, after)
    fixed = batch.special | ~batch.valid
    assert torch.equal(before[fixed], after[fixed])
    assert torch.equal(before.sort(1).values, after.sort(1).values)
    again = shuffled(encoder, batch, seed=0)
    assert again is not None and torch.equal(again.inputs["input_ids"], after)


def test_patches_are_shuffled_whole() -> None:
    subject, batch = make("vit")
    mixed = shuffled(subject, batch, seed=0)
    assert mixed is not None

    def patches(pixels: torch.Tensor) -> list[tuple[float, ...]]:
        cut = torch.nn.functional.unfold(pixels[:1], 2, stride=2)[0].T
        return sorted(map(tuple, cut.tolist()))

    before, after = batch.inputs["pixel_values"], mixed.inputs["pixel_values"]
    assert not torch.equal(before, after)
    assert patches(before) == patches(after)


def test_what_has_no_tokens_is_not_shuffled() -> None:
    subject, _ = make("attention")
    assert shuffled(subject, Batch((torch.randn(2, 5, 32),), (0, 1)), seed=0) is None


def test_vectors_are_shuffled_along_time() -> None:
    for name in ("attention", "attention_time_first"):
        subject, batch = make(name)
        mixed = shuffled(subject, batch, seed=0)
        assert mixed is not None
        axis = 0 if name.endswith("first") else 1
        before, after = (x.inputs.sort(axis).values for x in (batch, mixed))
        assert torch.equal(before, after) and not torch.equal(batch.inputs, mixed.inputs)


def test_a_tokenizers_own_output_is_a_mapping(encoder: Subject) -> None:
    made = encoder.tokenizer(["A long text about something.", "Short."], padding=True,
                             return_tensors="pt")  # fmt: skip
    (batch,) = batches(encoder, made)
    assert batch.documents == (0, 1) and batch.inputs["input_ids"].shape[0] == 2


def test_an_unknown_word_is_no_special_token(encoder: Subject) -> None:
    (batch,) = batches(encoder, "hello \U0001f600 world")
    ids = batch.inputs["input_ids"][0].tolist()
    assert batch.special is not None and encoder.tokenizer.unk_token_id in ids
    assert batch.special[0].tolist() == [True, False, False, False, True]


def test_lists_of_token_ids(encoder: Subject) -> None:
    counts = Counts()
    (batch,) = batches(encoder, [[101, 2000, 102], [101, 102, 5, 6, 7]], max_tokens=4,
                       counts=counts)  # fmt: skip
    assert batch.valid is not None and batch.valid.sum(1).tolist() == [3, 4]
    assert (counts.truncated, counts.dropped_tokens) == (1, 1)


def test_vectors_of_different_lengths() -> None:
    subject, _ = make("attention")
    made = list(batches(subject, (torch.randn(n, 32).numpy() for n in (4, 7))))
    assert [b.inputs.shape for b in made] == [(1, 4, 32), (1, 7, 32)]
    assert [b.documents for b in made] == [(0,), (1,)]
