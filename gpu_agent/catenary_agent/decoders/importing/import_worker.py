"""The part of an import that runs in the jail: it reads files of strangers.

Weights in safetensors files stay where they are: their headers are read and compared with the
configuration, and the caller of the import takes the files over. A GGUF file is converted to such a
folder. For agents on a CPU the onnxruntime-genai builder makes a graph, and its blocks are timed.

This module needs PyTorch and transformers, whose output is shown only if something fails.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from catenary_agent.decoders.model_files.checkpoint import Checkpoint, write_alone
from catenary_agent.decoders.model_files.description import (
    read_object,
    why_not,
    why_not_on_cpu,
    why_not_quantised,
)
from catenary_agent.decoders.model_files.embedding import EMBEDDING
from catenary_agent.decoders.model_files.gguf_weights import plain_reader, write_model
from catenary_agent.decoders.model_files.quantisation import stored_as, why_not_precision
from catenary_agent.decoders.model_files.sizes import (
    GraphBytes,
    end_token_ids,
    graph_bytes,
    table_from,
)
from catenary_agent.decoders.model_files.weights import WEIGHTS_FILE, is_own_file
from catenary_agent.decoders.onnx.graph_worker import build_graph
from catenary_services.domain.decoder import DecoderForm, DecoderTable
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.jail.child import JailWorkspace
from catenary_services.models.model_repository import ModelRepository

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The choices of how an imported model is to be served."""

    precision: str = "fp32"
    """The precision of the weights: "fp32", "int8" or "int4"."""
    target: str = "both"
    """The agents that are to run the model: "cpu", "gpu" or "both"."""
    session_tokens: int = 2048
    """The most tokens of one session; reduced to the model's context length."""
    slo_ns: int = 60 * NANOSECONDS_PER_SECOND
    """Nanoseconds within which a whole answer is due, unless the request says otherwise."""
    max_sessions: int = 32
    """Number of sessions for which an agent holds caches at once."""
    copies: bool = False
    """True if weights are copied even where they could be linked."""


class ImportOrder(msgspec.Struct, frozen=True):
    """The job of the jail that reads a model."""

    key: ModelKey
    gguf: bool
    options: ImportOptions


class ImportedModel(msgspec.Struct, frozen=True):
    """The answer of the jail; small files and converted weights are in its output folder."""

    table: DecoderTable
    """The table of the model with the sizes of PyTorch's forms."""
    places: dict[str, str]
    """The source file of each tensor; empty if the weights are in the output folder."""
    weight_bytes: int
    """Size of all tensors in bytes."""


class BuiltGraph(msgspec.Struct, frozen=True):
    """The answer of the jail that built a graph, which is in its output folder."""

    table: DecoderTable
    """The table of the model, including the sizes of the graph."""
    compute_ns: tuple[int, ...]
    """Measured time of each block on this CPU, in nanoseconds."""


def make_in_jail(job: bytes, room: JailWorkspace) -> bytes:
    """Makes the files of an `ImportOrder` except plain weights; answers with `ImportedModel`."""
    order = msgspec.json.decode(job, type=ImportOrder)
    source, folder = room.inputs[0], room.output
    if order.gguf:
        room.tell("reading the weights")
        convert_gguf(source, folder, order.options, room.tell)
        checkpoint = Checkpoint.of(folder)
        check_config(folder, order.options)
    else:
        check_config(source, order.options)
        room.tell("checking the weights")
        checkpoint = Checkpoint.of(source)
        for name in COPIED:
            if is_own_file(source, name):
                shutil.copyfile(source / name, folder / name)
    if order.options.target == "gpu":
        _check_tensors(folder, checkpoint)
    table = _table(folder, checkpoint, order.options, {})
    held = table.held(DecoderForm.TORCH_FLOAT16)  # a model of unknown form is taken to run on a GPU
    table = replace(
        table,
        block_bytes=held.largest_block_bytes,
        head_bytes=held.head_bytes,
        cache_bytes_per_token=held.cache_bytes_per_token,
    )
    places = {name: file.name for name, (file, _) in checkpoint.tensors.items()}
    size = sum(tensor.nbytes for _, tensor in checkpoint.tensors.values())
    return msgspec.json.encode(ImportedModel(table, {} if order.gguf else places, size))


