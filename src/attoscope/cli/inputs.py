"""Read what the command line names: text files, image folders, ready batches, spans."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attoscope.errors import AttoscopeError

_MARKS = (
    (b"\xef\xbb\xbf", "UTF-8-sig"),
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
# Control characters that no text holds; tabs, line and page ends are fine.
_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What to feed, how many documents it is if known, and where it came from."""

    data: Any
    total: int | None
    sources: tuple[str, ...]


def gather(
    text: list[str], images: Path | None, batch: Path | None, lines: bool
) -> Inputs | None:
    """The data that the options name; None when they name none."""
    given = [name for name, value in
             (("--text", text), ("--images", images), ("--batch", batch)) if value]  # fmt: skip
    if len(given) > 1:
        raise AttoscopeError(f"{' and '.join(given)} were given together; choose one")
    if images is not None:
        return _image_folder(images)
    if batch is not None:
        return Inputs(read_batch(batch), None, (batch.name,))
    if text:
        return _texts(text, lines)
    return None


def _texts(names: list[str], lines: bool) -> Inputs:
    paths = [path for name in names for path in _expand(name)]
    read = [_read(path) for path in paths]
    documents = [text for text, _ in read]
    if lines:
        documents = [line for text in documents for line in text.splitlines() if line.strip()]
    if not any(document.strip() for document in documents):
        raise AttoscopeError(
            f"{_named(paths)} {'holds' if len(paths) == 1 else 'hold'} no text; "
            "give at least one file with words in it"
        )
    sources = [
        Path(path).name + (f" (read as {encoding})" if encoding != "UTF-8" else "")
        for path, (_, encoding) in zip(paths, read, strict=True)
    ]
    return Inputs(documents, len(documents), tuple(sources[:20]))


def _expand(name: str) -> list[str]:
    path = Path(name)
    if name == "-" or not path.is_dir():
        return [name]
    files = sorted(str(f) for f in path.iterdir() if f.suffix in (".txt", ".md"))
    if not files:
        raise AttoscopeError(f"--text: the folder {name} holds no .txt or .md file")
    return files


def _read(name: str) -> tuple[str, str]:
    """A file's text and the encoding that it was read in."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise AttoscopeError(
            f"--text: {name} cannot be read ({error.strerror}); give a text file"
        ) from error
    for mark, encoding in _MARKS:
        if raw.startswith(mark):
            encodings: tuple[str, ...] = (encoding,)
            break
    else:
        # Windows-1252 leaves some bytes without a meaning, so other encodings mostly fail in it.
        encodings = ("UTF-8", "Windows-1252")
    for encoding in encodings:
        try:
            text = raw.decode(encoding)
        except UnicodeDecodeError:
            continue
        if not _CONTROL.search(text):
            return text.removeprefix("\ufeff"), encoding.removesuffix("-sig")
    raise AttoscopeError(
        f"--text: {name} is not text in an encoding that is known here (bytes without a meaning "
        "in UTF-8, or control characters); convert it to UTF-8, or use --images or --batch"
    )


def _named(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{len(paths)} files"


def _image_folder(folder: Path) -> Inputs:
    if not folder.is_dir():
        raise AttoscopeError(f"--images: {folder} is no folder; give a folder of images")
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in _IMAGES)
    if not files:
        raise AttoscopeError(
            f"--images: {folder} holds no image (looked for {', '.join(_IMAGES)})"
        )
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise AttoscopeError(
            "reading images needs the package pillow, which is not installed; run: "
            "pip install 'attoscope[images]'"
        ) from error
    return Inputs(_open_all(files), len(files), (f"{len(files)} images of {folder.name}",))


def _open_all(files: list[Path]) -> Iterator[Any]:
    from PIL import Image, UnidentifiedImageError

    for file in files:
        try:
            with Image.open(file) as image:
                # Palettes and alpha become colours; grey stays grey.
                yield image.copy() if image.mode in ("L", "RGB") else image.convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise AttoscopeError(
                f"--images: {file.name} is no image that can be read; remove it or convert it"
            ) from error


def read_batch(path: Path) -> dict[str, Any]:
    """A mapping of tensors from .safetensors, .npz or .pt (weights only: no code is run)."""
    if not path.is_file():
        raise AttoscopeError(
            f"--batch: {path} is no file; give a .safetensors, .npz or .pt file of tensors"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        if path.suffix == ".npz":
            import numpy as np

            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        if path.suffix in (".pt", ".pth", ".bin"):
            import torch

            loaded = torch.load(path, weights_only=True, map_location="cpu")
            if isinstance(loaded, dict):
                return loaded
            raise ValueError(f"it holds a {type(loaded).__name__}")
    except Exception as error:  # each format has its own errors; all mean the same to a user
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:150]
        raise AttoscopeError(
            f"--batch: {path.name} cannot be read ({reason}); expected a mapping of tensors such "
            "as input_ids and attention_mask"
        ) from error
    raise AttoscopeError(
        f"--batch: {path.name} has the ending {path.suffix or '(none)'}; expected .safetensors, "
        ".npz or .pt"
    )


def span(layers: str | None) -> tuple[int, int] | None:
    """`A:B` as numbers; either side may be left out."""
    if layers is None:
        return None
    first, colon, end = layers.partition(":")
    try:
        start = int(first) if first else 0
        stop = (int(end) if end else sys.maxsize) if colon else start + 1
    except ValueError as error:
        raise AttoscopeError(
            f"--layers: got {layers!r}; expected FIRST:END, such as 4:8, or one number"
        ) from error
    return start, stop


def row_count(rows: str) -> int | None:
    """A number of rows, or `all`."""
    if rows == "all":
        return None
    try:
        count = int(rows)
    except ValueError:
        count = 0
    if count < 1:
        raise AttoscopeError(f"--rows: got {rows!r}; expected a number from 1 on, or all")
    return count


def writable(folder: Path) -> Path:
    """The folder, tried without making it: an error now rather than after the work."""
    import tempfile

    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise AttoscopeError(
            f"--out: {folder} cannot be written to ({error.strerror}); give a folder that can"
        ) from error
    return folder


def made(folder: Path) -> Path:
    """The folder, made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AttoscopeError(
            f"--out: {folder} cannot be made ({error.strerror}); give a folder that can"
        ) from error
    return folder
