"""The sizes of a language model in every form it is held in, from its config and its tensors.

What PyTorch holds follows from names and shapes of the tensors in the weights, without a graph and
without reading them; what ONNX Runtime holds is counted in the graph of a precision, if there is
one. Of both, `table_from` makes a table; nothing is loaded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from catenary_agent.decoders.model_files.embedding import EMBEDDING
from catenary_agent.decoders.model_files.quantisation import (
    CODES,
    QUANTISED_PARTS,
    Stored,
    matrix_bytes,
    stored_as,
    unpacking_bytes,
)
from catenary_agent.decoders.model_files.weights import StoredTensor, stored_tensors
from catenary_services.domain.decoder import DecoderTable, Form, HeldSizes, StepSizes
from catenary_services.errors import InvalidInput

_FLOAT32_BYTES = 4
TORCH_ITEM_BYTES = {Form.TORCH_FLOAT32: 4, Form.TORCH_BFLOAT16: 2, Form.TORCH_FLOAT16: 2}
"""Of a weight and of a number in the caches."""
ONNX_FORMS = {"fp32": Form.ONNX_FP32, "int8": Form.ONNX_INT8, "int4": Form.ONNX_INT4}
_TORCH_SCRATCH_BYTES = 1 << 17
"""Of matrix products and attention, on a CPU: up to 80,000 bytes were measured."""
TILE_BYTES = 1 << 20
"""Of a matrix of 16 bits that is widened at a time on a CPU: what stays in a core's cache."""
GATHERED_BYTES = 3 << 22
"""Of caches that are copied at a time on devices where no kernel reads slots in place. These hold
float16; what is copied is laid out anew once."""
_ONNX_ARENA_BYTES = 9 << 19
"""Blocks and head have an arena each, which begins with a MiB; the first doubles soon."""
_ONNX_GROWTH = 2.5
"""An arena that lacks a byte doubles, and is not packed without gaps."""
_HEAD = "lm_head.weight"
_NORM = "model.norm.weight"
_NORM_PARTS = "model.norm."
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(?!.*rotary_emb\.)")
"""Some old files hold angles of positions with every layer; nobody loads them."""


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """What the graph of a precision stores."""

    blocks: tuple[int, ...]
    """Weights of each block."""
    head: int
    """Last norm and projection."""
    angles: int = 0
    """Tables that every range of blocks between two entries has: angles of positions."""


def table_from(
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    model_hash: str,
    end_token_ids: tuple[int, ...] = (),
    graphs: Mapping[str, GraphBytes] | None = None,
    precision: str = "fp32",
) -> DecoderTable:
    """Returns the table of a model, with its sizes in every form.

    Args:
        config: What its `config.json` says.
        tensors: Of all its safetensors files, by name: only names, shapes and types count.
        model_hash: SHA-256 of the weights.
        end_token_ids: Any of them ends a text; see `end_token_ids`.
        graphs: What ONNX graphs store, by precision ("fp32", ..); none: it is held by PyTorch only.
        precision: Of the weights, and of the graph whose sizes are the table's plain ones; without
            that graph they are those of PyTorch in float32.

    Raises:
        InvalidInput: If config, tensors and graphs do not fit together.
    """
    facts = _facts(config)
    blocks = facts["blocks"]
    forms = [torch_sizes(config, tensors, form, precision) for form in TORCH_ITEM_BYTES]
    for name, graph in (graphs or {}).items():
        if len(graph.blocks) != blocks:
            raise InvalidInput(
                "config.json", f"names other layers than the graph's {len(graph.blocks)}"
            )
        forms.append(onnx_sizes(config, graph, ONNX_FORMS[name]))
    plain_form = ONNX_FORMS[precision] if precision in (graphs or {}) else Form.TORCH_FLOAT32
    plain = next(each for each in forms if each.form is plain_form)
    return DecoderTable(
        model_hash=model_hash,
        **facts,
        end_token_ids=end_token_ids,
        block_bytes=plain.largest_block_bytes,
        embedding_bytes=_tensor(tensors, EMBEDDING).nbytes,
        head_bytes=plain.head_bytes,
        cache_bytes_per_token=plain.cache_bytes_per_token,
        forms=tuple(sorted(forms, key=lambda each: str(each.form))),
    )


