"""The memory sizes of a language model in every form, computed from its config and its tensors.

The sizes in PyTorch follow from names and shapes of the weight tensors, without reading them. The
sizes in ONNX Runtime are counted in the graph of a precision, if there is one. `table_from` makes a
table of both; nothing is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from catenary_agent.decoders.model_files.description import (
    DecoderDescription,
    describe,
    read_object,
)
from catenary_agent.decoders.model_files.embedding import EMBEDDING
from catenary_agent.decoders.model_files.quantisation import (
    CODES,
    QUANTISED_PARTS,
    StoredQuantisation,
    matrix_bytes,
    stored_as,
    unpacking_bytes,
)
from catenary_agent.decoders.model_files.stored_names import HEAD, is_router
from catenary_agent.decoders.model_files.weights import StoredTensor, stored_tensors
from catenary_services.domain.decoder import AllocatedSizes, DecoderForm, DecoderTable, StepSizes
from catenary_services.errors import InvalidInput

_FLOAT32_BYTES = 4
TORCH_ITEM_BYTES = {
    DecoderForm.TORCH_FLOAT32: 4,
    DecoderForm.TORCH_BFLOAT16: 2,
    DecoderForm.TORCH_FLOAT16: 2,
}
"""Size of a weight, and of a number in the caches, in bytes."""
ONNX_FORMS = {
    "fp32": DecoderForm.ONNX_FP32,
    "int8": DecoderForm.ONNX_INT8,
    "int4": DecoderForm.ONNX_INT4,
}
_TORCH_SCRATCH_BYTES = 1 << 17
"""Temporary memory of matrix products and attention on a CPU; up to 80,000 bytes were measured."""
TILE_BYTES = 1 << 20
"""The bytes of a 16-bit matrix that are widened to float32 at a time on a CPU, so that they stay in
a core's cache."""
GATHERED_BYTES = 3 << 22
"""The bytes of caches that are copied at a time on devices where no kernel reads slots in place.
These hold float16; what is copied is rearranged once."""
SCORED_BYTES = 1 << 22
"""About the bytes of scores, and of keys and values widened for them, that are computed at a time
where no kernel knows the formula of attention."""
SCORED_ROWS = 128
"""The rows of which scores are computed at a time."""
_ONNX_ARENA_BYTES = 9 << 19
"""The initial arenas of ONNX Runtime: blocks and head have one each, which begins with 1 MiB, and
the first doubles soon."""
_ONNX_GROWTH = 2.5
"""The growth of an arena relative to its content: it doubles when it is full, and has gaps."""
_NORM = "model.norm.weight"
_NORM_PARTS = "model.norm."
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(?!.*rotary_emb\.)")
"""The names of tensors of a layer. Some old files have position angles in every layer, which are
not loaded."""


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """The sizes of the tensors in the graph of a precision, in bytes."""

    blocks: tuple[int, ...]
    """Size of each block's weights."""
    head: int
    """Size of the last norm and the projection."""
    angles: int = 0
    """Size of the position angles, which every range of blocks between two entries holds once."""


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
        config: The content of its `config.json`.
        tensors: The tensors of all its safetensors files by name; only names, shapes and types
            count.
        model_hash: SHA-256 of the weights.
        end_token_ids: The tokens that end a text; see `end_token_ids`.
        graphs: The sizes of its ONNX graphs by precision; without any, only PyTorch holds it.
        precision: The precision of the weights, and of the graph whose sizes are the table's plain
            ones; without that graph they are those of PyTorch in float32.

    Raises:
        InvalidInput: Config, tensors and graphs contradict each other.
    """
    described = describe(config)
    forms = [torch_sizes(config, tensors, form, precision) for form in TORCH_ITEM_BYTES]
    for name, graph in (graphs or {}).items():
        if len(graph.blocks) != described.blocks:
            raise InvalidInput(
                "config.json", f"names other layers than the graph's {len(graph.blocks)}"
            )
        forms.append(onnx_sizes(config, graph, ONNX_FORMS[name]))
    plain_form = ONNX_FORMS[precision] if precision in (graphs or {}) else DecoderForm.TORCH_FLOAT32
    plain = next(each for each in forms if each.form is plain_form)
    return DecoderTable(
        model_hash=model_hash,
        blocks=described.blocks,
        hidden_size=described.hidden_size,
        attention_heads=described.attention_heads,
        key_value_heads=described.key_value_heads,
        head_size=described.head_size,
        vocabulary_size=described.vocabulary_size,
        context_tokens=described.graph_context_tokens if graphs else described.context_tokens,
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
    form: DecoderForm,
    precision: str = "fp32",
) -> AllocatedSizes:
    """Returns the sizes of a model in a form of PyTorch.

    Every tensor has the form's number format, except matrices of layers that are quantised.

    Raises:
        InvalidInput: A block, the embedding or the last norm has no tensors.
    """
    item_bytes, described = TORCH_ITEM_BYTES[form], describe(config)
    stored, unpacked = stored_as(config), 0
    blocks = [0] * described.blocks
    for name, tensor in tensors.items():
        match = _BLOCK.match(name)
        if match is not None and int(match[1]) < len(blocks):
            held, turned = _held_bytes(name, tensor, item_bytes, precision, stored)
            blocks[int(match[1])] += held
            unpacked = max(unpacked, turned)
    if not all(blocks):
        raise InvalidInput("config.json", f"names {len(blocks)} layers; some have no weights")
    embedding = math.prod(_tensor(tensors, EMBEDDING).shape) * item_bytes
    projection = math.prod(tensors[HEAD].shape) * item_bytes if HEAD in tensors else embedding
    cache = 2 * described.key_value_heads * described.head_size * item_bytes
    step = _torch_step(described, form)
    _tensor(tensors, _NORM)
    norm = sum(math.prod(t.shape) for name, t in tensors.items() if name.startswith(_NORM_PARTS))
    return AllocatedSizes(
        form=form,
        block_bytes=tuple(blocks),
        embedding_bytes=embedding,
        head_bytes=norm * item_bytes + projection,
        shared_bytes=0 if HEAD in tensors else embedding,
        # Two buffers of angles in float32, and a spare row that receives the padding of steps.
        fixed_bytes=2 * _angles(described) * (described.rotated_size // 2) * _FLOAT32_BYTES + cache,
        entry_bytes=0,
        cache_bytes_per_token=cache,
        step=replace(step, base_bytes=step.base_bytes + unpacked),
    )


def _angles(described: DecoderDescription) -> int:
    """Returns how many rotary embeddings a model has."""
    return len(set(described.rotary_kinds)) or 1


def _held_bytes(
    name: str,
    tensor: StoredTensor,
    item_bytes: int,
    precision: str,
    stored: StoredQuantisation | None,
) -> tuple[int, int]:
    """Returns the bytes of a layer's tensor in PyTorch, and the bytes to dequantise it.

    The latter bound what kernels for codes take, too; whether there are any is not known here.
    """
    if is_router(name):
        return math.prod(tensor.shape) * _FLOAT32_BYTES, 0
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


def onnx_sizes(config: Mapping[str, Any], graph: GraphBytes, form: DecoderForm) -> AllocatedSizes:
    """Returns the sizes of a model in a form of ONNX Runtime, which keeps caches in float32."""
    described = describe(config)
    return AllocatedSizes(
        form=form,
        block_bytes=graph.blocks,
        embedding_bytes=0,  # rows are looked up in the memory-mapped file
        head_bytes=graph.head,
        shared_bytes=0,
        fixed_bytes=0,
        entry_bytes=graph.angles,
        cache_bytes_per_token=2 * described.key_value_heads * described.head_size * _FLOAT32_BYTES,
        step=_onnx_step(described),
    )


def read_table(folder: Path, precision: str, model_hash: str) -> DecoderTable:
    """Returns the table of the model in `folder`, including its graph of `precision`.

    Raises:
        InvalidInput: Config, weights and graph contradict each other.
    """
    config = read_object(folder / "config.json")
    return table_from(
        config,
        all_tensors(folder),
        model_hash=model_hash,
        end_token_ids=end_token_ids(folder),
        graphs={precision: graph_bytes(folder / f"onnx-{precision}")},
        precision=precision,
    )


def graph_bytes(folder: Path) -> GraphBytes:
    """Returns the sizes in the graph in a folder."""
    # Imported late: imports run this module also where no ONNX library is installed.
    from catenary_agent.decoders.model_files.onnx_graph import angle_bytes, part_bytes

    blocks, head = part_bytes(folder)
    return GraphBytes(tuple(blocks), head, angle_bytes(folder))


def all_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of every safetensors file in a folder, by name.

    Raises:
        InvalidInput: There is no such file, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidInput(folder.name, "has no .safetensors file")
    found: dict[str, StoredTensor] = {}
    for file in files:
        found |= stored_tensors(file)
    return found


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Returns the tokens that end a text, from the generation config and the config."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            given = read_object(folder / name).get("eos_token_id")
            found.extend(given if isinstance(given, list) else [given])
    return tuple(sorted({each for each in found if isinstance(each, int)}))


def _torch_step(described: DecoderDescription, form: DecoderForm) -> StepSizes:
    """Returns the peak memory of a layer of `transformers`, for each row in float32.

    Two angles per number of a head are alive throughout. The feed-forward part holds its input, the
    normalised input and the sum, in the hidden width, and its own values. Attention holds two
    values of the hidden width, keys and values, and four of the width of the queries while these
    are rotated, or normalised.
    """
    kept, hidden = TORCH_ITEM_BYTES[form], described.hidden_size
    query = described.attention_heads * described.head_size
    key = described.key_value_heads * described.head_size
    narrow = 0 if form is DecoderForm.TORCH_FLOAT32 else kept
    # The input of a matrix is kept for the next one; those of bfloat16 result twice, and are added.
    entering = 2 * narrow
    twice = _FLOAT32_BYTES if form is DecoderForm.TORCH_BFLOAT16 else 0
    angles = 2 * described.head_size * _angles(described) * _FLOAT32_BYTES
    stages = [
        _FLOAT32_BYTES * (4 * query + 2 * key + 2 * hidden)
        + narrow * (query + 2 * key)
        + entering * hidden
        + twice * query,
        _FLOAT32_BYTES * 5 * hidden + entering * max(hidden, described.inner_size),
        *_inner_stages(described, twice, entering),
    ]
    base = _TORCH_SCRATCH_BYTES + (TILE_BYTES if narrow else 0)
    if not described.has_plain_scores:
        base += 2 * SCORED_BYTES
        # Queries, sums and results of the formula, beside all that attention holds.
        stages[0] += _FLOAT32_BYTES * 4 * query
    indices = 8 * (described.blocks + 4)
    return StepSizes(
        base_bytes=base + (2 * GATHERED_BYTES if form is DecoderForm.TORCH_FLOAT16 else 0),
        row_bytes=angles + max(stages) + indices,
        output_bytes=angles + 2 * _FLOAT32_BYTES * hidden + indices,
        logits_bytes=(_FLOAT32_BYTES + 2 * twice) * described.vocabulary_size
        + (3 * _FLOAT32_BYTES + entering) * hidden,
        # Masks of each window, and the one in use as numbers.
        pair_bytes=len(set(described.windows)) + kept,
    )


def _inner_stages(described: DecoderDescription, twice: int, entering: int) -> list[int]:
    """Returns the bytes of a row in the feed-forward part of a layer: gate, other half, product."""
    hidden, experts = described.hidden_size, described.experts
    inner = described.inner_size
    stages = [_FLOAT32_BYTES * (3 * inner + 3 * hidden) + twice * inner]
    if described.has_fused_gate:
        # Both halves are one tensor, which stays while the product is computed.
        fused = _FLOAT32_BYTES * (4 * inner + 3 * hidden) + 2 * twice * inner
        stages.append(fused + entering * max(inner, hidden))
    if experts is not None:
        # All rows may go to the same expert. The router has a score of every expert, three times.
        chosen = experts.chosen * (8 * 4 + _FLOAT32_BYTES * 3)
        wide = _FLOAT32_BYTES * (5 * experts.inner_size + 7 * hidden + 3 * experts.count)
        shared = _FLOAT32_BYTES * 3 * experts.shared_inner_size
        stages.append(wide + shared + chosen + 2 * twice * experts.inner_size + entering * hidden)
    return stages


def _onnx_step(described: DecoderDescription) -> StepSizes:
    """Returns the sizes of ONNX Runtime's arenas, which grow by doubling and never shrink."""
    hidden, scores = described.hidden_size, described.attention_heads * _FLOAT32_BYTES
    query = described.attention_heads * described.head_size
    key = described.key_value_heads * described.head_size
    row = max(3 * described.inner_size + 3 * hidden, 2 * hidden + 3 * query + 4 * key)
    return StepSizes(
        base_bytes=_ONNX_ARENA_BYTES,
        row_bytes=round(_ONNX_GROWTH * _FLOAT32_BYTES * row),
        output_bytes=0,
        logits_bytes=round(
            _ONNX_GROWTH * _FLOAT32_BYTES * (2 * described.vocabulary_size + 3 * hidden)
        ),
        context_bytes=round(_ONNX_GROWTH * scores),
        pair_bytes=round(_ONNX_GROWTH * scores),
        kept_by_entries=1,
    )


def _tensor(tensors: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    found = tensors.get(name)
    if found is None:
        raise InvalidInput("model.safetensors", f"has no {name}")
    return found
