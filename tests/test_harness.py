"""The promises that the test set-up itself makes."""

from __future__ import annotations

import socket
import warnings

import jaxtyping
import pytest
import torch

from attoscope.measures.base import first_tokens


def test_shapes_in_signatures_are_checked() -> None:
    assert first_tokens(torch.ones(2, 3, dtype=torch.bool)).sum() == 2
    with pytest.raises(jaxtyping.TypeCheckError, match="batch token"):
        first_tokens(torch.ones(3, dtype=torch.bool))


def test_warnings_are_errors() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_there_is_no_network() -> None:
    with socket.socket() as outside, pytest.raises(OSError, match="tests have no network"):
        outside.connect(("192.0.2.1", 80))


def test_torch_has_one_thread() -> None:
    assert torch.get_num_threads() == 1