def torch_sizes(
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    form: Form,
    precision: str = "fp32",
) -> HeldSizes:
    """Returns the sizes of a model in a form of PyTorch.

    Every tensor is in the form's numbers, but for matrices of layers that are quantised.

    Raises:
        InvalidInput: If a block, the embedding or the last norm has no tensors.
    """
    item_bytes, facts = TORCH_ITEM_BYTES[form], _facts(config)
    stored, unpacked = stored_as(config), 0
    blocks = [0] * facts["blocks"]
    for name, tensor in tensors.items():
        match = _BLOCK.match(name)
        if match is not None and int(match[1]) < len(blocks):
            held, turned = _held_bytes(name, tensor, item_bytes, precision, stored)
            blocks[int(match[1])] += held
            unpacked = max(unpacked, turned)
    if not all(blocks):
        raise InvalidInput("config.json", f"names {len(blocks)} layers; some have no weights")
    embedding = math.prod(_tensor(tensors, EMBEDDING).shape) * item_bytes
    projection = math.prod(tensors[_HEAD].shape) * item_bytes if _HEAD in tensors else embedding
    cache = 2 * facts["key_value_heads"] * facts["head_size"] * item_bytes
    step = _torch_step(_widths(config, tensors), facts, form)
    _tensor(tensors, _NORM)
    norm = sum(math.prod(t.shape) for name, t in tensors.items() if name.startswith(_NORM_PARTS))
    return HeldSizes(
        form=form,
        block_bytes=tuple(blocks),
        embedding_bytes=embedding,
        head_bytes=norm * item_bytes + projection,
        shared_bytes=0 if _HEAD in tensors else embedding,
        # Two buffers of angles in float32; the spare row takes what the padding of steps writes.
        fixed_bytes=2 * (_rotated(config, facts) // 2) * _FLOAT32_BYTES + cache,
        entry_bytes=0,
        cache_bytes_per_token=cache,
        step=replace(step, base_bytes=step.base_bytes + unpacked),
    )


def _rotated(config: Mapping[str, Any], facts: Mapping[str, int]) -> int:
    """Returns how much of a head is rotated."""
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return int(facts["head_size"] * part)


def _held_bytes(
    name: str, tensor: StoredTensor, item_bytes: int, precision: str, stored: Stored | None
) -> tuple[int, int]:
    """Returns what PyTorch holds of a tensor of a layer, and what it takes to turn it to numbers.

    The latter only where no kernel multiplies with codes, which is not known here.
    """
    if stored is not None:
        if name.endswith(QUANTISED_PARTS):
            if not name.endswith(CODES):
                return 0, 0  # counted with the codes
            shape = stored.shape(tensor.shape)
            held = matrix_bytes("int4", shape, item_bytes, stored.group)
            return held, unpacking_bytes("int4", shape, item_bytes)
    elif len(tensor.shape) == 2:
        shape = tensor.shape[0], tensor.shape[1]
        turned = unpacking_bytes(precision, shape, item_bytes)
        return matrix_bytes(precision, shape, item_bytes), turned
    return math.prod(tensor.shape) * item_bytes, 0


def onnx_sizes(config: Mapping[str, Any], graph: GraphBytes, form: Form) -> HeldSizes:
    """Returns the sizes of a model in a form of ONNX Runtime, which keeps caches in float32."""
    facts = _facts(config)
    return HeldSizes(
        form=form,
        block_bytes=graph.blocks,
        embedding_bytes=0,  # rows are looked up in the file, which is mapped
        head_bytes=graph.head,
        shared_bytes=0,
        fixed_bytes=0,
        entry_bytes=graph.angles,
        cache_bytes_per_token=2 * facts["key_value_heads"] * facts["head_size"] * _FLOAT32_BYTES,
        step=_onnx_step(_widths(config, {}), facts),
    )


def read_table(folder: Path, precision: str, model_hash: str) -> DecoderTable:
    """Returns the sizes of the model in `folder`, its graph of `precision` included.

    Raises:
        InvalidInput: If config, weights and graph do not fit together.
    """
    config = _json(folder / "config.json")
    return table_from(
        config,
        all_tensors(folder),
        model_hash=model_hash,
        end_token_ids=end_token_ids(folder),
        graphs={precision: graph_bytes(folder / f"onnx-{precision}")},
        precision=precision,
    )


def graph_bytes(folder: Path) -> GraphBytes:
    """Returns what the graph in a folder stores."""
    # Everything that imports models comes by here, also where no ONNX library is installed.
    from catenary_agent.decoders.model_files.onnx_graph import angle_bytes, part_bytes

    blocks, head = part_bytes(folder)
    return GraphBytes(tuple(blocks), head, angle_bytes(folder))


def all_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of every safetensors file in a folder, by name.

    Raises:
        InvalidInput: If there is none, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidInput(folder.name, "has no .safetensors file")
    found: dict[str, StoredTensor] = {}
    for file in files:
        found |= stored_tensors(file)
    return found


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Returns the tokens that end a text: of the generation config and of the config."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            given = _json(folder / name).get("eos_token_id")
            found.extend(given if isinstance(given, list) else [given])
    return tuple(sorted({each for each in found if isinstance(each, int)}))


@dataclass(frozen=True, slots=True)
class _Widths:
    """Numbers of one row."""

    hidden: int
    inner: int
    """Of the feed-forward part."""
    query: int
    key: int
    """Of keys, and of values."""
    norms_query: bool
    """Queries and keys are normalised, which is done in float32."""


def _widths(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> _Widths:
    facts = _facts(config)
    hidden = facts["hidden_size"]
    return _Widths(
        hidden=hidden,
        inner=int(config.get("intermediate_size") or 4 * hidden),
        query=facts["attention_heads"] * facts["head_size"],
        key=facts["key_value_heads"] * facts["head_size"],
        norms_query=any(".q_norm." in name for name in tensors),
    )


def _torch_step(widths: _Widths, facts: Mapping[str, int], form: Form) -> StepSizes:
    """Returns what layers of `transformers` hold at a time, row by row, in float32.

    Alive throughout: the angles, two per number of a head. In the feed-forward part: its input, the
    same normalised and its sum, with gate, other half and product of the inner width. In attention:
    two of the hidden width, keys and values, and four of the queries while these are rotated.
    """
    hidden, query, kept = widths.hidden, widths.query, TORCH_ITEM_BYTES[form]
    narrow = 0 if form is Form.TORCH_FLOAT32 else kept
    # What enters a matrix is kept for the next one; bfloat16's come out twice, and are added.
    entering = 2 * narrow
    twice = _FLOAT32_BYTES if form is Form.TORCH_BFLOAT16 else 0
    angles = 2 * facts["head_size"] * _FLOAT32_BYTES
    stages = [
        _FLOAT32_BYTES * (3 * widths.inner + 3 * hidden) + twice * widths.inner,
        _FLOAT32_BYTES * (4 * query + 2 * widths.key + 2 * hidden)
        + narrow * (query + 2 * widths.key)
        + entering * hidden
        + twice * query,
        _FLOAT32_BYTES * 5 * hidden + entering * max(hidden, widths.inner),
    ]
    if widths.norms_query:
        stages.append(_FLOAT32_BYTES * (2 * hidden + 4 * query) + entering * hidden)
    indices = 8 * (facts["blocks"] + 4)
    return StepSizes(
        base_bytes=_TORCH_SCRATCH_BYTES
        + (TILE_BYTES if narrow else 0)
        + (2 * GATHERED_BYTES if form is Form.TORCH_FLOAT16 else 0),
        row_bytes=angles + max(stages) + indices,
        output_bytes=angles + 2 * _FLOAT32_BYTES * hidden + indices,
        logits_bytes=(_FLOAT32_BYTES + 2 * twice) * facts["vocabulary_size"]
        + (3 * _FLOAT32_BYTES + entering) * hidden,
        pair_bytes=1 + kept,
    )


def _onnx_step(widths: _Widths, facts: Mapping[str, int]) -> StepSizes:
    """Returns what ONNX Runtime's arenas come to: they grow by doubling, and give nothing back."""
    hidden, scores = widths.hidden, facts["attention_heads"] * _FLOAT32_BYTES
    row = max(
        3 * widths.inner + 3 * hidden,
        2 * hidden + 3 * widths.query + 4 * widths.key,
    )
    return StepSizes(
        base_bytes=_ONNX_ARENA_BYTES,
        row_bytes=round(_ONNX_GROWTH * _FLOAT32_BYTES * row),
        output_bytes=0,
        logits_bytes=round(
            _ONNX_GROWTH * _FLOAT32_BYTES * (2 * facts["vocabulary_size"] + 3 * hidden)
        ),
        context_bytes=round(_ONNX_GROWTH * scores),
        pair_bytes=round(_ONNX_GROWTH * scores),
        kept_by_entries=1,
    )


def _facts(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes that a config names, as the table calls them."""
    try:
        heads = int(config["num_attention_heads"])
        return {
            "blocks": int(config["num_hidden_layers"]),
            "hidden_size": int(config["hidden_size"]),
            "attention_heads": heads,
            "key_value_heads": int(config.get("num_key_value_heads") or heads),
            "head_size": int(config.get("head_dim") or config["hidden_size"] // heads),
            "vocabulary_size": int(config["vocab_size"]),
            "context_tokens": int(config["max_position_embeddings"]),
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InvalidInput("config.json", f"does not say a size: {error}") from None


def _tensor(tensors: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    found = tensors.get(name)
    if found is None:
        raise InvalidInput("model.safetensors", f"has no {name}")
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(path.name, f"cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise InvalidInput(path.name, "is not an object")
    return document
