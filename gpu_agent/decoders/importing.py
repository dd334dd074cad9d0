"""Bringing language models into the repository: from a GGUF file or a Hugging Face folder.

A model is made in the jail (`services.jail`), in a hidden folder of the repository, and renamed
when it is whole, so nobody ever sees half of one. It then has

    model.yaml, blocks.json, decoder.json     what the whole platform reads
    content.json                              the digest of every file here
    config.json, tokenizer*, chat_template*   what the gateway and PyTorch agents read
    model.safetensors                         the weights: PyTorch agents, and the embedding
    onnx-fp32/ (onnx-int8/, onnx-int4/)       the graph CPU agents cut by block, and its weights
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from gpu_agent.decoders.building import check_libraries, import_limits
from gpu_agent.decoders.import_worker import build_graph, convert_gguf
from gpu_agent.decoders.sizes import read_table
from gpu_agent.decoders.timing import time_blocks
from gpu_agent.decoders.weights import WEIGHTS_FILE, is_own_file, write_joined
from gpu_agent.partitioning.jailed import answer_of
from services.bounded_files import LARGEST_CONFIG_BYTES, read_bounded
from services.domain.decoder import DecoderTable
from services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey
from services.domain.model import BlockTable, Boundary, ModelManifest
from services.domain.tensors import ANY, TensorSpec
from services.errors import InvalidInput
from services.jail.child import Room
from services.jail.run import Work, run_jailed
from services.model_repository import PRECISIONS, ModelRepository

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose layers are all alike and take nothing but hidden states and positions."""
_COPIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip

_WRITTEN = ("model.yaml", "decoder.json", "blocks.json")
"""Of the platform; those from the jail are written anew."""
_LARGEST_SIZE = 1 << 50
_MOST_BLOCKS = 4096
_MOST_END_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """How an imported model wants to be served."""

    precision: str = "fp32"
    """Of the weights on CPU agents."""
    session_tokens: int = 2048
    """Most tokens of one session; cut down to the model's context."""
    slo_ns: int = 60 * NANOSECONDS_PER_SECOND
    """A whole answer has to be there by then unless the request says otherwise."""
    max_sessions: int = 32
    """At a time on one agent."""


def import_decoder(
    repository: ModelRepository,
    source: Path,
    key: ModelKey,
    options: ImportOptions = ImportOptions(),
    progress: Callable[[str], None] = lambda _: None,
) -> DecoderTable:
    """Imports a decoder language model; does nothing if `key` is there already.

    Args:
        repository: Where it goes.
        source: A GGUF file, or a folder with config.json, tokenizer and safetensors.
        key: Under which name and version.
        options: How it wants to be served.
        progress: Told what is going on, step by step.

    Raises:
        InvalidInput: If the source is no such model, or of a family that is not supported.
        NotSupported: If the libraries of the extra [generation] are missing.
        InternalError: If a library fails; the message has its last words.
    """
    if options.precision not in PRECISIONS:
        raise InvalidInput("precision", f"{options.precision!r} is none of {', '.join(PRECISIONS)}")
    target = repository.folder(key)
    if not target.exists():
        repository.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".importing-", dir=repository.root) as scratch:
            made = ModelRepository(Path(scratch))
            _bring_in(made, source, key, options, progress)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                made.folder(key).rename(target)
            except OSError:
                if not target.exists():  # not the race we may lose, but a real failure
                    raise
    return repository.decoder_table(key)


