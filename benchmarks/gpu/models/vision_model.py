"""A vision part with random weights: EfficientNet-Lite0 on a GPU, else three small layers."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from typing import Any

from benchmarks.gpu.stage import Context, Skipped
from catenary_agent.executors.device import Device
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.tensors import ANY, TensorSpec

_KEY = ModelKey("random-vision", "1")


def image_part(here: Context, device: Device) -> Any:
    """Returns the executor of a whole exported network."""
    from catenary_agent.executors.torch_part import TorchPart

    side, file = _file(here)
    classes = 10 if here.tiny else 1000
    image, scores = (3, side, side), (classes,)
    ends = PartitionSignature(
        PartitionKey(_KEY, 0, 1),
        True,
        (TensorSpec("images", "FP32", (ANY, *image)),),
        (TensorSpec("scores", "FP32", (ANY, *scores)),),
        ((1, *image),),
        ((1, *scores),),
    )
    return TorchPart(ends, file, device)


def formed_part(here: Context) -> Any:
    """Returns the same network in the form of its export, for measurements of others."""
    import torch
    from torch.export.passes import move_to_device_pass

    from catenary_agent.executors.torch_device import FormedPart, PartTypes
    from catenary_agent.partitioning.torch_archive import load_program

    _, file = _file(here)
    program = move_to_device_pass(load_program(file), here.torch_device)
    types = PartTypes((torch.float32,), (torch.float32,))
    return FormedPart(program.module(), types, here.torch_device)


def _file(here: Context) -> tuple[int, Path]:
    """Returns the side of images, and the exported network."""
    side, file = 16 if here.tiny else 224, here.folder / "vision.pt2"
    if not file.exists():
        _export(_network(here), side, file)
    return side, file


def _network(here: Context) -> Any:
    import torch

    torch.manual_seed(5)
    if here.tiny:
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(8, 10),
        ).eval()
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise Skipped("efficientnet-lite-pytorch is not installed") from None
    with contextlib.redirect_stdout(sys.stderr):
        return EfficientNet.from_name("efficientnet-lite0").eval()


def _export(network: Any, side: int, file: Path) -> None:
    import torch

    class Part(torch.nn.Module):
        """Wraps a network so that it returns a list of outputs, as parts do."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, images: Any) -> list[Any]:
            return [self.network(images)]

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            Part().eval(),
            (torch.zeros(2, 3, side, side),),
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            strict=False,
        )
        torch.export.save(program, file)
