"""Import of models that an engine serves: their files as they came, and the few sizes of a plan.

What an engine computes is its own affair, so no family is refused. Only headers are read, in the
jail, and nothing is computed: number and size of layers, vocabulary, and the tokens that end a
text. The tokenizer of a GGUF file is written as `tokenizer.json`, which the gateway reads.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from catenary_agent.decoders.importing.import_worker import COPIED, ImportOptions, save_tokenizer
from catenary_agent.decoders.importing.importing import block_table, check_sizes, weights_file
from catenary_agent.decoders.importing.taking import take_over
from catenary_agent.decoders.model_files.checkpoint import Checkpoint
from catenary_agent.decoders.model_files.description import read_object
from catenary_agent.decoders.model_files.gguf_weights import plain_reader
from catenary_agent.decoders.model_files.sizes import end_token_ids
from catenary_agent.decoders.model_files.weights import is_own_file
from catenary_agent.decoders.onnx.building import check_libraries, import_limits
from catenary_agent.partitioning.jailed import answer_of
from catenary_agent.profiling.decoder_roofline import decode_ns
from catenary_services.domain.decoder import AllocatedSizes, DecoderForm, DecoderTable, StepSizes
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ENGINE_OF, ModelManifest
from catenary_services.errors import InvalidInput
from catenary_services.jail.child import JailWorkspace
from catenary_services.jail.run import JailedWork, run_jailed
from catenary_services.models.model_repository import ModelRepository
from catenary_services.models.staging import link_or_copy, staged

GGUF_FILE = "model.gguf"
_HALF_BYTES = 2
_FLOAT_BYTES = 4
_BATCH_TOKENS = 512
"""Tokens of prompts that an engine computes at a time, by default."""
_FIXED_BYTES = 64 << 20
_MOST = 1 << 40


class EngineImportOrder(msgspec.Struct, frozen=True):
    """The job of the jail that reads headers."""

    gguf: bool


class EngineSizes(msgspec.Struct, frozen=True):
    """The answer of the jail; small files are in its output folder."""

    blocks: int
    hidden_size: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary_size: int
    context_tokens: int
    end_token_ids: tuple[int, ...]
    weight_bytes: int
    places: dict[str, str] = {}
    """The source file of each tensor of safetensors."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The files of a model that an engine is to read."""

    path: Path
    gguf: bool