def graph_and_times_in_jail(job: bytes, room: JailWorkspace) -> bytes:
    """Writes `onnx-<precision>/` for the model in the first input; answers with `BuiltGraph`."""
    from catenary_agent.decoders.timing import time_blocks

    order, source = msgspec.json.decode(job, type=ImportOrder), room.inputs[0]
    key, precision = order.key, order.options.precision
    # This repository serves only for the timing; of its files the graph alone is kept.
    repository = ModelRepository(room.output, records=False)
    folder = repository.folder(key)
    folder.mkdir(parents=True)
    checkpoint = Checkpoint.of(source)
    if order.options.target == "both":
        _check_tensors(source, checkpoint)
    room.tell(f"building the {precision} graph")
    build_graph(source, precision, folder)
    graphs = {precision: graph_bytes(folder / f"onnx-{precision}")}
    table = _table(source, checkpoint, order.options, graphs)
    tokens = order.options.session_tokens
    repository.write_manifest(manifest_of(key, order.options, WEIGHTS_FILE, tokens))
    repository.write_decoder_table(key, table)
    write_alone(EMBEDDING, checkpoint, folder / WEIGHTS_FILE)
    shutil.copyfile(source / "config.json", folder / "config.json")
    room.tell("timing the blocks")
    compute_ns = time_blocks(repository, key)
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    return msgspec.json.encode(BuiltGraph(table, compute_ns))


def _check_tensors(folder: Path, checkpoint: Checkpoint) -> None:
    # Imported late: agents on a CPU need no PyTorch, and a jail that imports it takes longer.
    from catenary_agent.decoders.torch.torch_skeleton import check_tensors

    check_tensors(folder, checkpoint.shapes())


def _table(
    folder: Path, checkpoint: Checkpoint, options: ImportOptions, graphs: dict[str, GraphBytes]
) -> DecoderTable:
    return table_from(
        read_object(folder / "config.json"),
        {name: tensor for name, (_, tensor) in checkpoint.tensors.items()},
        model_hash="",
        end_token_ids=end_token_ids(folder),
        graphs=graphs,
        precision=options.precision,
    )


def manifest_of(
    key: ModelKey, options: ImportOptions, file: str, context_tokens: int
) -> ModelManifest:
    return ModelManifest(
        key=key,
        platform="decoder",
        file=file,
        slo_ns=options.slo_ns,
        max_batch=options.max_sessions,
        float16_boundaries=False,  # hidden states of larger models overflow float16
        precision=options.precision,
        target=options.target,
        session_tokens=min(context_tokens, options.session_tokens),
    )


def check_config(folder: Path, options: ImportOptions) -> None:
    """Raises InvalidInput unless the agents of the target can run a folder's model."""
    graph = options.target != "gpu"
    try:
        config = read_object(folder / "config.json")
        reason = why_not_on_cpu(config) if graph else why_not(config)
        only_gpu = graph and why_not(config) is None
        stored = stored_as(config)
        unfit = why_not_precision(stored, options.precision, options.target)
        unfit = unfit or why_not_quantised(config, options.precision)
    except NotSupported as error:
        raise InvalidInput("config.json", error.message) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInput("config.json", f"cannot be read: {error}") from None
    if reason is not None:
        hint = "; import it with --target gpu, and run it there or with decoder: torch"
        hint = hint if only_gpu else ""
        raise InvalidInput("config.json", reason + hint)
    if unfit is not None:
        raise InvalidInput("config.json", unfit)


def convert_gguf(
    file: Path, folder: Path, options: ImportOptions, tell: Callable[[str], None]
) -> None:
    """Writes the model of a GGUF file in the form the agents of the target read."""
    for_gpus = options.target == "gpu"
    reader = plain_reader(file)
    write_model(
        reader,
        folder,
        keep=for_gpus and options.precision == "int4",
        dtype="float16" if for_gpus else "float32",
        tell=tell,
    )
    save_tokenizer(file, reader, folder)


def save_tokenizer(file: Path, reader: Any, folder: Path) -> None:
    """Writes the tokenizer of a GGUF file in the form that gateways read."""
    import gguf
    from transformers import AutoTokenizer

    theirs = gguf.GGUFReader
    # transformers would read the whole file again
    vars(gguf)["GGUFReader"] = lambda _: reader
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, trust_remote_code=False
        )
    finally:
        vars(gguf)["GGUFReader"] = theirs
    tokenizer.save_pretrained(folder)
