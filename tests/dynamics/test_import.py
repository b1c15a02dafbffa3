"""Training needs no torch, and the example of the package runs."""

from __future__ import annotations

import doctest
import subprocess
import sys

import attoscope.dynamics


def test_no_torch() -> None:
    code = "import sys, attoscope.dynamics; print('torch' in sys.modules)"
    for first, found in (("", "False"), ("import torch; ", "True")):
        done = subprocess.run(
            [sys.executable, "-c", first + code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == found


def test_example() -> None:
    result = doctest.testmod(attoscope.dynamics)
    assert result.attempted >= 8 and result.failed == 0
