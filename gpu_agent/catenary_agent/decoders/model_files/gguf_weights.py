"""Conversion of GGUF weights for PyTorch agents: 4-bit matrices are kept, the rest becomes float16.

Q4_0, Q4_1 and Q4_K are codes of four bits with a scale and an offset for every 32 weights, which is
the form `torch_quantised.FourBitLinear` computes with: codes are kept, and scales and offsets are
exact in float32. Everything else is converted to float16, one piece at a time. This runs in the
jail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from catenary_agent.decoders.model_files.quantisation import GROUP
from catenary_agent.decoders.model_files.weights import WEIGHTS_FILE, header_bytes
from catenary_services.errors import InvalidInput

_ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""The name that the gguf library has for each supported `model_type`; a Mistral's file says
"llama"."""
_PIECE_ROWS = 4096
_FINEST = np.dtype("<f4")
_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor to be written to the output file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    make: Callable[[], Iterator[_Array]]


def write_weights(
    file: Path, folder: Path, config: Any, *, keep: bool, tell: Callable[[str], None]
) -> None:
    """Writes the weights of a GGUF file as `model.safetensors`.

    Args:
        file: The GGUF file.
        folder: The folder to write to.
        config: The model's configuration, as `transformers` read it from the file.
        keep: Whether matrices of layers stay quantised where possible.
        tell: Called with a text about the matrices that could not be kept.

    Raises:
        InvalidInput: Tensors of the model are missing, or none can be kept.
    """
    import gguf

    check_architecture(config.model_type)
    reader = gguf.GGUFReader(file)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    arch = getattr(gguf.MODEL_ARCH, _ARCHITECTURES[config.model_type])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    parts: list[_Part] = []
    kept: Counter[str] = Counter()
    for name, linear in _tensor_names(config):
        base, _, ending = name.rpartition(".")
        found = stored.get(f"{names.get_name(base)}.{ending}")
        if found is None:
            if ending == "bias" or base == "lm_head":  # optional in some models
                continue
            raise InvalidInput(name, "is not in the file")
        rows = _row_order(config, base, int(found.shape[-1]))
        kind = found.tensor_type.name
        if linear and keep and kind in _SPLIT:
            parts += _kept(base, found, rows)
            kept["kept"] += 1
        else:
            parts.append(_plain(name, found, rows))
            kept[kind] += linear and keep
    count = kept.pop("kept", 0)
    if keep and not count:
        known = ", ".join(_SPLIT)
        raise InvalidInput(file.name, f"has no matrix of {known}: import it as fp32 or int8")
    others = ", ".join(f"{many} of {kind}" for kind, many in sorted(kept.items()) if many)
    if others:
        tell(f"{count} matrices keep their 4 bits; {others} become float16, having no kernel")
    with (folder / WEIGHTS_FILE).open("wb") as out:
        out.write(header_bytes({p.name: (p.dtype, p.shape, p.nbytes) for p in parts}))
        for part in parts:
            for piece in part.make():
                out.write(np.ascontiguousarray(piece).data)


def check_architecture(model_type: str) -> None:
    """Raises InvalidInput unless weights of a GGUF file are known to be those of the model."""
    if model_type not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise InvalidInput("architecture", f"{model_type!r} is none of {known}")


def _tensor_names(config: Any) -> Iterator[tuple[str, bool]]:
    """Yields the tensors a model may have, and whether each is a matrix of a layer."""
    yield "model.embed_tokens.weight", False
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", False
        if config.model_type == "qwen3":
            yield prefix + "self_attn.q_norm.weight", False
            yield prefix + "self_attn.k_norm.weight", False
        for name in ("q", "k", "v", "o"):
            yield f"{prefix}self_attn.{name}_proj.weight", True
            yield f"{prefix}self_attn.{name}_proj.bias", False
        for name in ("gate", "up", "down"):
            yield f"{prefix}mlp.{name}_proj.weight", True
    yield "model.norm.weight", False
    yield "lm_head.weight", False


