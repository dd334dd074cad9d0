"""The choice of a decoder executor by device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from catenary_agent.decoders.base import CacheLayout, DecoderExecutor
from catenary_agent.executors.device import Device
from catenary_services.domain.decoder import GPU_CHUNK_TOKENS, DecoderRuntime
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.model import ENGINE_OF
from catenary_services.errors import NotSupported
from catenary_services.models.model_repository import ModelRepository

DecoderLibrary = Literal["auto", "onnx", "torch", "vllm", "llama_server"]
DecoderNumbers = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """The choices of an agent about running decoders."""

    library: DecoderLibrary = "auto"
    """The library: "auto" is ONNX Runtime on a CPU and PyTorch on CUDA. "vllm" and "llama_server"
    are engines, which run as processes of their own (`catenary_agent.engines`)."""
    numbers: DecoderNumbers = "auto"
    """The number format of weights in PyTorch: "auto" is float32 on a CPU and float16 on CUDA."""


def runtime_of(device: Device, choice: DecoderOptions = DecoderOptions()) -> DecoderRuntime | None:
    """Returns the runtime of decoders on a device; None on an emulated one with `library` "auto".

    Raises:
        NotSupported: The device has no such runtime.
    """
    if device.kind == "emulated" and choice.library == "auto":
        return None
    if choice.library in ENGINE_OF:
        return ENGINE_OF[choice.library]
    if choice.library == "onnx" or (choice.library == "auto" and device.kind == "cpu"):
        return DecoderRuntime.ONNX
    if choice.numbers != "auto":
        return DecoderRuntime(f"torch-{choice.numbers}")
    if device.kind == "emulated":
        return DecoderRuntime.TORCH_FLOAT16
    from catenary_agent.decoders.torch import torch_weights as weights

    return weights.runtime_of(weights.compute_dtype(weights.torch_device(device)))


def load_decoder(  # noqa: PLR0913, PLR0917  (three of them are settings of the agent)
    repository: ModelRepository,
    key: PartitionKey,
    device: Device,
    layout: CacheLayout,
    threads: int = 1,
    library: DecoderLibrary = "auto",
    numbers: DecoderNumbers = "auto",
    chunk_tokens: int = GPU_CHUNK_TOKENS,
) -> DecoderExecutor:
    """Returns an executor of blocks `[first, last)`, ready to step.

    On "emulated:CLASS" it only sleeps, and counts the memory of the runtime that `library` and
    `numbers` name. "auto" is ONNX Runtime on "cpu" and PyTorch on "cuda". `chunk_tokens` are the
    most tokens of prompts in one step.

    Raises:
        ModelNotFound: The model is absent.
        InvalidInput: There are no such blocks, or the layout is impossible.
        NotSupported: The model generates no text, or the library is missing or does not run on the
            device.
    """
    manifest = repository.manifest(key.model)
    if not manifest.generates_text:
        raise NotSupported(f"{key.model} is {manifest.platform}: it does not generate text")
    if device.kind == "emulated":
        from catenary_agent.decoders.emulated import EmulatedDecoder

        stands_for = runtime_of(device, DecoderOptions(library, numbers)) or ""
        return EmulatedDecoder(repository, key, device, layout, stands_for)
    if device.kind == "cuda" and library == "onnx":
        raise NotSupported("decoders run on CUDA with PyTorch, not with ONNX Runtime")
    if device.kind == "cuda" or library == "torch":
        from catenary_agent.decoders.torch.torch_executor import TorchDecoder

        return TorchDecoder(repository, key, device, layout, threads, numbers, chunk_tokens)
    from catenary_agent.decoders.onnx.onnx_executor import OnnxDecoder

    return OnnxDecoder(repository, key, layout, threads)
