"""A model and a batch for the command line that need no tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.models import EXAMPLES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random decoder without tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    EXAMPLES["gpt2"].build().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids for it, in a file."""
    file = tmp_path_factory.mktemp("batch") / "batch.safetensors"
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, file)
    return file
