"""Decoder layers of `transformers` that have the weights of a range of blocks only.

The model is built without memory (meta device). Then only the tensors of the wanted blocks are read
from the safetensors files by name, each directly to its device. On a CPU files are mapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from catenary_agent.decoders.model_files.checkpoint import places_in
from catenary_agent.decoders.model_files.description import DecoderDescription, why_not_quantised
from catenary_agent.decoders.model_files.quantisation import (
    CODES,
    StoredQuantisation,
    is_quantised,
    why_not_precision,
)
from catenary_agent.decoders.model_files.stored_names import TensorPiece, is_router, pieces_of
from catenary_agent.decoders.torch.torch_quantised import (
    QuantisedLinear,
    from_files,
    quantised,
)
from catenary_agent.decoders.torch.torch_skeleton import (
    DecoderSkeleton,
    check_shape,
    linears,
    modules,
    skeleton,
)
from catenary_agent.decoders.torch.torch_wide import OperandCache, widened
from catenary_agent.decoders.transfers.tensor_reader import reader_for
from catenary_agent.executors.device import Device
from catenary_services.content.reading import VerifiedReading
from catenary_services.domain.decoder import DecoderRuntime
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import InvalidInput, NotSupported


@dataclass(slots=True)
class DecoderBlocks:
    """The modules of one partition, on its device."""

    layers: list[Any]
    rotary: Any
    """A function from positions [1, rows] to (cosine, sine), each [1, rows, head size]. Where it is
    another one for layers of each kind, the kind is given to it, too."""
    rotary_kinds: tuple[str, ...]
    """The kind of each layer's rotary embedding; empty if all have the same."""
    description: DecoderDescription
    embedding: Any | None
    """The embedding; None unless block 0 is here."""
    norm: Any | None
    """The last norm; None unless the last block is here."""
    head: Any | None
    """The projection from hidden states to logits; None unless the last block is here."""
    entering: OperandCache
    """The rounded input that several matrices share in a step."""
    memory_bytes: int
    """The bytes of the weights, tied ones counted once, and of the position angles."""