def import_engine_model(
    repository: ModelRepository,
    source: Path,
    key: ModelKey,
    platform: str,
    options: ImportOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> DecoderTable:
    """Imports a model that one engine alone serves; does nothing if `key` is there already.

    Args:
        repository: The repository to import into.
        source: A GGUF file for llama-server, a folder with safetensors for vLLM.
        key: The name and version to import it as.
        platform: The engine: "vllm" or "llama_server".
        options: How it is to be served; precision and target are without effect.
        progress: Called with a text at the start of each step.

    Raises:
        InvalidInput: The source is nothing that the engine reads.
        NotSupported: The libraries of the extra [generation] are missing.
    """
    gguf = source.suffix == ".gguf"
    if platform not in ENGINE_OF or gguf != (platform == "llama_server"):
        what = "a GGUF file" if platform == "llama_server" else "a folder with safetensors"
        raise InvalidInput("source", f"{source} is not {what}, which {platform} reads")
    if not repository.folder(key).exists():
        with staged(repository, key) as made:
            _bring_in(made, _Source(source, gguf), key, platform, options, progress)
    return repository.decoder_table(key)


def keep_gguf(repository: ModelRepository, key: ModelKey, source: Path, *, copies: bool) -> None:
    """Puts the GGUF file of a model beside its blocks, so that llama-server serves it, too.

    Args:
        repository: The repository, in which the model was imported from that file.
        key: The model.
        source: The file.
        copies: Whether it is copied even where it could be linked.
    """
    folder, table = repository.folder(key), repository.decoder_table(key)
    link_or_copy(source, folder / GGUF_FILE, copies=copies)
    held = engine_sizes(table, DecoderForm.LLAMA_SERVER, source.stat().st_size)
    repository.write_decoder_table(key, replace(table, forms=table.with_forms([held])))
    repository.write_manifest(replace(repository.manifest(key), engine_file=GGUF_FILE))
    repository.record_content(key)


def engine_sizes(table: DecoderTable, form: DecoderForm, weight_bytes: int) -> AllocatedSizes:
    """Returns the sizes of a model as an engine holds it: all its weights, and caches in 16 bits.

    Args:
        table: The table of the model.
        form: The engine.
        weight_bytes: The size of the file that the engine reads.
    """
    each = -(-weight_bytes // table.blocks)
    row = 2 * table.key_value_heads * table.head_size * _HALF_BYTES
    scratch = _FIXED_BYTES + _BATCH_TOKENS * table.vocabulary_size * _FLOAT_BYTES
    step = StepSizes(base_bytes=scratch)
    return AllocatedSizes(form, (each,) * table.blocks, 0, 0, 0, 0, 0, row, step)


def read_in_jail(job: bytes, room: JailWorkspace) -> bytes:
    """Reads the headers of an `EngineImportOrder`; answers with `EngineSizes`."""
    order, source = msgspec.json.decode(job, type=EngineImportOrder), room.inputs[0]
    if order.gguf:
        room.tell("reading the header")
        reader = plain_reader(source)
        save_tokenizer(source, reader, room.output)
        return msgspec.json.encode(_sizes_of_gguf(reader, source.stat().st_size))
    room.tell("checking the weights")
    for name in COPIED:
        if is_own_file(source, name):
            shutil.copyfile(source / name, room.output / name)
    checkpoint = Checkpoint.of(source)
    config = read_object(source / "config.json")
    places = {name: file.name for name, (file, _) in checkpoint.tensors.items()}
    size = sum(tensor.nbytes for _, tensor in checkpoint.tensors.values())
    ends = end_token_ids(source)
    return msgspec.json.encode(_sizes_of_config(config, ends, size, places))


def _bring_in(
    repository: ModelRepository,
    source: _Source,
    key: ModelKey,
    platform: str,
    options: ImportOptions,
    progress: Callable[[str], None],
) -> None:
    path = source.path
    if not (path.is_file() if source.gguf else (path / "config.json").is_file()):
        raise InvalidInput("source", f"{path} is no GGUF file and no folder with a config.json")
    check_libraries("gpu", gguf=source.gguf)
    folder = repository.folder(key)
    folder.mkdir(parents=True)
    work = JailedWork(
        target=f"{read_in_jail.__module__}:{read_in_jail.__name__}",
        job=msgspec.json.encode(EngineImportOrder(source.gguf)),
        subject=path.name,
        imports=("torch",) if source.gguf else (),
        inputs=(path,),
        wanted=COPIED,
        limits=import_limits(path, "gpu"),
    )
    made = answer_of(run_jailed(work, folder, progress), EngineSizes, path.name)
    progress("taking over the weights")
    if source.gguf:
        file = GGUF_FILE
        link_or_copy(path, folder / file, copies=options.copies)
    else:
        take_over(path, folder, set(made.places.values()), copies=options.copies)
        file = weights_file(folder, made.places, made.weight_bytes, path.name)
    manifest = ModelManifest(
        key=key,
        platform=platform,
        file=file,
        slo_ns=options.slo_ns,
        max_batch=options.max_sessions,
        float16_boundaries=False,
        session_tokens=min(made.context_tokens, options.session_tokens),
    )
    repository.write_manifest(manifest)
    table = _table(made, DecoderForm(ENGINE_OF[platform]), repository.model_hash(key))
    check_sizes(replace(table, model_hash=""), path.name)
    repository.write_decoder_table(key, table)
    repository.write_block_table(key, block_table(table, decode_ns(table)))
    progress("recording what the files are")
    repository.record_content(key)


def _table(made: EngineSizes, form: DecoderForm, model_hash: str) -> DecoderTable:
    each = -(-made.weight_bytes // max(1, made.blocks))
    plain = DecoderTable(
        model_hash=model_hash,
        blocks=made.blocks,
        hidden_size=made.hidden_size,
        attention_heads=made.heads,
        key_value_heads=made.key_value_heads,
        head_size=made.head_size,
        vocabulary_size=made.vocabulary_size,
        context_tokens=made.context_tokens,
        end_token_ids=made.end_token_ids,
        block_bytes=each,
        embedding_bytes=1,
        head_bytes=1,
        cache_bytes_per_token=2 * made.key_value_heads * made.head_size * _HALF_BYTES,
    )
    return replace(plain, forms=(engine_sizes(plain, form, made.weight_bytes),))


def _sizes_of_gguf(reader: Any, weight_bytes: int) -> EngineSizes:
    """Returns the sizes of any architecture of llama.cpp, by the keys that all of them have."""
    architecture = str(_field(reader, "general.architecture", ""))

    def size(name: str, usual: int | None = None) -> int:
        value = _field(reader, f"{architecture}.{name}", usual)
        # Some architectures have a number for each layer: the largest bounds them.
        value = max(value) if isinstance(value, list) and value else value
        return _whole(f"{architecture}.{name}", value)

    heads, hidden = size("attention.head_count"), size("embedding_length")
    ends = [
        _field(reader, f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")
    ]
    return EngineSizes(
        blocks=size("block_count"),
        hidden_size=hidden,
        heads=heads,
        key_value_heads=size("attention.head_count_kv", heads),
        head_size=size("attention.key_length", max(1, hidden // heads)),
        vocabulary_size=len(_field(reader, "tokenizer.ggml.tokens", [])),
        context_tokens=size("context_length"),
        end_token_ids=tuple(dict.fromkeys(int(each) for each in ends if each is not None)),
        weight_bytes=weight_bytes,
    )


def _sizes_of_config(
    config: Mapping[str, Any], ends: tuple[int, ...], weight_bytes: int, places: dict[str, str]
) -> EngineSizes:
    """Returns the sizes in a `config.json`, or in the part of it that is about text."""
    text = config.get("text_config")
    said = {**config, **text} if isinstance(text, dict) else config

    def size(name: str, usual: int | None = None) -> int:
        return _whole(name, said.get(name, usual))

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    return EngineSizes(
        blocks=size("num_hidden_layers"),
        hidden_size=hidden,
        heads=heads,
        key_value_heads=size("num_key_value_heads", heads),
        head_size=size("head_dim", max(1, hidden // heads)),
        vocabulary_size=size("vocab_size"),
        context_tokens=size("max_position_embeddings"),
        end_token_ids=ends,
        weight_bytes=weight_bytes,
        places=places,
    )


def _field(reader: Any, key: str, absent: Any) -> Any:
    field = reader.fields.get(key)
    return absent if field is None else field.contents()


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
        raise InvalidInput(name, f"is {str(value)[:60]!r}, which is no size")
    return value