def _bring_in(
    repository: ModelRepository,
    source: Path,
    key: ModelKey,
    options: ImportOptions,
    progress: Callable[[str], None],
) -> None:
    """Has the model made in the jail, and says in files of our own what it is."""
    gguf = source.suffix == ".gguf"
    if not source.is_file() if gguf else not (source / "config.json").is_file():
        raise InvalidInput("source", f"{source} is no GGUF file and no folder with a config.json")
    check_libraries()
    inside = f"{key.name}/{key.version}"
    wanted = (*_COPIED, WEIGHTS_FILE, *_WRITTEN, f"onnx-{options.precision}/*")
    work = Work(
        target=f"{make_in_jail.__module__}:{make_in_jail.__name__}",
        job=msgspec.json.encode(_Order(key, gguf, options)),
        subject=source.name,
        imports=("torch",),
        inputs=(source,),
        wanted=tuple(f"{inside}/{name}" for name in wanted),
        limits=import_limits(source),
    )
    made = answer_of(run_jailed(work, repository.root, progress), _Imported, source.name)
    _check_family(repository.folder(key))
    _check_sizes(made, source.name)
    manifest = _manifest(key, options, made.table.context_tokens)
    repository.write_manifest(manifest)
    table = replace(made.table, model_hash=repository.model_hash(key))
    repository.write_decoder_table(key, table)
    repository.write_block_table(key, block_table(table, made.compute_ns))
    progress("recording what the files are")
    repository.record_content(key)


def make_in_jail(job: bytes, room: Room) -> bytes:
    """Makes the model of an encoded `_Order` in a repository of its own; answers `_Imported`."""
    order = msgspec.json.decode(job, type=_Order)
    # What the files are is recorded by whoever takes them over.
    repository = ModelRepository(room.output, records=False)
    key, source = order.key, room.inputs[0]
    folder = repository.folder(key)
    folder.mkdir(parents=True)
    if order.gguf:
        room.tell("reading the weights")
        convert_gguf(source, folder)
    else:
        _check_family(source)
        room.tell("copying the weights")
        for name in _COPIED:
            if is_own_file(source, name):
                shutil.copyfile(source / name, folder / name)
        write_joined(source, folder / WEIGHTS_FILE)
    _check_family(folder)
    precision = order.options.precision
    room.tell(f"building the {precision} graph")
    build_graph(folder, precision, folder)
    # What the timing reads; the repository gets files of our own making.
    repository.write_manifest(_manifest(key, order.options, order.options.session_tokens))
    table = read_table(folder, precision, repository.model_hash(key))
    repository.write_decoder_table(key, table)
    room.tell("timing the blocks")
    return msgspec.json.encode(_Imported(table, time_blocks(repository, key)))


class _Order(msgspec.Struct, frozen=True):
    key: ModelKey
    gguf: bool
    options: ImportOptions


class _Imported(msgspec.Struct, frozen=True):
    table: DecoderTable
    compute_ns: tuple[int, ...]


def _manifest(key: ModelKey, options: ImportOptions, context_tokens: int) -> ModelManifest:
    return ModelManifest(
        key=key,
        platform="decoder",
        file=WEIGHTS_FILE,
        slo_ns=options.slo_ns,
        max_batch=options.max_sessions,
        float16_boundaries=False,  # hidden states of larger models overflow float16
        precision=options.precision,
        session_tokens=min(context_tokens, options.session_tokens),
    )


def _check_sizes(made: _Imported, subject: str) -> None:
    """Raises unless the sizes from the jail can be those of a model."""
    values = [value for value in asdict(made.table).values() if isinstance(value, int)]
    ends = made.table.end_token_ids
    plain = all(0 < value < _LARGEST_SIZE for value in values) and len(ends) <= _MOST_END_TOKENS
    fitting = len(made.compute_ns) == made.table.blocks <= _MOST_BLOCKS
    times = all(0 < ns < _LARGEST_SIZE for ns in made.compute_ns)
    if not (plain and fitting and times and all(0 <= e < _LARGEST_SIZE for e in ends)):
        raise InvalidInput(subject, "has sizes that no model has")


def block_table(table: DecoderTable, compute_ns: tuple[int, ...]) -> BlockTable:
    """Returns the blocks of a decoder: one per layer; rows are tokens."""
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


def _check_family(folder: Path) -> None:
    try:
        config = json.loads(read_bounded(folder / "config.json", LARGEST_CONFIG_BYTES))
        family = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput("config.json", f"cannot be read: {error}") from None
    if family not in FAMILIES:
        raise InvalidInput("config.json", f"{family!r} is none of {', '.join(FAMILIES)}")
