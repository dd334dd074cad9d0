"""Decoder layers of `transformers` that have the weights of a range of blocks only.

The model is built without memory (meta device). Then only the tensors of the wanted blocks are read
from the safetensors files by name, each directly to its device.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from catenary_agent.decoders.model_files.checkpoint import places_in
from catenary_agent.decoders.model_files.embedding import EMBEDDING
from catenary_agent.decoders.model_files.families import embedding_scale, logit_scale, why_not
from catenary_agent.decoders.model_files.quantisation import (
    CODES,
    StoredQuantisation,
    is_quantised,
    stored_as,
    why_not_precision,
)
from catenary_agent.decoders.torch.torch_attention import ATTENTION, attend
from catenary_agent.decoders.torch.torch_quantised import (
    Quantised,
    from_files,
    quantised,
    step_dtype,
)
from catenary_agent.decoders.torch.torch_wide import OperandCache, widened
from catenary_agent.executors.device import Device
from catenary_services.content.reading import VerifiedReading
from catenary_services.domain.decoder import DecoderRuntime
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import InvalidInput, NotSupported

ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""The types of rotary embeddings whose angles are independent of the longest session of a step."""

_HEAD = "lm_head.weight"
_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""All parts that a model may have below its head; any other would have to be computed, too."""


@dataclass(slots=True)
class DecoderBlocks:
    """The modules of one partition, on its device."""

    layers: list[Any]
    rotary: Any
    """A function from positions [1, rows] to (cosine, sine), each [1, rows, head size]."""
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
    """A module whose results are multiplied by a number."""

    def __init__(self, inner: torch.nn.Module, factor: float) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(entering) * self.factor
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
    config, model, stored = skeleton(reading.folder, dtype, str(key.model))
    if config.num_hidden_layers != blocks:
        raise InvalidInput(
            f"{key.model}/config.json", f"has {config.num_hidden_layers} layers, not {blocks}"
        )
    reason = why_not_precision(stored, numbers.precision)
    if reason is not None:
        raise NotSupported(f"{key.model} {reason}")
    base = model.model
    wanted = _modules(model, key.first_block, key.last_block)
    with _Files(reading, device) as files:
        files.expect(tuple(wanted))
        memory = _fill(wanted, files, numbers, stored)
    rotary = type(base.rotary_emb)(config=config).to(device)
    memory += sum(buffer.nbytes for buffer in rotary.buffers())
    last = key.last_block == blocks
    entering = OperandCache()

    def ready(module: torch.nn.Module) -> torch.nn.Module:
        return module if dtype is torch.float32 else widened(module, entering)

    return DecoderBlocks(
        layers=[ready(base.layers[i]) for i in range(key.first_block, key.last_block)],
        rotary=rotary,
        embedding=(
            _scaled(ready(base.embed_tokens), embedding_scale(config)) if not key[1] else None
        ),
        norm=ready(base.norm) if last else None,
        head=_scaled(ready(model.lm_head), logit_scale(config)) if last else None,
        entering=entering,
        memory_bytes=memory,
    )


def check_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises unless a folder's tensors are all that its configuration needs.

    Args:
        folder: A folder with a `config.json`.
        shapes: The shapes of the tensors it has, by name.

    Raises:
        NotSupported: The model's family, or its rotary embedding, is not supported.
        InvalidInput: A tensor is missing or has another shape.
    """
    config, model, stored = skeleton(folder, torch.bfloat16, "the model")
    for prefix, module in _modules(model, 0, config.num_hidden_layers).items():
        for name, linear in _linears(prefix, module):
            if stored is None or f"{name}.{CODES}" not in shapes:
                continue
            assert stored is not None
            for part, shape in stored.parts(linear.out_features, linear.in_features).items():
                _check_there(f"{name}.{part}", shape, shapes)
            linear.weight = None
        for name, expected in module.state_dict().items():
            _check_there(_stored_name(prefix + name, shapes), tuple(expected.shape), shapes)


def skeleton(
    folder: Path, dtype: torch.dtype, what: str
) -> tuple[Any, Any, StoredQuantisation | None]:
    """Returns configuration, model without memory, and the quantisation of its files.

    Raises:
        NotSupported: Its family, rotary embedding or quantisation is not supported.
    """
    import transformers

    transformers.AttentionInterface.register(ATTENTION, attend)
    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    facts = config.to_dict()
    reason = why_not(facts)
    if reason is not None:
        raise NotSupported(f"{what}: {reason}")
    stored = stored_as(facts)
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in ROTARY_TYPES:
        raise NotSupported(f"{what} has rotary embeddings of type {kind!r}")
    automatic: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = automatic.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    others = {name for name, _ in model.model.named_children()} - _PARTS
    if others:
        raise NotSupported(f"{what} has parts that nobody computes: {', '.join(sorted(others))}")
    if getattr(model.lm_head, "bias", None) is not None:
        raise NotSupported(f"{what} has a projection with a bias")
    # It may be tied to an embedding that is not here; its weight is set when it is loaded.
    model.lm_head = torch.nn.Linear(
        config.hidden_size, config.vocab_size, bias=False, device="meta", dtype=dtype
    )
    model.requires_grad_(False).eval()
    return config, model, stored


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


