"""Conversion of GGUF files to the form that agents and builders of graphs read.

For PyTorch agents 4-bit matrices are kept, and the rest becomes float16; graphs are made of
float32. Q4_0, Q4_1 and Q4_K are codes of four bits with a scale and an offset for every 32 weights,
which is the form `torch_quantised.FourBitLinear` computes with: codes are kept, and scales and
offsets are exact in float32. Everything else is converted one piece at a time. A tensor that nobody
computes with is refused. This runs in the jail.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from catenary_agent.decoders.model_files.gguf_config import ROTATION_FACTORS, config_of
from catenary_agent.decoders.model_files.quantisation import GROUP, QuantisedLayout
from catenary_agent.decoders.model_files.weights import WEIGHTS_FILE, header_bytes
from catenary_services.errors import InvalidInput

_PIECE_ROWS = 4096
_FINEST = np.dtype("<f4")
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError)
"""Exceptions of `gguf` for files that are none of its own, or damaged ones."""
_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor to be written to the output file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    make: Callable[[], Iterator[_Array]]


def write_model(
    reader: Any, folder: Path, *, keep: bool, dtype: str, tell: Callable[[str], None]
) -> None:
    """Writes the model of a GGUF file as `config.json` and `model.safetensors`.

    Args:
        reader: The reader of the file.
        folder: The folder to write to.
        keep: Whether matrices of layers stay quantised where possible.
        dtype: The datatype of all other matrices, "float16" or "float32".
        tell: Called with a text about the matrices that could not be kept.

    Raises:
        InvalidInput: The file says something that is not computed, tensors of the model are
            missing, or none can be kept.
    """
    config = config_of(reader)
    parts = _parts(reader, config, keep=keep, dtype=dtype, tell=tell)
    config["dtype"] = dtype
    if keep:
        config["quantization_config"] = {
            "quant_method": QuantisedLayout.PLAIN,
            "bits": 4,
            "group_size": GROUP,
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    with (folder / WEIGHTS_FILE).open("wb") as out:
        out.write(header_bytes({p.name: (p.dtype, p.shape, p.nbytes) for p in parts}))
        for part in parts:
            for piece in part.make():
                out.write(np.ascontiguousarray(piece).data)


def plain_reader(file: Path) -> Any:
    """Returns a `GGUFReader` of a file whose arrays are plain ones.

    It would make each of a hundred thousand slices as a memory map, which takes several times as
    long; and it would read on behind the end of a file, as often as the file says.

    Raises:
        InvalidInput: It is not a GGUF file.
    """
    import gguf

    class PlainReader(gguf.GGUFReader):
        @property  # type: ignore[override]
        def data(self) -> _Array:
            return self._data

        @data.setter
        def data(self, mapped: _Array) -> None:
            self._data = np.asarray(mapped)

        def _get(
            self, offset: int, dtype: Any, count: int = 1, *order: Any, **byte_order: Any
        ) -> _Array:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self._data):
                raise ValueError("it ends within a value")
            found: _Array = super()._get(offset, dtype, count, *order, **byte_order)
            return found

    try:
        return PlainReader(file)
    except _UNREADABLE as error:
        raise InvalidInput(file.name, f"is not a GGUF file: {error}") from None


def _parts(
    reader: Any,
    config: Mapping[str, Any],
    *,
    keep: bool,
    dtype: str,
    tell: Callable[[str], None],
) -> list[_Part]:
    import gguf

    stored = {tensor.name: tensor for tensor in reader.tensors}
    arch = getattr(gguf.MODEL_ARCH, str(config["model_type"]).upper())
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    parts: list[_Part] = []
    kept: Counter[str] = Counter()
    unread = stored.keys() - {ROTATION_FACTORS}
    for name, linear in _tensor_names(config):
        base, _, ending = name.rpartition(".")
        theirs = f"{names.get_name(base)}.{ending}"
        found = stored.get(theirs)
        if found is None:
            raise InvalidInput(theirs, "is not in the file")
        if not all(found.shape):
            raise InvalidInput(theirs, "is empty")
        unread -= {theirs}
        rows = _row_order(config, base, int(found.shape[-1]))
        kind = found.tensor_type.name
        if linear and keep and kind in _SPLIT:
            parts += _kept(base, found, rows)
            kept["kept"] += 1
        else:
            parts.append(_plain(name, found, rows, dtype))
            kept[kind] += linear and keep
    if unread:
        raise InvalidInput(min(unread), "is in the file, and nobody computes with it")
    count = kept.pop("kept", 0)
    if keep and not count:
        known = ", ".join(_SPLIT)
        text = f"the file has no matrix of {known}: import it as fp32 or int8"
        raise InvalidInput("precision", text)
    others = ", ".join(f"{many} of {kind}" for kind, many in sorted(kept.items()) if many)
    if others:
        tell(f"{count} matrices keep their 4 bits; {others} become float16, having no kernel")
    return parts


def _tensor_names(config: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yields the tensors of a model, and whether each is a matrix of a layer."""
    family = config["model_type"]
    yield "model.embed_tokens.weight", False
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", False
        if family == "qwen3":
            yield prefix + "self_attn.q_norm.weight", False
            yield prefix + "self_attn.k_norm.weight", False
        for name in ("q", "k", "v", "o"):
            yield f"{prefix}self_attn.{name}_proj.weight", True
            if config.get("attention_bias", name != "o"):
                yield f"{prefix}self_attn.{name}_proj.bias", False
        for name in ("gate", "up", "down"):
            yield f"{prefix}mlp.{name}_proj.weight", True
            if config.get("mlp_bias"):
                yield f"{prefix}mlp.{name}_proj.bias", False
    yield "model.norm.weight", False
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", False


