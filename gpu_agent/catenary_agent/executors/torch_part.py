"""An executor of a part of a torch.export program on PyTorch, on CUDA or a CPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.export.passes import move_to_device_pass

from catenary_agent.devices.device_errors import let_go
from catenary_agent.executors.base import PartExecutor, check_arrays, check_outputs
from catenary_agent.executors.device import Device
from catenary_agent.executors.torch_device import FormedPart, PartRuns, PartTypes, fastest_form
from catenary_agent.partitioning.jailed import PartOrder, extracted_part
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_agent.partitioning.torch_archive import load_program
from catenary_agent.partitioning.torch_graph import TorchModel, extract_part, load_torch
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.tensors import ANY, DTYPE_OF, TensorSpec
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.jail.child import JailWorkspace
from catenary_services.models.model_repository import ModelRepository

_SPECIALISED = 2
_EXAMPLE_ROWS = 4
Compute = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
_TORCH_OF = {name: torch.from_numpy(np.empty(0, dtype)).dtype for name, dtype in DTYPE_OF.items()}


class TorchPart(PartExecutor):
    """An executor over one exported part."""

    def __init__(self, ends: PartitionSignature, path: Path, device: Device) -> None:
        """Loads an extracted part; `load_torch_part` extracts it first.

        Raises:
            NotSupported: PyTorch does not see the device, or has no tensors of a datatype.
        """
        super().__init__(ends)
        for spec in (*ends.inputs, *ends.outputs):
            if spec.datatype not in _TORCH_OF:
                raise NotSupported(f"{ends.key}: {spec.name} is {spec.datatype}; PyTorch has none")
        self._device = _torch_device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            # Not the default stream, so that other users of the device can run beside it.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if device.virtual_level > 1:
                torch.cuda.set_per_process_memory_fraction(memory_fraction(device), self._device)
        program = load_program(path)
        if self._device.type != "cpu":
            program = move_to_device_pass(program, self._device)
        made = [spec for spec in ends.outputs if spec.name not in {i.name for i in ends.inputs}]
        self._made = {spec.name: index for index, spec in enumerate(made)}
        types = PartTypes(_declared(program), tuple(_TORCH_OF[spec.datatype] for spec in made))
        part = FormedPart(program.module(), types, self._device)
        self._compute: Compute | None = part
        if self._device.type == "cuda":
            with torch.cuda.stream(self._stream):
                fastest_form(part, self._device, _tensors(ends.example_arrays(_EXAMPLE_ROWS)))
            self._compute = PartRuns(part, self._device).run
        self.memory_bytes = part.nbytes

    def run(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        check_arrays(self.inputs, inputs, self.batched)
        if outputs is not None:
            check_outputs(self.outputs, outputs)
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            return self._run_on_stream(inputs, outputs)

    def _run_on_stream(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray] | None
    ) -> list[np.ndarray]:
        made = self._computed(inputs)
        given = {spec.name: array for spec, array in zip(self.inputs, inputs, strict=True)}
        results = []
        for index, spec in enumerate(self.outputs):
            target = None if outputs is None else outputs[index]
            if spec.name in given:
                results.append(_into(torch.from_numpy(given[spec.name]), spec, target))
            else:
                results.append(_into(made[self._made[spec.name]], spec, target))
        return results

    def close(self) -> None:
        self._compute = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _computed(self, inputs: Sequence[np.ndarray]) -> Sequence[torch.Tensor]:
        assert self._compute is not None, "closed"
        try:
            return self._compute(_tensors(inputs))
        except Exception as error:  # PyTorch raises RuntimeError and its subclasses for anything
            let_go(error)
            raise self._failure(error) from error


def memory_fraction(device: Device) -> float:
    """Returns the share of a GPU's memory that this process may take as one of its virtual GPUs."""
    return 1.0 / device.virtual_level


def load_torch_part(
    repository: ModelRepository,
    key: PartitionKey,
    float16_boundaries: bool,
    device: Device,
    threads: int,
) -> TorchPart:
    """Returns the executor of a partition; extracts the part first if it is not in the cache.

    PyTorch has one thread pool per process, so the last `threads` given holds for all its parts.
    """
    torch.set_num_threads(threads)
    own = PartitionSignature.of(repository, key, False)
    with extracted_part(repository, own, "pytorch_exported", f"torch-{torch.__version__}") as made:
        ends = PartitionSignature.of(repository, key, float16_boundaries)
        return TorchPart(ends, made / "part.pt2", device)


