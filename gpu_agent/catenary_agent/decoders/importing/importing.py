"""Import of language models into the repository, from a GGUF file or a Hugging Face folder.

A model is made in the jail (`catenary_services.jail`) in a hidden folder of the repository, which
is renamed when it is complete, so no process sees half a model. It then has

    model.yaml, blocks.json, decoder.json     what the whole platform reads
    content.json                              the digest of every file here
    config.json, tokenizer*, chat_template*   what the gateway and PyTorch agents read
    model.safetensors                         the weights, as they came; or shards of them and
    model.safetensors.index.json              what is in which, with the digest of each
    onnx-fp32/ (onnx-int8/, onnx-int4/)       the graph CPU agents cut by block, and its weights

Agents on GPUs read the weights unchanged, so an import for them (`target` "gpu") makes no graph and
computes nothing ("ADR 0027"). Shards are linked where possible, else copied.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from catenary_agent.decoders.importing.import_worker import (
    COPIED,
    BuiltGraph,
    ImportedModel,
    ImportOptions,
    ImportOrder,
    check_config,
    graph_and_times_in_jail,
    make_in_jail,
    manifest_of,
)
from catenary_agent.decoders.importing.taking import take_over
from catenary_agent.decoders.model_files.checkpoint import index_text
from catenary_agent.decoders.model_files.weights import INDEX_FILE, WEIGHTS_FILE
from catenary_agent.decoders.onnx.building import check_libraries, import_limits
from catenary_agent.partitioning.jailed import answer_of
from catenary_agent.profiling.decoder_roofline import decode_ns
from catenary_services.content.hashing import digests
from catenary_services.domain.decoder import AllocatedSizes, DecoderForm, DecoderTable
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable, Boundary
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import InvalidInput
from catenary_services.jail.run import JailedWork, run_jailed
from catenary_services.models.model_repository import PRECISIONS, TARGETS, ModelRepository
from catenary_services.models.staging import staged

__all__ = ["ImportOptions", "block_table", "import_decoder"]

_USUAL = ImportOptions()
_LARGEST_SIZE = 1 << 50
_MOST_BLOCKS = 4096
_MOST_END_TOKENS = 1024
_MOST_TENSORS = 100_000
_OF_ENGINES = (DecoderForm.VLLM, DecoderForm.LLAMA_SERVER)


def import_decoder(
    repository: ModelRepository,
    source: Path,
    key: ModelKey,
    options: ImportOptions = _USUAL,
    progress: Callable[[str], None] = lambda _: None,
) -> DecoderTable:
    """Imports a decoder language model; does nothing if `key` is there already.

    Args:
        repository: The repository to import into.
        source: A GGUF file, or a folder with config.json, tokenizer and safetensors.
        key: The name and version to import it as.
        options: The choices of how it is to be served.
        progress: Called with a text at the start of each step.

    Raises:
        InvalidInput: The source is no such model, or its family is not supported.
        NotSupported: The libraries of the extra [generation] are missing.
        InternalError: A library failed; the message ends with its last output.
    """
    for name, known in (("precision", PRECISIONS), ("target", TARGETS)):
        if getattr(options, name) not in known:
            said = f"{getattr(options, name)!r} is none of {', '.join(known)}"
            raise InvalidInput(name, said)
    if not repository.folder(key).exists():
        with staged(repository, key) as made:
            _bring_in(made, source, key, options, progress)
    return repository.decoder_table(key)


def _bring_in(
    repository: ModelRepository,
    source: Path,
    key: ModelKey,
    options: ImportOptions,
    progress: Callable[[str], None],
) -> None:
    """Has the model made in the jail, then writes manifest, tables and content record."""
    gguf = source.suffix == ".gguf"
    if not source.is_file() if gguf else not (source / "config.json").is_file():
        raise InvalidInput("source", f"{source} is no GGUF file and no folder with a config.json")
    check_libraries(options.target, gguf=gguf)
    folder, graph = repository.folder(key), options.target != "gpu"
    folder.mkdir(parents=True)
    order = msgspec.json.encode(ImportOrder(key, gguf, options))
    work = JailedWork(
        target=f"{make_in_jail.__module__}:{make_in_jail.__name__}",
        job=order,
        subject=source.name,
        imports=("torch",) if gguf or not graph else (),
        inputs=(source,),
        wanted=(*COPIED, WEIGHTS_FILE) if gguf else COPIED,
        limits=import_limits(source, options.target),
    )
    made = answer_of(run_jailed(work, folder, progress), ImportedModel, source.name)
    check_config(folder, options)
    check_sizes(made.table, source.name)
    if made.places:
        progress("taking over the weights")
        take_over(source, folder, set(made.places.values()), copies=options.copies)
    file = weights_file(folder, made.places, made.weight_bytes, source.name)
    table, compute_ns = made.table, decode_ns(made.table)
    if graph:
        table, compute_ns = _with_graph(folder, order, options, progress)
    repository.write_manifest(manifest_of(key, options, file, table.context_tokens))
    table = replace(table, model_hash=repository.model_hash(key))
    repository.write_decoder_table(key, table)
    repository.write_block_table(key, block_table(table, compute_ns))
    progress("recording what the files are")
    repository.record_content(key)


def _with_graph(
    folder: Path, order: bytes, options: ImportOptions, progress: Callable[[str], None]
) -> tuple[DecoderTable, tuple[int, ...]]:
    """Has the graph of a model built and timed; returns the table and the times of the blocks."""
    graph = f"onnx-{options.precision}"
    work = JailedWork(
        target=f"{graph_and_times_in_jail.__module__}:{graph_and_times_in_jail.__name__}",
        job=order,
        subject=folder.parent.name,
        imports=("torch",),
        inputs=(folder,),
        wanted=(f"*/*/{graph}/*",),
        limits=import_limits(folder),
    )
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
        built = answer_of(run_jailed(work, Path(scratch), progress), BuiltGraph, work.subject)
        (Path(scratch) / folder.parent.name / folder.name / graph).rename(folder / graph)
    check_sizes(built.table, work.subject)
    times = built.compute_ns
    if len(times) != built.table.blocks or not all(0 < ns < _LARGEST_SIZE for ns in times):
        raise InvalidInput(work.subject, "has times that no model has")
    return built.table, times


def weights_file(folder: Path, places: dict[str, str], weight_bytes: int, subject: str) -> str:
    """Returns the file that stands for the weights: the only one, or an index made here.

    Args:
        folder: The folder of the version, with the files.
        places: The file of each tensor, as the jail has found it.
        weight_bytes: Size of all tensors.
        subject: The source, for errors.

    Raises:
        InvalidInput: The jail's sizes are those of no model.
    """
    files = sorted(set(places.values()))
    if files in ([], [WEIGHTS_FILE]):
        return WEIGHTS_FILE
    if len(places) > _MOST_TENSORS or not 0 < weight_bytes < _LARGEST_SIZE:
        raise InvalidInput(subject, "has sizes that no model has")
    hashes = {name: digests().whole(folder / name) for name in files}
    (folder / INDEX_FILE).write_text(index_text(places, weight_bytes, hashes))
    return INDEX_FILE


def check_sizes(table: DecoderTable, subject: str) -> None:
    """Raises InvalidInput unless the sizes from the jail are plausible for a model."""
    values = [value for value in asdict(table).values() if isinstance(value, int)]
    ends, blocks = table.end_token_ids, table.blocks
    plain = all(0 < value < _LARGEST_SIZE for value in values) and len(ends) <= _MOST_END_TOKENS
    fitting = blocks <= _MOST_BLOCKS and all(0 <= end < _LARGEST_SIZE for end in ends)
    if not (plain and fitting and all(_can_be(form, blocks) for form in table.forms)):
        raise InvalidInput(subject, "has sizes that no model has")


def _can_be(sizes: AllocatedSizes, blocks: int) -> bool:
    """Returns False for sizes that are impossible for a form of a model."""
    some = [*sizes.block_bytes, sizes.cache_bytes_per_token]
    if sizes.form not in _OF_ENGINES:  # these hold the head somewhere among the blocks
        some.append(sizes.head_bytes)
    maybe = [sizes.embedding_bytes, sizes.shared_bytes, sizes.fixed_bytes, sizes.entry_bytes]
    maybe += asdict(sizes.step).values()
    counts = len(sizes.block_bytes) == blocks and sizes.form is not None
    possible = all(0 <= size < _LARGEST_SIZE for size in (*some, *maybe))
    return counts and possible and all(some)


def block_table(table: DecoderTable, compute_ns: tuple[int, ...]) -> BlockTable:
    """Returns the block table of a decoder: one block per layer; rows are tokens."""
    hidden = 4 * table.hidden_size
    boundaries = [
        Boundary((TensorSpec("token_ids", "INT64", (ANY,)),), 8),
        *(
            Boundary((TensorSpec(f"hidden.{block}", "FP32", (ANY, table.hidden_size)),), hidden)
            for block in range(1, table.blocks)
        ),
        Boundary(
            (TensorSpec("logits", "FP32", (ANY, table.vocabulary_size)),),
            4 * table.vocabulary_size,
        ),
    ]
    return BlockTable(
        model_hash=table.model_hash,
        batched=True,
        boundaries=tuple(boundaries),
        compute_ns=compute_ns,
    )