def _modules(model: Any, first: int, last: int) -> dict[str, Any]:
    """Returns the modules of blocks `[first, last)`, by the prefix of their tensors' names."""
    base = model.model
    wanted = {f"model.layers.{i}.": base.layers[i] for i in range(first, last)}
    if first == 0:
        wanted["model.embed_tokens."] = base.embed_tokens
    if last == len(base.layers):
        wanted |= {"model.norm.": base.norm, "lm_head.": model.lm_head}
    return wanted


def _scaled(module: torch.nn.Module, factor: float) -> torch.nn.Module:
    return module if factor == 1.0 else ScaledModule(module, factor)


def _stored_name(name: str, stored: Mapping[str, object]) -> str:
    """Returns a tensor's name in the files: that of the embedding for a tied projection."""
    return EMBEDDING if name == _HEAD and name not in stored else name


def _check_there(
    name: str, expected: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    if name not in shapes:
        raise InvalidInput(name, "is not in the model's files")
    _check_shape(name, shapes[name], expected)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise InvalidInput(name, f"is {list(found)}, not {list(expected)}")


def _linears(prefix: str, module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Returns the matrices of a layer by full name; none for embedding and head."""
    if not prefix.startswith("model.layers."):
        return []
    found = [(n, each) for n, each in module.named_modules() if isinstance(each, torch.nn.Linear)]
    return [(prefix + name, each) for name, each in found]


class _Files:
    """The tensors of a model's files, each read directly to its device when it is needed."""

    def __init__(self, reading: VerifiedReading, device: torch.device) -> None:
        self._reading = reading
        self.device = device
        self._readers: dict[Path, Any] = {}
        self._stack = ExitStack()
        self.places = places_in(reading)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

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
        from safetensors import safe_open

        if name not in self.places:
            raise InvalidInput(name, "is not in the model's files")
        file, where = self.places[name]
        if expected is not None:
            _check_shape(name, where.shape, expected)
        if file not in self._readers:
            opened = safe_open(file, framework="pt", device=str(self.device))
            self._readers[file] = self._stack.enter_context(opened)
        self._reading.begin(file, [(where.offset, where.nbytes)])
        tensor: torch.Tensor = self._readers[file].get_tensor(name)
        return tensor


def _fill(
    wanted: dict[str, Any], files: _Files, numbers: WeightFormat, stored: StoredQuantisation | None
) -> int:
    """Gives the modules their weights; returns their bytes, shared ones counted once."""
    read: dict[str, torch.Tensor] = {}
    memory = 0
    for prefix, module in wanted.items():
        for name, linear in _linears(prefix, module):
            made = _quantised(name, linear, files, numbers, stored)
            if made is not None:
                module.set_submodule(name.removeprefix(prefix), made)
                memory += sum(buffer.nbytes for buffer in made.buffers())
        state = {}
        for name, expected in module.state_dict().items():
            full = _stored_name(prefix + name, files.places)
            if full not in read:
                tensor = files.read(full, tuple(expected.shape))
                read[full] = _converted(full, tensor, numbers.dtype)
            else:
                _check_shape(full, tuple(read[full].shape), tuple(expected.shape))
            state[name] = read[full]
        module.load_state_dict(state, assign=True)
    return memory + sum(tensor.nbytes for tensor in read.values())


def _converted(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor in a datatype.

    Raises:
        NotSupported: A value is too large for float16.
    """
    made = tensor.to(dtype)
    if dtype is torch.float16 and tensor.dtype is not dtype and made.numel():
        least, most = made.aminmax()
        if torch.isinf(least) or torch.isinf(most):
            raise NotSupported(f"{name} is too large for float16: set decoder_numbers to bfloat16")
    return made


def _quantised(
    name: str, linear: Any, files: _Files, numbers: WeightFormat, stored: StoredQuantisation | None
) -> Quantised | None:
    """Returns the layer that replaces a matrix; None if the matrix stays."""
    shape = linear.out_features, linear.in_features
    dtype = step_dtype(files.device, numbers.dtype, numbers.precision)
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
            dtype,
            files.read(index, shape[1:]) if index in files.places else None,
        )
    if stored is not None or not is_quantised(numbers.precision, *shape):
        return None
    return quantised(files.read(f"{name}.weight", shape), bias, numbers.precision, dtype)
