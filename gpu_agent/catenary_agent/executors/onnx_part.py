"""An executor of a part of an ONNX model on ONNX Runtime.

Casts between the float16 of the wire and the float32 of the model are nodes of the part's graph, so
they run inside the session without the interpreter's lock. Large outputs are bound to the caller's
buffers: such a result is written only once, to the place it is sent from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

from catenary_agent.devices.device import cuda_memory_bytes
from catenary_agent.executors.base import PartExecutor, check_arrays, check_outputs
from catenary_agent.executors.device import Device
from catenary_agent.executors.onnx_device import (
    DeviceRuns,
    choose_providers,
    preload_libraries,
)
from catenary_agent.executors.onnx_texts import to_elements, to_texts
from catenary_agent.partitioning.jailed import extracted_part
from catenary_agent.partitioning.signature import PartitionSignature, Shape
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.tensors import BYTES
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository

CAST = ".float16"
"""The end of the names of inputs and outputs that are cast from and to float16."""
_SHAPES_KEPT = 64
_COPIED_BYTES = 128 * 1024
"""Results up to this size are copied to the caller's buffers: binding buffers costs more (35
us)."""


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """The choices of how a session is made."""

    device: Device
    threads: int = 1
    optimise: bool = True
    """False turns graph optimisation off: parts then equal the whole model bit for bit."""
    engine_cache: Path | None = None
    """The folder of the engines that TensorRT builds; None if TensorRT is not used."""


class OnnxPart(PartExecutor):
    """An executor over one ONNX Runtime session."""

    def __init__(self, ends: PartitionSignature, path: Path, options: OnnxOptions) -> None:
        """Loads an extracted part; `load_onnx_part` extracts it first."""
        super().__init__(ends)
        self._session = _open_session(path, options)
        self.memory_bytes = sum(file.stat().st_size for file in path.parent.iterdir())
        feeds = {value.name for value in self._session.get_inputs()}
        self._feeds = [
            (index, name)
            for index, spec in enumerate(self.inputs)
            for name in (spec.name, spec.name + CAST)
            if name in feeds
        ]
        position = {spec.name: index for index, spec in enumerate(self.inputs)}
        self._sources = [position.get(spec.name) for spec in self.outputs]
        """Index of the input that each output passes through; None if the session computes it."""
        made = [v.name for v in self._session.get_outputs()]
        self._made = dict(
            zip((i for i, s in enumerate(self._sources) if s is None), made, strict=True)
        )
        metadata = self._session.get_modelmeta().custom_metadata_map
        self._shapes_repeat = metadata.get("shapes_repeat") == "1"
        self._seen_shapes: dict[tuple[Shape, ...], list[Shape]] = {}
        self._passed: set[tuple[object, ...]] = set()
        """The datatypes and shapes of arrays that have passed the checks."""
        self._on_device: DeviceRuns | None = None
        self._has_texts = any(spec.datatype == BYTES for spec in (*ends.inputs, *ends.outputs))
        # Texts stay on the host, so a part with texts has no buffers on the device.
        if options.device.kind == "cuda" and not self._has_texts:
            place = ("cuda", options.device.index)
            self._on_device = DeviceRuns(self._session, *place, keep=self._shapes_repeat)
        self.is_tied_to_thread = options.device.kind != "cpu"

    def output_shapes(self, input_shapes: Sequence[Shape]) -> list[Shape] | None:
        """Returns the outputs' shapes as seen in an earlier run, or from the specs; else None."""
        seen = self._seen_shapes.get(tuple(input_shapes))
        return super().output_shapes(input_shapes) if seen is None else seen

    def run(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        self._check(inputs, outputs)
        feeds = {name: np.asarray(inputs[index], order="C") for index, name in self._feeds}
        if outputs is None:
            results = self._run_new(inputs, feeds)
        else:
            results = list(outputs)
            size = sum(array.nbytes for array in results)
            if self._on_device is not None or self._has_texts or size <= _COPIED_BYTES:
                for index, made in enumerate(self._run_new(inputs, feeds)):
                    self._copy(index, made, results)
            else:
                self._run_into(inputs, feeds, results)
        if self._shapes_repeat and len(self._seen_shapes) < _SHAPES_KEPT:
            seen = tuple(array.shape for array in inputs)
            self._seen_shapes.setdefault(seen, [array.shape for array in results])
        return results

    def _check(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray] | None) -> None:
        """Raises InvalidInput if an array does not fit, as `check_arrays` and `check_outputs` do.

        Arrays of datatypes and shapes that have passed fit again.
        """
        results = outputs or ()
        kinds = len(inputs), *[(array.dtype, array.shape) for array in (*inputs, *results)]
        if kinds in self._passed and all(
            array.flags.c_contiguous and array.flags.writeable for array in results
        ):
            return
        check_arrays(self.inputs, inputs, self.batched)
        if outputs is not None:
            check_outputs(self.outputs, outputs)
        if len(self._passed) < _SHAPES_KEPT:
            self._passed.add(kinds)

    def close(self) -> None:
        self._on_device = None
        self._session = None

    def _run_new(
        self, inputs: Sequence[np.ndarray], feeds: dict[str, np.ndarray]
    ) -> list[np.ndarray]:
        names = list(self._made.values())
        on_device = self._on_device
        if self._has_texts:
            feeds = {name: to_texts(array, name) for name, array in feeds.items()}
        try:
            results = on_device.run(feeds, names) if on_device else self._session.run(names, feeds)
        except Exception as error:  # ONNX Runtime's own exception classes share no root
            raise self._failure(error) from error
        made = iter(map(to_elements, results) if self._has_texts else results)
        return [next(made) if source is None else inputs[source] for source in self._sources]

    def _run_into(
        self,
        inputs: Sequence[np.ndarray],
        feeds: dict[str, np.ndarray],
        outputs: list[np.ndarray],
    ) -> None:
        # A binding is made anew each time: a kept one remembers the last output's shape and would
        # refuse another batch size.
        binding = self._session.io_binding()
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for index, name in self._made.items():
            out = outputs[index]
            binding.bind_output(name, "cpu", 0, out.dtype, out.shape, out.ctypes.data)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's own exception classes share no root
            raise self._failure(error) from error
        for index, source in enumerate(self._sources):
            if source is not None:
                self._copy(index, inputs[source], outputs)

    def _copy(self, index: int, made: np.ndarray, outputs: list[np.ndarray]) -> None:
        if outputs[index].shape != made.shape:
            raise InvalidInput(
                self.outputs[index].name,
                f"is {list(made.shape)}, not {list(outputs[index].shape)} as the buffer given",
            )
        np.copyto(outputs[index], made)


def load_onnx_part(
    repository: ModelRepository, key: PartitionKey, float16_boundaries: bool, options: OnnxOptions
) -> OnnxPart:
    """Returns the executor of a partition; extracts the part first if it is not in the cache."""
    ends = PartitionSignature.of(repository, key, float16_boundaries)
    with extracted_part(repository, ends, "onnxruntime_onnx", "onnx") as folder:
        return OnnxPart(ends, folder / "part.onnx", options)


def _open_session(path: Path, options: OnnxOptions) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    # Spinning threads of one agent would steal the cores of its neighbours.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.add_session_config_entry("session.inter_op.allow_spinning", "0")
    settings.log_severity_level = 3
    if not options.optimise:
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    device = options.device
    total_bytes = cuda_memory_bytes(device.index) if device.kind == "cuda" else 0
    providers = choose_providers(
        device, total_bytes, options.engine_cache, onnxruntime.get_available_providers()
    )
    if device.kind == "cuda":
        preload_libraries()
    return onnxruntime.InferenceSession(str(path), settings, providers=providers)
