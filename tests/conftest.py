"""One thread, no network, and the packaged models by name."""

from __future__ import annotations

import os

# Before torch is imported by anything: small models run faster on one thread than on two.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import assets

torch.set_num_threads(1)

LOCAL = ("127.0.0.1", "::1", "localhost")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for the network fails, whatever the machine would allow."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in LOCAL:
            raise OSError(f"tests have no network; something tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same random state, in whatever order they run."""
    torch.manual_seed(0)
    yield


def packaged(find: Callable[[], Path]) -> Path:
    """A packaged asset; a skip where it is not installed, an error where it has to be."""
    try:
        return find()
    except assets.MissingAsset as missing:
        if os.environ.get("ATTOSCOPE_REQUIRE_ASSETS"):
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def minilm() -> Path:
    return packaged(assets.minilm)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return packaged(assets.smollm2_gguf)


@pytest.fixture(scope="session")
def reaction_bert() -> Path:
    return packaged(lambda: assets.reaction_bert("bert_ft"))


@pytest.fixture(scope="session")
def bbc() -> list[Path]:
    """Sixteen news articles, no two the same."""
    packaged(assets.bbc_folder)
    return assets.bbc(16)


@pytest.fixture(scope="session")
def vit_digits() -> Path:
    return assets.VIT_DIGITS


@pytest.fixture(scope="session")
def digit_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 32 handwritten digits as PNG files."""
    folder = tmp_path_factory.mktemp("digits")
    assets.digits(folder, 32)
    return folder
