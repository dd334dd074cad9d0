"""ONNX Runtime on CUDA: the choice of providers and options, and inputs and outputs on the device.

The inputs of a session are in buffers on the device that keep their places between calls, with one
set of buffers for each batch size. Thus a call allocates nothing, and the graph needs no copies at
its ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime

from catenary_agent.executors.device import Device
from catenary_services.errors import NotSupported

TENSORRT, CUDA, CPU = (
    "TensorrtExecutionProvider",
    "CUDAExecutionProvider",
    "CPUExecutionProvider",
)
_SHAPES_KEPT = 16
"""The most sets of buffers; the oldest is dropped first."""

Provider = tuple[str, dict[str, str]]


def provider_options(provider: str, device: Device, total_bytes: int) -> dict[str, str]:
    """Returns the options of a CUDA provider: the GPU, and the share of its `total_bytes`.

    A session of a virtual GPU may take 1/level of them; with 0 total bytes, which means unknown,
    there is no limit. The limit holds for the arena of one session, which takes little beside it.
    """
    options = {"device_id": str(device.index)}
    if device.virtual_level > 1 and total_bytes:
        cap = str(total_bytes // device.virtual_level)
        options["trt_max_workspace_size" if provider == TENSORRT else "gpu_mem_limit"] = cap
    return options


def tuning_options(provider: str, engine_cache: Path | None) -> dict[str, str]:
    """Returns the options of a provider that govern its choice of kernels.

    An exhaustive search times every algorithm for each new batch size while the agent serves; the
    heuristic answers at once. TensorRT builds an engine for each shape, which takes minutes, so it
    is used only with a folder that keeps them.
    """
    if provider == CUDA:
        return {"cudnn_conv_algo_search": "HEURISTIC"}
    folder = str(engine_cache)
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": folder,
    }


def choose_providers(
    device: Device, total_bytes: int, engine_cache: Path | None, installed: Sequence[str]
) -> list[Provider | str]:
    """Returns the providers of a session, best first.

    Args:
        device: A CPU or a CUDA device.
        total_bytes: Memory of the GPU; 0 if unknown.
        engine_cache: The folder of TensorRT's engines; None if TensorRT is not used.
        installed: The providers this ONNX Runtime was built with.

    Raises:
        NotSupported: The device is a GPU and none of the providers can use it.
    """
    if device.kind == "cpu":
        return [CPU]
    wanted = (TENSORRT, CUDA) if engine_cache is not None else (CUDA,)
    chosen: list[Provider | str] = [
        (name, provider_options(name, device, total_bytes) | tuning_options(name, engine_cache))
        for name in wanted
        if name in installed
    ]
    if CUDA not in installed:
        raise NotSupported(
            f"{device}: this onnxruntime has no CUDA provider; install onnxruntime-gpu (extra "
            "cuda13 or cuda12) or serve the model's pytorch_exported form"
        )
    return [*chosen, CPU]


@cache
def preload_libraries() -> None:
    """Loads the CUDA libraries that are in wheels, where the linker does not look; once.

    Libraries already in the process stay: PyTorch brings the same ones, if it was imported first.
    """
    preload = getattr(onnxruntime, "preload_dlls", None)
    if preload is not None:
        preload()


class DeviceRuns:
    """Runs of one session whose inputs and outputs are on its device."""

    def __init__(
        self, session: onnxruntime.InferenceSession, kind: str, index: int, *, keep: bool
    ) -> None:
        """Begins without bindings.

        Args:
            session: A session on the device.
            kind: ONNX Runtime's name of the device: "cuda", or "cpu".
            index: Index of the device.
            keep: Whether equal shapes of the inputs imply equal shapes of the outputs.
        """
        self._session = session
        self._place = (kind, index)
        self._keep = keep
        self._bindings: dict[tuple[tuple[int, ...], ...], _Binding] = {}

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> list[np.ndarray]:
        """Returns the named outputs as new arrays on the host."""
        shapes = tuple(array.shape for array in feeds.values())
        binding = self._bindings.get(shapes)
        if binding is None:
            binding = _Binding(self._session, self._place, feeds, outputs)
            # A kept binding remembers its outputs' shapes and would refuse others.
            if self._keep:
                if len(self._bindings) >= _SHAPES_KEPT:
                    del self._bindings[next(iter(self._bindings))]
                self._bindings[shapes] = binding
        else:
            binding.fill(feeds)
        return binding.run()


class _Binding:
    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        place: tuple[str, int],
        feeds: Mapping[str, np.ndarray],
        outputs: Sequence[str],
    ) -> None:
        self._session = session
        self._io = session.io_binding()
        # Not made from the arrays: on "cpu" the values would share their memory.
        self._inputs = {
            name: onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                array.shape, array.dtype.type, *place
            )
            for name, array in feeds.items()
        }
        self._is_host = place[0] == "cpu"
        for name, value in self._inputs.items():
            self._io.bind_ortvalue_input(name, value)
        for name in outputs:
            self._io.bind_output(name, *place)
        self.fill(feeds)

    def fill(self, feeds: Mapping[str, np.ndarray]) -> None:
        for name, value in self._inputs.items():
            value.update_inplace(feeds[name])

    def run(self) -> list[np.ndarray]:
        self._session.run_with_iobinding(self._io)
        results: list[np.ndarray] = self._io.copy_outputs_to_cpu()
        # Outputs on the host are not copied, and the next run overwrites them.
        return [result.copy() for result in results] if self._is_host else results
