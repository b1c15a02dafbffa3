"""Finished items on disk: plain data and arrays in .npz files, which can hold no code.

A value is a tree of JSON, in which arrays are numbers of entries of the same file. Entries are
written whole; one that cannot be read counts as not there.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attoscope.report.files import write_whole

Arrays = list[NDArray[Any]]


def pack(value: Any) -> bytes:
    """Plain data (None, numbers, text, lists, tuples, dicts) and numpy arrays as bytes.

    Raises TypeError for anything else.
    """
    arrays: Arrays = []
    tree = json.dumps(_tree(value, arrays)).encode()
    file = io.BytesIO()
    named = {f"a{i}": array for i, array in enumerate(arrays)}
    np.savez(file, allow_pickle=False, tree=np.frombuffer(tree, np.uint8), **named)
    return file.getvalue()


def unpack(data: bytes) -> Any:
    """The value that `pack` was given, with its types."""
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        return _value(json.loads(stored["tree"].tobytes()), stored)


def digest(value: Any) -> str:
    """A name for a value that `pack` takes: equal values have equal names on every machine."""
    arrays: Arrays = []
    seen = hashlib.sha256(json.dumps(_tree(value, arrays)).encode())
    for array in arrays:
        seen.update(f"{array.dtype.str}{array.shape}".encode())
        seen.update(array.tobytes())
    return seen.hexdigest()[:40]


def _tree(value: Any, arrays: Arrays) -> Any:
    """JSON for the value; what JSON has no word for is a one-entry dict that says its kind."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        arrays.append(np.asarray(value))
        return {"array" if isinstance(value, np.ndarray) else "scalar": len(arrays) - 1}
    if type(value) is list:
        return [_tree(each, arrays) for each in value]
    if type(value) is tuple:
        return {"tuple": [_tree(each, arrays) for each in value]}
    if type(value) is dict:
        return {"dict": [[_tree(k, arrays), _tree(v, arrays)] for k, v in value.items()]}
    raise TypeError(
        f"got a {type(value).__name__}; expected plain data (None, numbers, text, lists, tuples, "
        "dicts) and numpy arrays: take apart what is anything else"
    )


def _value(tree: Any, arrays: Any) -> Any:
    if isinstance(tree, list):
        return [_value(each, arrays) for each in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tuple":
        return tuple(_value(each, arrays) for each in content)
    if kind == "dict":
        return {_value(k, arrays): _value(v, arrays) for k, v in content}
    array = arrays[f"a{content}"]
    return array if kind == "array" else array[()]


@dataclass(frozen=True, slots=True)
class Trials:
    """The finished items of one claim at one scale and seed, a file each."""

    folder: Path

    def get(self, key: str) -> tuple[Any] | None:
        """The value kept under this key, in a tuple; None where there is none, or a broken one."""
        try:
            return (unpack((self.folder / f"{key}.npz").read_bytes()),)
        except Exception:  # whatever is wrong with an entry, computing it again is the answer
            return None

    def put(self, key: str, data: bytes) -> None:
        """Keeps packed data under this key."""
        write_whole(self.folder / f"{key}.npz", data)

    def clear(self) -> None:
        """Forgets all."""
        shutil.rmtree(self.folder, ignore_errors=True)