class ScaledModule(torch.nn.Module):
    """A module whose results are multiplied by a number, and then bent to stay below a bound."""

    def __init__(self, inner: torch.nn.Module, factor: float, cap: float | None) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor
        self.cap = cap

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(entering)
        if self.factor != 1.0:
            result = result.mul_(self.factor)
        if self.cap is not None:
            result = result.div_(self.cap).tanh_().mul_(self.cap)
        return result


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The device and the number format of weights."""

    device: torch.device
    dtype: torch.dtype
    """The datatype of weights that are not quantised. Between matrices float32 is computed."""
    precision: str = "fp32"
    """The precision of the matrices of layers: "fp32" (as they are), "int8" or "int4"."""


def load_blocks(
    reading: VerifiedReading, key: PartitionKey, blocks: int, numbers: WeightFormat
) -> DecoderBlocks:
    """Reads blocks `[first, last)`, with embedding and head where they belong.

    Args:
        reading: The checked reading of a folder with `config.json` and `.safetensors` files.
        key: The partition.
        blocks: Number of blocks of the whole model.
        numbers: The device and number format of the weights.

    Raises:
        NotSupported: The model's family, its rotary embedding or its quantisation is not supported,
            or weights are too large for their datatype.
        InvalidInput: A tensor is missing or has another shape than the configuration says.
    """
    reading.begin(reading.folder / "config.json", first=True)
    dtype, device = numbers.dtype, numbers.device
    bare = skeleton(reading.folder, dtype, str(key.model))
    described, base = bare.description, bare.model.model
    if described.blocks != blocks:
        raise InvalidInput(
            f"{key.model}/config.json", f"has {described.blocks} layers, not {blocks}"
        )
    reason = why_not_precision(bare.stored, numbers.precision)
    reason = reason or why_not_quantised(bare.facts, numbers.precision)
    if reason is not None:
        raise NotSupported(f"{key.model} {reason}")
    wanted = modules(bare.model, key.first_block, key.last_block)
    with _Files(reading, device) as files:
        files.expect(tuple(wanted))
        memory = _fill(wanted, files, numbers, bare)
    rotary = bare.rotary(device)
    memory += sum(buffer.nbytes for buffer in rotary.buffers())
    last = key.last_block == blocks
    entering = OperandCache()

    def ready(module: torch.nn.Module) -> torch.nn.Module:
        if dtype is torch.float32:
            return module
        for each in module.modules():
            if isinstance(each, QuantisedLinear):
                each.entering = entering
        return widened(module, entering)

    return DecoderBlocks(
        layers=[ready(base.layers[i]) for i in range(key.first_block, key.last_block)],
        rotary=rotary,
        rotary_kinds=described.rotary_kinds[key.first_block : key.last_block],
        description=described,
        embedding=(
            _scaled(ready(base.embed_tokens), described.embedding_scale)
            if key.first_block == 0
            else None
        ),
        norm=ready(base.norm) if last else None,
        head=_head(ready(bare.model.lm_head), described) if last else None,
        entering=entering,
        memory_bytes=memory,
    )


def torch_device(device: Device) -> torch.device:
    """Returns PyTorch's object for a device.

    Raises:
        NotSupported: PyTorch does not see the device.
    """
    if device.kind == "cuda":
        if device.index >= torch.cuda.device_count():
            raise NotSupported(f"{device}: PyTorch sees {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", device.index)
    if device.kind != "cpu":
        raise NotSupported(f"{device} cannot run PyTorch")
    return torch.device("cpu")


def compute_dtype(device: torch.device, wanted: str = "auto") -> torch.dtype:
    """Returns the datatype of matrices: float32 on a CPU, float16 on a CUDA device.

    Residual streams are always float32, because those of this family overflow float16.

    Args:
        device: The device that computes.
        wanted: "float32", "bfloat16" or "float16" to override the choice; else "auto".
    """
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    return torch.float16 if device.type == "cuda" else torch.float32


def cache_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the datatype of keys and values, given that of matrices.

    float16 is used for bfloat16, too: at the same size it has three more bits of precision.
    """
    return dtype if dtype is torch.float32 else torch.float16


def runtime_of(dtype: torch.dtype) -> DecoderRuntime:
    """Returns the runtime of an executor that computes in a datatype."""
    return DecoderRuntime(f"torch-{str(dtype).removeprefix('torch.')}")


def _scaled(module: torch.nn.Module, factor: float, cap: float | None = None) -> torch.nn.Module:
    return module if factor == 1.0 and cap is None else ScaledModule(module, factor, cap)


def _head(module: torch.nn.Module, described: DecoderDescription) -> torch.nn.Module:
    return _scaled(module, described.logit_scale, described.logit_cap)


