"""Preparation of a model: it is probed, cut and timed, and `blocks.json` is written.

Node times of the probing run come from an unoptimised session, where every value is visible and
nothing is fused. They determine the first cuts. Then each block is timed as a separate session, as
it will be served, the node times are scaled to the measurements, and the cuts are chosen again.
Last, the kernels of each block are counted, from which its times on other devices are estimated.

All of this happens in the jail (`catenary_services.jail`), because the model comes from a stranger.
The result is a table that is checked before it is written. `content.json` is written again as well.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from catenary_agent.partitioning.graph import CutGraph
from catenary_agent.partitioning.jailed import (
    CutModel,
    CutOrder,
    SentArray,
    answer_of,
    checked_examples,
    checked_table,
    work_on_model,
)
from catenary_agent.partitioning.signature import PartitionSignature, wire_boundary
from catenary_agent.preparing import cutting
from catenary_agent.preparing.counting import count_kernels
from catenary_agent.preparing.cutting import choose_cuts
from catenary_agent.preparing.probe import ProbedModel, ProbeOrder, ProbeResult, Values
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.model import (
    SHORTEST_TEXT_TOKENS,
    BlockCosts,
    BlockTable,
    Boundary,
    ModelManifest,
    TokenUnits,
)
from catenary_services.domain.tensors import ANY, BYTES, DATATYPE_OF, DTYPE_OF, TensorSpec
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.jail.child import JailWorkspace
from catenary_services.jail.run import run_jailed
from catenary_services.models.model_repository import ExampleShapes, ModelRepository
from catenary_services.transport.bytes_tensors import decode_bytes, encode_bytes

_RUNS = 5
_MOST_UNITS = 256
_LEAST_UNIT_TOKENS = 16
_BALANCED = 1.3
"""The ratio of the longest block to the mean up to which a second choice of cuts is not
worthwhile."""


def prepare_model(
    repository: ModelRepository,
    key: ModelKey,
    blocks: int = 10,
    example: Values | None = None,
) -> BlockTable:
    """Cuts a model into blocks of about equal run time and writes the table beside it.

    The content record of the version is written again, too.

    Args:
        repository: The repository with the model, to which `blocks.json` is written.
        key: The model.
        blocks: Wanted number of blocks; small models get fewer.
        example: Inputs of one row, for models that do not run on random ones of a usual size.

    Returns:
        The table: every offered cut is a boundary.

    Raises:
        InvalidInput: The file is not a model, or runs at no size tried.
        NotSupported: Its inputs or outputs are not tensors of datatypes that are sent.
    """
    if blocks < 1:
        raise InvalidInput("blocks", f"is {blocks}, not at least 1")
    # Preparing a version again is how it is recorded anew after a deliberate change.
    if repository.is_recorded(key):
        repository.record_content(key)
    manifest = repository.manifest(key)
    file = repository.model_file(key)
    model_hash = repository.model_hash(key)
    order = CutOrder(
        key=key,
        platform=manifest.platform,
        file=file.name,
        blocks=blocks,
        smallest_ns=cutting.SMALLEST_BLOCK_NS,
        example={name: _sent(array) for name, array in (example or {}).items()},
        dimensions=dict(manifest.dimensions),
        text_tokens=manifest.text_tokens,
    )
    target = f"{cut_in_jail.__module__}:{cut_in_jail.__name__}"
    work = work_on_model(file, manifest.platform, target, msgspec.json.encode(order))
    made = answer_of(run_jailed(work), CutModel, file.name)
    table = replace(checked_table(made.table, file.name), model_hash=model_hash, units=None)
    examples = checked_examples(made.examples, table, file.name)
    if manifest.text_tokens:
        _check_for_texts(table)
        table = replace(table, units=units_of(table, examples, manifest))
    repository.write_block_table(key, table, examples)
    repository.record_content(key)
    return table


def _check_for_texts(table: BlockTable) -> None:
    """Checks that texts of unlike lengths may share a batch of a model.

    Raises:
        NotSupported: They may not; the tensor is named.
    """
    if not table.batched:
        raise NotSupported("text_tokens: the first size of inputs and outputs is not the batch")
    for tensor in table.boundaries[-1].tensors:
        if ANY in tensor.shape[1:]:
            text = f"text_tokens: the output {tensor.name!r} has a size that texts decide"
            raise NotSupported(text)


def units_of(
    table: BlockTable, examples: ExampleShapes, manifest: ModelManifest
) -> TokenUnits | None:
    """Returns the units in which batches of a model that is given texts are counted.

    The largest batch has no more than 256 of them: a time is kept of each size. Smaller units would
    be booked more exactly, but costs grow by little within one.

    Returns:
        None if a size that is free is not the length of the texts, so that only batches of texts of
        full length can be measured.
    """
    longest = manifest.text_tokens
    for boundary, shapes in zip(table.boundaries, examples, strict=True):
        for tensor, shape in zip(boundary.tensors, shapes, strict=True):
            free = [size for named, size in zip(tensor.shape, shape, strict=True) if named == ANY]
            if set(free[1:]) - {longest}:
                return None
    fewest = -(-manifest.max_batch * longest // _MOST_UNITS)
    tokens = max(_LEAST_UNIT_TOKENS, -(-fewest // SHORTEST_TEXT_TOKENS) * SHORTEST_TEXT_TOKENS)
    return TokenUnits(tokens, longest)


def cut_in_jail(job: bytes, room: JailWorkspace) -> bytes:
    """Probes and cuts the model of an encoded `CutOrder`; answers with an encoded `CutModel`."""
    order = msgspec.json.decode(job, type=CutOrder)
    file = room.inputs[0] / order.file
    example = {name: _received(sent) for name, sent in order.example.items()} or None
    if order.platform == "pytorch_exported":
        from catenary_agent.preparing.torch_probe import probe_torch

        probed = probe_torch(file, ProbeOrder(example, order.dimensions, order.text_tokens))
    else:
        from catenary_agent.preparing.onnx_probe import probe_onnx

        probed = probe_onnx(file, ProbeOrder(example, order.dimensions, order.text_tokens))
    table = _cut(probed, order)
    table = replace(table, kernels=_counted(probed, table, order, file))
    return msgspec.json.encode(CutModel(table, _example_shapes(probed, table)))


def _counted(probed: ProbedModel, table: BlockTable, order: CutOrder, file: Path) -> BlockCosts:
    """Returns the kernels of every block; none if an operation of the model cannot be counted."""
    shapes = _example_shapes(probed, table)
    blocks = [_signature(order.key, table, shapes, block) for block in range(table.blocks)]
    try:
        return count_kernels(order.platform, file, table, blocks)
    except Exception:
        # A model that can be served is not refused because nobody can estimate its times.
        return ()


def _signature(
    key: ModelKey, table: BlockTable, shapes: ExampleShapes, block: int
) -> PartitionSignature:
    return PartitionSignature(
        key=PartitionKey(key, block, block + 1),
        batched=table.batched,
        inputs=wire_boundary(table, block, False),
        outputs=wire_boundary(table, block + 1, False),
        example_inputs=shapes[block],
        example_outputs=shapes[block + 1],
    )


def _sent(array: np.ndarray) -> SentArray:
    datatype = DATATYPE_OF[array.dtype]
    content = encode_bytes(array) if datatype == BYTES else array.tobytes()
    return SentArray(datatype, array.shape, content)


def _received(sent: SentArray) -> np.ndarray:
    if sent.datatype == BYTES:
        return decode_bytes(sent.content, sent.shape)
    return np.frombuffer(sent.content, DTYPE_OF[sent.datatype]).reshape(sent.shape).copy()


def _cut(probed: ProbedModel, order: CutOrder) -> BlockTable:
    key, blocks, smallest_ns = order.key, order.blocks, order.smallest_ns
    probe = probed.probe
    ends = [spec for name, spec in probe.specs.items() if name in probe.example]
    ends += [probe.specs[name] for name in probed.outputs if name in probe.specs]
    for name in probed.outputs:
        if name not in probe.specs:
            raise NotSupported(f"{key}: the output {name!r} is of a type that cannot be sent")
    batched = probe.is_batched([spec.name for spec in ends])
    immovable = frozenset(
        name
        for name in probe.row_bytes
        if name not in probe.specs or (batched and name not in probe.batched)
    )
    costs = np.array(probed.node_costs)
    graph = probed.graph(probe, costs.tolist(), immovable)
    cuts = choose_cuts(graph, blocks, smallest_ns)
    table = _timed(probed, key, _table(probe, graph, cuts, batched))
    if max(table.compute_ns) <= _BALANCED * np.mean(table.compute_ns):
        return table
    edges = [0, *cuts, len(costs)]
    for i, measured in enumerate(table.compute_ns):
        part = slice(edges[i], edges[i + 1])
        costs[part] *= measured / costs[part].sum()
    graph = probed.graph(probe, costs.tolist(), immovable)
    again = choose_cuts(graph, blocks, smallest_ns)
    if again == cuts:
        return table
    other = _timed(probed, key, _table(probe, graph, again, batched))
    return min(table, other, key=_imbalance)


def _imbalance(table: BlockTable) -> float:
    # More blocks are worth more than a perfect balance of fewer, so the longest block is compared.
    return float(max(table.compute_ns))


def _table(probe: ProbeResult, graph: CutGraph, cuts: Sequence[int], batched: bool) -> BlockTable:
    sets = graph.crossing_sets()
    boundaries = []
    for position in (0, *cuts, len(graph.nodes)):
        names = sets[position]
        tensors = tuple(_spec(probe.specs[name], batched) for name in names)
        boundaries.append(Boundary(tensors, sum(probe.row_bytes[name] for name in names)))
    return BlockTable("", batched, tuple(boundaries), (0,) * (len(boundaries) - 1))


def _spec(spec: TensorSpec, batched: bool) -> TensorSpec:
    return TensorSpec(spec.name, spec.datatype, (-1, *spec.shape[1:])) if batched else spec


def _timed(probed: ProbedModel, key: ModelKey, table: BlockTable) -> BlockTable:
    """Returns the table with the time of each block, measured as it will be served."""
    values = [probed.probe.example[t.name] for t in table.boundaries[0].tensors]
    shapes = _example_shapes(probed, table)
    compute_ns = []
    for block in range(table.blocks):
        ends = _signature(key, table, shapes, block)
        with tempfile.TemporaryDirectory(prefix="catenary-block-") as folder:
            executor = probed.build(table, ends, Path(folder))
            taken = []
            results = executor.run(values)
            for _ in range(_RUNS):
                started = time.perf_counter_ns()
                executor.run(values, results if executor.output_shapes(shapes[block]) else None)
                taken.append(time.perf_counter_ns() - started)
            executor.close()
        compute_ns.append(min(taken))
        values = results
    return BlockTable(table.model_hash, table.batched, table.boundaries, tuple(compute_ns))


def _example_shapes(probed: ProbedModel, table: BlockTable) -> ExampleShapes:
    return tuple(
        tuple(probed.shapes[tensor.name] for tensor in boundary.tensors)
        for boundary in table.boundaries
    )
