"""Conversion of images to inputs of models that take 1x3xHxW FP32 (Pillow is optional)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from catenary.errors import InvalidInputError
from catenary.tensors import Array
from catenary.types import ModelMetadata, TensorInfo

# Pixels that EfficientNet's evaluation removes from the shorter side before the centre crop.
_CROP_PADDING = 32
_DEFAULT_SIDE = 224


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Normalisation of pixels, which become (value - mean) / scale."""

    mean: float = 127.0
    scale: float = 128.0


def image_input(
    path: Path, metadata: ModelMetadata, normalisation: Normalisation
) -> tuple[str, Array]:
    """Returns the name and the array of a model's only image input.

    Raises:
        InvalidInputError: The model takes no such input, or the file is no image.
    """
    if normalisation.scale == 0:
        raise InvalidInputError.at("--scale", "must not be 0")
    tensor, height, width = _image_tensor(metadata)
    pixels = _load(path, height, width)
    values = (pixels.astype(np.float32) - normalisation.mean) / normalisation.scale
    return tensor.name, np.ascontiguousarray(values.transpose(2, 0, 1)[None], dtype=np.float32)


def _image_tensor(metadata: ModelMetadata) -> tuple[TensorInfo, int, int]:
    if len(metadata.inputs) == 1:
        tensor = metadata.inputs[0]
        if (
            tensor.datatype == "FP32"
            and len(tensor.shape) == 4
            and tensor.shape[0] in (-1, 1)
            and tensor.shape[1] == 3
        ):
            height, width = (side if side > 0 else _DEFAULT_SIDE for side in tensor.shape[2:])
            return tensor, height, width
    described = ", ".join(f"{t.name} {t.datatype} {list(t.shape)}" for t in metadata.inputs)
    raise InvalidInputError.at(
        "--image", f"{metadata.name} takes {described}, not one FP32 image of 3 planes; use --input"
    )


def _load(path: Path, height: int, width: int) -> Array:
    """Returns height x width x 3 bytes: a centre crop of the image, resized bicubically."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InvalidInputError.at(
            "--image", "needs Pillow, which is not installed (pip install pillow)"
        ) from None
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise InvalidInputError.at("--image", f"{path} is no readable image: {error}") from error
    keep = min(
        image.width / width * (width / (width + _CROP_PADDING)),
        image.height / height * (height / (height + _CROP_PADDING)),
    )
    crop_width, crop_height = keep * width, keep * height
    left, top = (image.width - crop_width) / 2, (image.height - crop_height) / 2
    box = (left, top, left + crop_width, top + crop_height)
    resized = image.resize((width, height), Image.Resampling.BICUBIC, box=box)
    return np.asarray(resized)


def top_classes(scores: Array, count: int) -> list[tuple[int, float]]:
    """Returns the `count` highest classes of one row of scores as (index, probability).

    Scores that are not yet a distribution go through a softmax.
    """
    flat = scores.astype(np.float64).ravel()
    if not (flat.min() >= 0 and abs(flat.sum() - 1) < 1e-3):
        flat = np.exp(flat - flat.max())
        flat /= flat.sum()
    best = np.argsort(-flat, kind="stable")[:count]
    return [(int(index), float(flat[index])) for index in best]
