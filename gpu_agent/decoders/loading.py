"""Choosing the executor of a range of decoder blocks by device."""

from __future__ import annotations

from typing import Literal

from gpu_agent.decoders.base import CacheLayout, DecoderExecutor
from gpu_agent.executors.device import Device
from services.domain.ids import PartitionKey
from services.errors import NotSupported
from services.model_repository import ModelRepository

DecoderLibrary = Literal["auto", "onnx", "torch"]


def commits_on_use(device: Device, library: DecoderLibrary = "auto") -> bool:
    """Returns True if executors on a device take memory for caches as these are written.

    PyTorch's slots are contiguous extents that are allocated at once, and never given back.
    """
    return device.kind != "cuda" and (device.kind == "emulated" or library != "torch")


def load_decoder(
    repository: ModelRepository,
    key: PartitionKey,
    device: Device,
    layout: CacheLayout,
    threads: int = 1,
    library: DecoderLibrary = "auto",
) -> DecoderExecutor:
    """Returns an executor of blocks `[first, last)`, ready to step.

    On "emulated:CLASS" it is one that sleeps, whatever `library` says; "auto" is ONNX Runtime on
    "cpu" and PyTorch on "cuda".

    Raises:
        ModelNotFound: If the model is absent.
        InvalidInput: If there are no such blocks, or the layout is not possible.
        NotSupported: If the model generates no text, the library is missing, or does not run on
            the device.
    """
    platform = repository.manifest(key.model).platform
    if platform != "decoder":
        raise NotSupported(f"{key.model} is {platform}: it does not generate text")
    if device.kind == "emulated":
        from gpu_agent.decoders.emulated import EmulatedDecoder

        return EmulatedDecoder(repository, key, device, layout)
    if device.kind == "cuda" and library == "onnx":
        raise NotSupported("decoders run on CUDA with PyTorch, not with ONNX Runtime")
    if device.kind == "cuda" or library == "torch":
        from gpu_agent.decoders.torch_executor import TorchDecoder

        return TorchDecoder(repository, key, device, layout, threads)
    from gpu_agent.decoders.onnx_executor import OnnxDecoder

    return OnnxDecoder(repository, key, layout, threads)
