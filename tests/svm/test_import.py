"""The heart knows nothing of models, and needs no folder that can be written to."""

from __future__ import annotations

import os
import subprocess
import sys


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=170, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout


def test_no_torch() -> None:
    code = "import sys, attoscope.svm; print('torch' in sys.modules)"
    assert python(code).strip() == "False"
    assert python("import torch; " + code).strip() == "True"


def test_a_cache_that_cannot_be_written() -> None:
    """Numba then compiles anew in each process; here only one small kernel has to."""
    code = (
        "from attoscope.svm._kernels import clip\n"
        "print(clip(-1.0, False, 2.0), clip(-1.0, True, 2.0), clip(3.0, False, 2.0))"
    )
    # A path below a file: no user, not even root, can make a folder there.
    assert python(code, NUMBA_CACHE_DIR=f"{__file__}/none").split() == ["0.0", "-1.0", "2.0"]
