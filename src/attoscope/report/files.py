"""Write a file whole, or leave what was there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from attoscope.errors import AttoscopeError


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Put bytes, or text as UTF-8, at `path` and return the path.

    They go to a temporary file in the same directory, which then takes the place of `path`: a
    reader never sees half a file, and an interrupted run leaves the old one.
    """
    target = Path(path)
    # Tokens of a byte-level model can hold half a character, which UTF-8 cannot.
    data = (
        content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    )
    name = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except OSError as error:
        raise AttoscopeError(
            f"{target} cannot be written ({error.strerror or error}); a writable path was "
            "expected: choose another directory."
        ) from error
    finally:
        if name is not None and os.path.exists(name):
            os.unlink(name)
    return target


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