def _row_order(config: Any, base: str, rows: int) -> _Array | None:
    """Returns the row of the file that each row of the matrix is; None if they are the same.

    In the file of a Llama the halves of rotated heads are interleaved.
    """
    if config.model_type != "llama" or not base.endswith(("q_proj", "k_proj")):
        return None
    heads = config.num_attention_heads if base.endswith("q_proj") else config.num_key_value_heads
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return order.swapaxes(1, 2).reshape(rows)


def _plain(name: str, tensor: Any, rows: _Array | None) -> _Part:
    """Returns a tensor in float16; vectors stay in float32."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    dtype = np.dtype("<f4") if len(shape) == 1 else np.dtype("<f2")

    def make() -> Iterator[_Array]:
        import gguf

        for first in range(0, shape[0], _PIECE_ROWS):
            last = min(first + _PIECE_ROWS, shape[0])
            taken = slice(first, last) if rows is None else rows[first:last]
            values = gguf.dequantize(np.asarray(tensor.data[taken]), tensor.tensor_type)
            yield values.reshape(last - first, *shape[1:]).astype(dtype)

    nbytes = int(np.prod(shape)) * dtype.itemsize
    return _Part(name, "F32" if dtype.itemsize == 4 else "F16", shape, nbytes, make)


def _kept(base: str, tensor: Any, rows: _Array | None) -> list[_Part]:
    """Returns the codes, scales and offsets of a quantised matrix."""
    inputs, outputs = (int(size) for size in tensor.shape)
    if inputs % GROUP:
        raise InvalidInput(base, f"has {inputs} inputs, which is no multiple of {GROUP}")

    def split() -> tuple[_Array, _Array, _Array]:
        data = np.asarray(tensor.data) if rows is None else np.asarray(tensor.data)[rows]
        return _SPLIT[tensor.tensor_type.name](data)

    def codes() -> Iterator[_Array]:
        whole = split()[0].reshape(outputs, inputs)
        yield (whole[:, ::2] << 4) | whole[:, 1::2]

    def scales() -> Iterator[_Array]:
        yield split()[1].reshape(outputs, -1).T.astype(_FINEST)

    def offsets() -> Iterator[_Array]:
        yield split()[2].reshape(outputs, -1).T.astype(_FINEST)

    each = (inputs // GROUP, outputs)
    size = each[0] * each[1] * _FINEST.itemsize
    return [
        _Part(f"{base}.qweight", "U8", (outputs, inputs // 2), outputs * inputs // 2, codes),
        _Part(f"{base}.scales", "F32", each, size, scales),
        _Part(f"{base}.offsets", "F32", each, size, offsets),
    ]


def _blocks(data: _Array, size: int) -> _Array:
    return data.reshape(-1, size)


def _halves(qs: _Array) -> _Array:
    """Returns the 4-bit codes of blocks [n, 16] of bytes, low halves first."""
    return np.concatenate((qs & 15, qs >> 4), axis=1)


def _number(data: _Array) -> _Array:
    """Returns float32 [n] from the bytes [n, 2] of float16."""
    return np.ascontiguousarray(data).view("<f2")[:, 0].astype(_FINEST)


def _q4_0(data: _Array) -> tuple[_Array, _Array, _Array]:
    blocks = _blocks(data, 18)
    scale = _number(blocks[:, :2])
    return _halves(blocks[:, 2:]), scale, -8 * scale


def _q4_1(data: _Array) -> tuple[_Array, _Array, _Array]:
    blocks = _blocks(data, 20)
    return _halves(blocks[:, 4:]), _number(blocks[:, :2]), _number(blocks[:, 2:4])


def _q4_k(data: _Array) -> tuple[_Array, _Array, _Array]:
    from gguf.quants import Q4_K

    blocks = _blocks(data, 144)
    scale, least = _number(blocks[:, :2]), _number(blocks[:, 2:4])
    factors, offsets = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    bytes_of = blocks[:, 16:].reshape(-1, 4, 1, GROUP)
    codes = (bytes_of >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)) & 15
    return (
        codes.reshape(-1, GROUP),
        scale[:, None] * factors.astype(_FINEST),
        -least[:, None] * offsets.astype(_FINEST),
    )


_SPLIT: dict[str, Callable[[_Array], tuple[_Array, _Array, _Array]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}
"""Functions that split raw blocks of a type into codes [blocks, 32], scales and offsets; a weight
is code * scale + offset."""