def _row_order(config: Mapping[str, Any], base: str, rows: int) -> _Array | None:
    """Returns the row of the file that each row of the matrix is; None if they are the same.

    In the file of a Llama the halves of rotated heads are interleaved.
    """
    if config["model_type"] != "llama" or not base.endswith(("q_proj", "k_proj")):
        return None
    heads = config["num_attention_heads" if base.endswith("q_proj") else "num_key_value_heads"]
    if rows % (2 * heads):
        raise InvalidInput(base, f"has {rows} rows, which {heads} heads cannot share")
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return order.swapaxes(1, 2).reshape(rows)


def _plain(name: str, tensor: Any, rows: _Array | None, wanted: str) -> _Part:
    """Returns a tensor in the wanted datatype; vectors stay in float32."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    dtype = _FINEST if len(shape) == 1 else np.dtype(wanted).newbyteorder("<")

    def make() -> Iterator[_Array]:
        import gguf

        for first in range(0, shape[0], _PIECE_ROWS):
            last = min(first + _PIECE_ROWS, shape[0])
            taken = slice(first, last) if rows is None else rows[first:last]
            try:
                values = gguf.dequantize(tensor.data[taken], tensor.tensor_type)
            except NotImplementedError:
                text = f"is of type {tensor.tensor_type.name}, which is not read"
                raise InvalidInput(tensor.name, text) from None
            yield values.reshape(last - first, *shape[1:]).astype(dtype)

    nbytes = int(np.prod(shape)) * dtype.itemsize
    return _Part(name, "F32" if dtype.itemsize == 4 else "F16", shape, nbytes, make)


def _kept(base: str, tensor: Any, rows: _Array | None) -> list[_Part]:
    """Returns the codes, scales and offsets of a quantised matrix."""
    inputs, outputs = (int(size) for size in tensor.shape)
    if inputs % GROUP:
        raise InvalidInput(base, f"has {inputs} inputs, which is no multiple of {GROUP}")

    def split() -> tuple[_Array, _Array, _Array]:
        data = tensor.data if rows is None else tensor.data[rows]
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