class _Files:
    """The tensors of a model's files, each read directly to its device when it is needed."""

    def __init__(self, reading: VerifiedReading, device: torch.device) -> None:
        self._reading = reading
        self.device = device
        self.places = places_in(reading)
        self._reader = reader_for(device)
        self._extremes: dict[str, torch.Tensor] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.__exit__()

    def expect(self, prefixes: tuple[str, ...]) -> None:
        """Notes that all tensors will be read whose names begin with one of some prefixes."""
        ranges: dict[Path, list[tuple[int, int]]] = {}
        for name, (file, where) in self.places.items():
            if name.startswith(prefixes):
                ranges.setdefault(file, []).append((where.offset, where.nbytes))
        for file, wanted in ranges.items():
            self._reading.expect(file, wanted)

    def read(self, name: str, expected: tuple[int, ...] | None = None) -> torch.Tensor:
        """Returns a tensor as it is stored.

        Raises:
            InvalidInput: The tensor is missing or has another shape.
        """
        if name not in self.places:
            raise InvalidInput(name, "is not in the model's files")
        file, where = self.places[name]
        if expected is not None:
            check_shape(name, where.shape, expected)
        self._reading.begin(file, [(where.offset, where.nbytes)])
        return self._reader.read(file, name, where)

    def converted(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor in a datatype; see `check_numbers` for values that do not fit.

        Raises:
            InvalidInput: The tensor is missing or has another shape.
        """
        tensor = self.read(name, shape)
        made = tensor.to(dtype)
        if dtype is torch.float16 and tensor.dtype is not dtype and made.numel():
            self._extremes[name] = torch.stack(made.aminmax())
        return made

    def check_numbers(self) -> None:
        """Raises NotSupported if a value of a tensor that was converted is too large for float16.

        All of them are looked at together, because each look waits for a device.
        """
        if not self._extremes:
            return
        infinite = torch.stack(list(self._extremes.values())).isinf().any(1).tolist()
        for name, is_infinite in zip(self._extremes, infinite, strict=True):
            if is_infinite:
                raise NotSupported(
                    f"{name} is too large for float16: set decoder_numbers to bfloat16"
                )


def _fill(
    wanted: dict[str, Any], files: _Files, numbers: WeightFormat, bare: DecoderSkeleton
) -> int:
    """Gives the modules their weights; returns their bytes, shared ones counted once."""
    read: dict[str, torch.Tensor] = {}
    memory = 0
    for prefix, module in wanted.items():
        for name, linear in linears(prefix, module):
            made = _quantised(name, linear, files, numbers, bare.stored)
            if made is not None:
                module.set_submodule(name.removeprefix(prefix), made)
                memory += sum(buffer.nbytes for buffer in made.buffers())
        state = {}
        for name, expected in module.state_dict().items():
            shape = tuple(expected.shape)
            pieces = pieces_of(prefix + name, shape, bare.family, files.places)
            # A tied projection is the embedding, which is read once.
            known = pieces[0].name
            if known not in read:
                dtype = torch.float32 if is_router(prefix + name) else numbers.dtype
                read[known] = _joined(pieces, shape, files, dtype)
            check_shape(known, tuple(read[known].shape), shape)
            state[name] = read[known]
        module.load_state_dict(state, assign=True)
    files.check_numbers()
    return memory + sum(tensor.nbytes for tensor in read.values())


def _joined(
    pieces: list[TensorPiece], shape: tuple[int, ...], files: _Files, dtype: torch.dtype
) -> torch.Tensor:
    """Returns a module's tensor of its pieces in files."""
    if pieces[0].expert is None:
        only = pieces[0]
        return files.converted(only.name, only.shape, dtype)
    made = torch.empty(shape, dtype=dtype, device=files.device)
    for piece in pieces:
        rows = slice(piece.first_row, piece.first_row + piece.shape[0])
        made[piece.expert, rows] = files.converted(piece.name, piece.shape, dtype)
    return made


def _quantised(
    name: str, linear: Any, files: _Files, numbers: WeightFormat, stored: StoredQuantisation | None
) -> QuantisedLinear | None:
    """Returns the layer that replaces a matrix; None if the matrix stays."""
    shape = linear.out_features, linear.in_features
    bias = None
    if linear.bias is not None and numbers.precision != "fp32":
        bias = files.read(f"{name}.bias", shape[:1]).to(numbers.dtype)
    if stored is not None and f"{name}.{CODES}" in files.places:
        parts = stored.parts(*shape)
        index = f"{name}.g_idx"
        return from_files(
            stored,
            lambda part: files.read(f"{name}.{part}", parts[part]),
            bias,
            numbers.dtype,
            files.read(index, shape[1:]) if index in files.places else None,
        )
    if stored is not None or not is_quantised(numbers.precision, *shape):
        return None
    return quantised(files.read(f"{name}.weight", shape), bias, numbers.precision, numbers.dtype)