def write_part_in_jail(job: bytes, room: JailWorkspace) -> bytes:
    """Writes the part of an encoded `PartOrder`."""
    order = msgspec.json.decode(job, type=PartOrder)
    write_part(load_torch(room.inputs[0] / order.file), order.ends, room.output)
    return b""


def write_part(source: TorchModel, ends: PartitionSignature, folder: Path) -> None:
    """Writes `part.pt2` for a range of blocks; `ends` has the model's own datatypes."""
    given = {spec.name for spec in ends.inputs}
    wanted = [spec for spec in ends.outputs if spec.name not in given]
    part = extract_part(source, ends.inputs, wanted)
    # Exporting specialises a size of 1, so the example has two rows where rows are free.
    arrays = tuple(torch.from_numpy(array) for array in ends.example_arrays(2))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            program = _exported(part, arrays, _free_sizes(source, ends, named=True))
        except Exception:  # the exporter raises whatever tracing raises
            # A size has limits of its own in this part: the exporter finds them if it has no name.
            try:
                program = _exported(part, arrays, _free_sizes(source, ends, named=False))
            except Exception as error:
                text = (str(error).splitlines() or [type(error).__name__])[0][:300]
                raise InvalidInput(str(ends.key), f"cannot be exported: {text}") from None
        torch.export.save(program, folder / "part.pt2")


def _exported(
    part: Any, arrays: tuple[torch.Tensor, ...], sizes: tuple[dict[int, Any], ...]
) -> Any:
    return torch.export.export(part, arrays, dynamic_shapes=sizes, strict=False)


def _free_sizes(
    source: TorchModel, ends: PartitionSignature, *, named: bool
) -> tuple[dict[int, Any], ...]:
    """Returns which sizes of a part's inputs are free.

    Args:
        source: The whole program.
        ends: The part.
        named: Whether sizes of one symbol are said to be equal; else only the batch's are.
    """
    known: dict[str, Any] = {}
    expressions = source.sizes_of(ends.inputs)
    batch = expressions[0][0] if ends.batched else ""

    def size_of(text: str) -> Any:
        if not text.isidentifier() or (text != batch and not named):
            return torch.export.Dim.DYNAMIC  # such as 2*s77, which is computed from others
        if text not in known:
            least, most = source.ranges.get(text, (0, None))
            # The exporter writes 2 for 0 and 1 where nobody has said that they may be.
            least = least if least > _SPECIALISED else 1
            known[text] = torch.export.Dim(text, min=least, max=most)
        return known[text]

    return tuple(
        {
            axis: size_of(text)
            for axis, text in enumerate(texts)
            if spec.shape[axis] == ANY and not text.isdecimal()
        }
        for spec, texts in zip(ends.inputs, expressions, strict=True)
    )


def _into(tensor: torch.Tensor, spec: TensorSpec, target: np.ndarray | None) -> np.ndarray:
    """Returns a host array, in the wire's datatype as the tensor is."""
    if target is None:
        return tensor.cpu().contiguous().numpy()
    if tuple(tensor.shape) != target.shape:
        raise InvalidInput(
            spec.name, f"is {list(tensor.shape)}, not {list(target.shape)} as its buffer"
        )
    torch.from_numpy(target).copy_(tensor)
    return target


def _tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Returns views of arrays."""
    with warnings.catch_warnings():
        # Frames are read-only memory; the part does not write to its inputs.
        warnings.simplefilter("ignore", UserWarning)
        return [torch.from_numpy(np.asarray(array, order="C")) for array in arrays]


def _declared(program: Any) -> tuple[torch.dtype, ...]:
    names = set(program.graph_signature.user_inputs)
    return tuple(node.meta["val"].dtype for node in program.graph.nodes if node.name in names)


def _torch_device(device: Device) -> torch.device:
    if device.kind == "cuda":
        if device.index >= torch.cuda.device_count():
            raise NotSupported(f"{device}: PyTorch sees {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", device.index)
    return torch.device("cpu")
