"""Import of encoders into the repository, from a folder as they are published.

The graph is made in the jail, in a hidden folder of the repository, which is renamed when it is
complete, so that no process sees half a model. It then has

    model.yaml, blocks.json    what the whole platform reads; `text_tokens` says that it takes texts
    content.json               the digest of every file here
    model.onnx                 the graph, from tokens to the answer, and beside it
    model.onnx.data            its weights
    config.json, tokenizer*    what the gateway makes tokens with
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import msgspec

from catenary_agent.encoders.export_worker import (
    COPIED,
    FAMILIES,
    GRAPH_FILE,
    ImportedEncoder,
    export_in_jail,
)
from catenary_agent.partitioning.jailed import answer_of
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.bounded_files import LARGEST_CONFIG_BYTES, read_bounded
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey
from catenary_services.domain.model import BlockTable, ModelManifest
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.jail.orders import JailLimits
from catenary_services.jail.run import JailedWork, run_jailed
from catenary_services.models.model_repository import ModelRepository
from catenary_services.models.staging import staged

_LIBRARIES = ("torch", "transformers", "onnxscript", "safetensors")
_GIBI = 1 << 30
_MOST_TOKENS = 1 << 20


class EncoderOptions(msgspec.Struct, frozen=True):
    """The choices of how an imported encoder is to be served."""

    blocks: int = 10
    """Wanted number of blocks."""
    max_batch: int = 32
    """The most texts of a batch."""
    slo_ns: int = NANOSECONDS_PER_SECOND
    """Nanoseconds within which a request is answered that names no deadline."""


_USUAL = EncoderOptions()


class _Config(msgspec.Struct):
    model_type: str = ""


def is_encoder(source: Path) -> bool:
    """Returns whether a folder has a model of a family that is imported as an encoder."""
    try:
        content = read_bounded(source / "config.json", LARGEST_CONFIG_BYTES)
        return msgspec.json.decode(content, type=_Config).model_type in FAMILIES
    except (OSError, ValueError, RecursionError):
        return False


def import_encoder(
    repository: ModelRepository,
    source: Path,
    key: ModelKey,
    options: EncoderOptions = _USUAL,
    progress: Callable[[str], None] = lambda _: None,
) -> BlockTable:
    """Imports an encoder; does nothing if `key` is there already.

    Args:
        repository: The repository to import into.
        source: A folder with config.json, tokenizer.json and safetensors; files of
            sentence-transformers beside them say how the embedding is made.
        key: The name and version to import it as.
        options: The choices of how it is to be served.
        progress: Called with a text at the start of each step.

    Raises:
        InvalidInput: The source is no such model, or its family is not supported.
        NotSupported: Libraries are missing.
    """
    if not repository.folder(key).exists():
        _check_libraries()
        if not (source / "config.json").is_file():
            raise InvalidInput("source", f"{source} is no folder with a config.json")
        with staged(repository, key) as made:
            _bring_in(made, source, key, options, progress)
    return repository.block_table(key)


def _bring_in(
    repository: ModelRepository,
    source: Path,
    key: ModelKey,
    options: EncoderOptions,
    progress: Callable[[str], None],
) -> None:
    folder = repository.folder(key)
    folder.mkdir(parents=True)
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    work = JailedWork(
        target=f"{export_in_jail.__module__}:{export_in_jail.__name__}",
        job=b"",
        subject=source.name,
        imports=("torch", "torch.onnx", "transformers", "onnxscript"),
        inputs=(source,),
        wanted=(*COPIED, GRAPH_FILE, f"{GRAPH_FILE}.data"),
        limits=JailLimits(
            memory_bytes=16 * _GIBI + 8 * size,
            file_bytes=_GIBI + 2 * size,
            folder_bytes=2 * _GIBI + 4 * size,
        ),
    )
    answer = run_jailed(work, folder, progress)
    tokens = answer_of(answer, ImportedEncoder, source.name).text_tokens
    if not 2 <= tokens <= _MOST_TOKENS:
        raise InvalidInput(source.name, f"takes texts of {tokens} tokens")
    repository.write_manifest(
        ModelManifest(
            key=key,
            platform="onnxruntime_onnx",
            file=GRAPH_FILE,
            slo_ns=options.slo_ns,
            max_batch=options.max_batch,
            float16_boundaries=False,  # ranks of near embeddings would change
            text_tokens=tokens,
        )
    )
    progress("cutting it into blocks")
    prepare_model(repository, key, options.blocks)


def _check_libraries() -> None:
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        text = f"importing needs the extras [torch], [generation], [demo]: {', '.join(missing)}"
        raise NotSupported(text)
