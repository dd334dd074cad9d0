"""Decoder layers of `transformers` with the weights of a range of blocks, and of nothing else.

The model is built without memory (meta device); then only the tensors of the blocks wanted are read
from the safetensors files, by name, each straight to its device.
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
    Stored,
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
from catenary_agent.decoders.torch.torch_wide import Entering, widened
from catenary_agent.executors.device import Device
from catenary_services.content.reading import Reading
from catenary_services.domain.decoder import Runtime
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import InvalidInput, NotSupported

ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on how long the longest session of a step is."""

_HEAD = "lm_head.weight"
_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""All that a model may have below its head; anything else would have to be computed too."""


@dataclass(slots=True)
class DecoderBlocks:
    """The modules of one partition, on its device."""

    layers: list[Any]
    rotary: Any
    """Positions [1, rows] -> (cosine, sine), each [1, rows, head size]."""
    embedding: Any | None
    """Where block 0 is."""
    norm: Any | None
    """Where the last block is."""
    head: Any | None
    """Where the last block is: hidden states -> logits."""
    entering: Entering
    """What its matrices share in a step."""
    memory_bytes: int
    """Of weights, tied ones once, and of the angles of positions."""


class Scaled(torch.nn.Module):
    """A module whose results are multiplied with a number."""

    def __init__(self, inner: torch.nn.Module, factor: float) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        """Returns what the module makes, times the number."""
        result: torch.Tensor = self.inner(entering) * self.factor
        return result


@dataclass(frozen=True, slots=True)
class Numbers:
    """What weights are held in, and where."""

    device: torch.device
    dtype: torch.dtype
    """Of weights that are not quantised. What is computed between matrices is float32."""
    precision: str = "fp32"
    """Of the matrices of layers: "fp32" (as they are), "int8" or "int4"."""


def load_blocks(
    reading: Reading, key: PartitionKey, blocks: int, numbers: Numbers
) -> DecoderBlocks:
    """Reads blocks `[first, last)`, with embedding and head where they belong.

    Args:
        reading: Of a folder with `config.json` and one or more `.safetensors` files.
        key: The partition.
        blocks: Of the whole model.
        numbers: Of weights and computation.

    Raises:
        NotSupported: If the model's family, its rotary embedding or how its weights are quantised
            is not one of ours, or if weights are too large for the numbers they are to be held in.
        InvalidInput: If a tensor is missing or has another shape than the configuration says.
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
        memory = _fill(wanted, files, numbers, stored)
    rotary = type(base.rotary_emb)(config=config).to(device)
    memory += sum(buffer.nbytes for buffer in rotary.buffers())
    last = key.last_block == blocks
    entering = Entering()

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
    """Raises unless a folder's tensors are all that its configuration wants.

    Args:
        folder: With a `config.json`.
        shapes: Of the tensors it has.

    Raises:
        NotSupported: If the model's family, or its rotary embedding, is not one of ours.
        InvalidInput: If a tensor is missing or has another shape.
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


def skeleton(folder: Path, dtype: torch.dtype, what: str) -> tuple[Any, Any, Stored | None]:
    """Returns configuration, model and how its files are quantised; the model is without memory.

    Raises:
        NotSupported: If it is of a family, has rotary embeddings or is quantised in a way that is
            none of ours.
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
    # Tied to an embedding that may not be here; its weight is set when it is loaded.
    model.lm_head = torch.nn.Linear(
        config.hidden_size, config.vocab_size, bias=False, device="meta", dtype=dtype
    )
    model.requires_grad_(False).eval()
    return config, model, stored


def torch_device(device: Device) -> torch.device:
    """Returns PyTorch's name of a device.

    Raises:
        NotSupported: If PyTorch does not see it.
    """
    if device.kind == "cuda":
        if device.index >= torch.cuda.device_count():
            raise NotSupported(f"{device}: PyTorch sees {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", device.index)
    if device.kind != "cpu":
        raise NotSupported(f"{device} cannot run PyTorch")
    return torch.device("cpu")


def compute_dtype(device: torch.device, wanted: str = "auto") -> torch.dtype:
    """Returns what matrices are held in: float32 on a CPU, float16 on a CUDA device.

    Residual streams of this family overflow float16; they are float32 whatever matrices are.

    Args:
        device: Where.
        wanted: "float32", "bfloat16" or "float16", whatever is fast there; "auto": as above.
    """
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    return torch.float16 if device.type == "cuda" else torch.float32


def cache_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns what keys and values are where matrices have a datatype.

    float16 beside bfloat16, too: of the same size they have three bits more.
    """
    return dtype if dtype is torch.float32 else torch.float16


def runtime_of(dtype: torch.dtype) -> Runtime:
    """Returns what an executor that computes in a datatype is called."""
    return Runtime(f"torch-{str(dtype).removeprefix('torch.')}")


def _modules(model: Any, first: int, last: int) -> dict[str, Any]:
    """Returns the modules of blocks `[first, last)`, by how their tensors' names begin."""
    base = model.model
    wanted = {f"model.layers.{i}.": base.layers[i] for i in range(first, last)}
    if first == 0:
        wanted["model.embed_tokens."] = base.embed_tokens
    if last == len(base.layers):
        wanted |= {"model.norm.": base.norm, "lm_head.": model.lm_head}
    return wanted


def _scaled(module: torch.nn.Module, factor: float) -> torch.nn.Module:
    return module if factor == 1.0 else Scaled(module, factor)


def _stored_name(name: str, stored: Mapping[str, object]) -> str:
    """Returns under which name a tensor is in the files: a tied projection is the embedding."""
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
    """Returns the matrices of a layer by full name; of embedding and head there are none."""
    if not prefix.startswith("model.layers."):
        return []
    found = [(n, each) for n, each in module.named_modules() if isinstance(each, torch.nn.Linear)]
    return [(prefix + name, each) for name, each in found]


class _Files:
    """Tensors of a model's files, each read when it is wanted, straight to its device."""

    def __init__(self, reading: Reading, device: torch.device) -> None:
        self._reading = reading
        self.device = device
        self._readers: dict[Path, Any] = {}
        self._stack = ExitStack()
        self.places = places_in(reading)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, expected: tuple[int, ...] | None = None) -> torch.Tensor:
        """Returns a tensor as it is stored.

        Raises:
            InvalidInput: If it is not there, or of another shape.
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


def _fill(wanted: dict[str, Any], files: _Files, numbers: Numbers, stored: Stored | None) -> int:
    """Gives the modules their weights; returns the bytes they take, shared ones counted once."""
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
    """Returns a tensor in a datatype; raises NotSupported if it is too large for it."""
    made = tensor.to(dtype)
    if dtype is torch.float16 and tensor.dtype is not dtype and made.numel():
        least, most = made.aminmax()
        if torch.isinf(least) or torch.isinf(most):
            raise NotSupported(f"{name} is too large for float16: set decoder_numbers to bfloat16")
    return made


def _quantised(
    name: str, linear: Any, files: _Files, numbers: Numbers, stored: Stored | None
) -> Quantised | None:
    """Returns what takes the place of a matrix; None if it stays as it is."""
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
