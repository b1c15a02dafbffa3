"""Arrays, images and positional inputs as batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attoscope.errors import AttoscopeError
from attoscope.trace.counts import Counts
from attoscope.trace.ready import from_mapping, numbered
from attoscope.trace.subject import Subject
from attoscope.trace.types import Batch


def from_array(
    subject: Subject, data: Any, limit: int, size: int, counts: Counts
) -> Iterable[Batch]:
    """Token ids (integers, two axes), images (uint8), or whatever floats the module takes."""
    # A copy: arrays may be read-only, and a tensor that shares their memory must not be.
    tensor = data if isinstance(data, Tensor) else torch.tensor(data)
    if not tensor.numel():
        raise AttoscopeError(
            f"data: got an array of shape {tuple(tensor.shape)}, in which there is nothing; "
            "expected at least one token or image"
        )
    if tensor.dtype == torch.uint8 and tensor.dim() in (3, 4):
        return from_images(subject, list(tensor.numpy()), size, counts)
    if not tensor.is_floating_point() and tensor.dim() in (1, 2):
        return from_mapping(subject, {"input_ids": tensor}, limit, size, counts)
    if tensor.dim() == 4 and subject.takes("pixel_values"):
        return from_mapping(subject, {"pixel_values": tensor}, limit, size, counts)
    if tensor.is_floating_point() and tensor.dim() >= 2:
        axis = _axis(subject, tensor)
        parts = tensor.split(size, axis) if tensor.dim() > 2 else [tensor]
        return (_plain(part, _documents(subject, part), counts) for part in parts)
    raise AttoscopeError(
        f"data: got an array of {tensor.dtype} with shape {tuple(tensor.shape)}; expected token "
        "ids (sequence, token), images (image, height, width[, channel]) as uint8, or floats "
        "(sequence, token, width)"
    )


def from_floats(subject: Subject, arrays: Iterable[Any], counts: Counts) -> Iterator[Batch]:
    """Float arrays one by one, since their lengths may differ: each a sequence, or a batch."""
    for array in arrays:
        tensor = array if isinstance(array, Tensor) else torch.tensor(array)
        if tensor.dim() == 2 and tensor.is_floating_point():
            tensor = tensor.unsqueeze(subject.batch_axis(tensor[None]))
        yield from from_array(subject, tensor, 10**9, 10**9, counts)


def positional(subject: Subject, inputs: tuple[Tensor, ...], counts: Counts) -> Batch:
    """Positional arguments, fed as they are."""
    return _plain(inputs, _documents(subject, inputs[0]), counts)


def from_images(
    subject: Subject, images: Iterable[Any], size: int, counts: Counts
) -> Iterator[Batch]:
    """Pictures through the model's own image processor, or float arrays as pixel values."""
    iterator = iter(images)
    while chunk := list(islice(iterator, size)):
        yield numbered(subject, {"pixel_values": _pixels(subject, chunk)}, counts)


def _pixels(subject: Subject, images: list[Any]) -> Tensor:
    if all(_is_float(image) for image in images):
        return torch.stack([torch.tensor(np.asarray(image)) for image in images])
    if subject.image_processor is None:
        raise AttoscopeError(
            f"{subject.name} has no image processor, so raw images cannot be fed; put "
            "preprocessor_config.json beside the model, or give pixel values as floats "
            "(image, channel, height, width)"
        )
    try:
        prepared = [_with_channels(image) for image in images]
        pixels = subject.image_processor(images=prepared, return_tensors="pt")["pixel_values"]
        return torch.as_tensor(pixels)
    except (ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        raise AttoscopeError(
            f"images cannot be prepared for {subject.name} ({str(error).splitlines()[0]}); "
            "expected images of the kind that its preprocessor_config.json describes"
        ) from error


def _with_channels(image: Any) -> Any:
    """A grey array without a channel axis becomes a grey image, which processors understand."""
    if isinstance(image, (Tensor, np.ndarray)) and image.ndim == 2:
        from PIL import Image

        return Image.fromarray(np.asarray(image))
    return image


def _is_float(image: Any) -> bool:
    return isinstance(image, (Tensor, np.ndarray)) and np.asarray(image).dtype.kind == "f"


def _plain(inputs: Any, documents: int, counts: Counts) -> Batch:
    numbers = tuple(range(counts.documents, counts.documents + documents))
    counts.documents += documents
    counts.limit = None
    return Batch(inputs, numbers)


def _axis(subject: Subject, tensor: Tensor) -> int:
    floats = tensor.is_floating_point() and tensor.dim() == 3
    return subject.batch_axis(tensor) if floats else 0


def _documents(subject: Subject, tensor: Tensor) -> int:
    """How many sequences an input holds; two axes of floats are one sequence."""
    if tensor.is_floating_point() and tensor.dim() == 2:
        return 1
    return int(tensor.shape[_axis(subject, tensor)])
