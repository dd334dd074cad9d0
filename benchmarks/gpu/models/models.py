"""Models with random weights for the stages, and executors over them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.stage import Context
from catenary_agent.decoders.base import CacheLayout, StepItem, Want
from catenary_agent.decoders.importing.importing import block_table
from catenary_agent.decoders.model_files.sizes import all_tensors, table_from
from catenary_agent.decoders.sampling.sampling import SessionSampler
from catenary_agent.decoders.synthetic.model_shapes import shape_of, tensors_of
from catenary_agent.decoders.synthetic.random_models import RandomModel, write_random_model
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, PartitionKey
from catenary_services.domain.model import ModelManifest
from catenary_services.models.model_repository import ModelRepository

_SHARD_BYTES = 2 << 30
_GUESSED_BLOCK_NS = 1_000_000
"""A placeholder in the block table, because agents measure their blocks before anybody plans."""
Made = tuple[ModelRepository, ModelKey]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that a stage needs."""

    like: str
    """A name of `model_shapes.SHAPES`."""
    session_tokens: int = 1024
    layers: int = 0
    """Number of layers; 0 for that of the shape."""
    on_device: bool = False
    """Whether the weights are drawn on the device: different ones, without a tokenizer, and many
    times as fast where they are gigabytes."""


def small(here: Context, session_tokens: int = 512) -> Made:
    """Returns the model to check: of SmolLM2's shape on a GPU, else of four tiny blocks."""
    return make(here, Wanted("tiny" if here.tiny else "smollm2-135m", session_tokens))


def make(here: Context, wanted: Wanted) -> Made:
    """Returns a model in the repository of this call; makes it unless an earlier stage has."""
    # Records are off, because digests of gigabytes take long and are not measured here.
    repository = ModelRepository(here.folder / "models", records=False)
    layers = f"-{wanted.layers}" if wanted.layers else ""
    key = ModelKey(f"{wanted.like}{layers}", "1")
    folder = repository.folder(key)
    if not (folder / "blocks.json").exists():
        if wanted.on_device:
            _write_on_device(here, folder, wanted)
        else:
            write_random_model(folder, RandomModel(wanted.like, layers=wanted.layers))
        _enter(repository, key, wanted.session_tokens)
    return repository, key


def _write_on_device(here: Context, folder: Path, wanted: Wanted) -> None:
    """Writes config and shards of random bfloat16 weights."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = shape_of(wanted.like, wanted.layers)
    device = here.torch_device
    random = torch.Generator(device).manual_seed(0)
    shard: dict[str, Any] = {}
    size = number = 0

    def flush() -> None:
        nonlocal size, number
        if shard:
            save_file(shard, folder / f"model-{number:05}.safetensors", {"format": "pt"})
            shard.clear()
            size, number = 0, number + 1

    for each in tensors_of(config):
        values = torch.empty(each.shape, dtype=torch.bfloat16, device=device)
        values.normal_(0.0, each.spread, generator=random) if each.spread else values.fill_(1.0)
        if size + values.nbytes > _SHARD_BYTES:
            flush()
        shard[each.name] = values.cpu()
        size += values.nbytes
    flush()
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))


def _enter(repository: ModelRepository, key: ModelKey, session_tokens: int) -> None:
    """Writes the files by which the repository serves a folder of weights."""
    folder = repository.folder(key)
    file = min(folder.glob("*.safetensors"), key=lambda each: each.stat().st_size).name
    config = json.loads((folder / "config.json").read_text())
    repository.write_manifest(
        ModelManifest(
            key,
            "decoder",
            file,
            600 * NANOSECONDS_PER_SECOND,
            256,
            False,
            "fp32",
            min(session_tokens, config["max_position_embeddings"]),
        )
    )
    table = table_from(config, all_tensors(folder), model_hash=repository.model_hash(key))
    repository.write_decoder_table(key, table)
    repository.write_block_table(key, block_table(table, (_GUESSED_BLOCK_NS,) * table.blocks))


def decoder(
    here: Context, made: Made, sessions: int, tokens: int, span: tuple[int, int] | None = None
) -> Any:
    """Returns a PyTorch executor on the stage's device, of all blocks or of `span`."""
    from catenary_agent.decoders.torch.torch_executor import TorchDecoder

    repository, key = made
    blocks = repository.decoder_table(key).blocks
    first, last = span or (0, blocks)
    layout = CacheLayout(sessions * (last - first), tokens, (first,))
    assert here.torch_device is not None
    return TorchDecoder(repository, PartitionKey(key, first, last), here.device, layout, 1)


def random_tokens(executor: Any, count: int, seed: int) -> np.ndarray:
    """Returns random token ids of a prompt, without the special ones at the beginning."""
    random = np.random.default_rng(seed)
    return random.integers(3, executor.table.vocabulary_size, count)


def prompt(executor: Any, session: int, tokens: np.ndarray, want: Want = "logits") -> Any:
    """Opens a session and runs its prompt; returns the output named by `want`."""
    executor.open_session(session, executor.key.first_block)
    return executor.step([StepItem(session, 0, tokens, want)])[0]


def pretend_context(executor: Any, sessions: int, tokens: int) -> None:
    """Opens sessions 0, 1, .. that count as having `tokens` tokens cached.

    The caches hold random numbers, filled in at once: computing prompts would take longer than the
    measurement.
    """
    pool = executor._pool
    pool.keys.normal_()
    pool.values.normal_()
    for session in range(sessions):
        executor.open_session(session, executor.key.first_block)
        executor._book.cached[session] = tokens
        executor._pool.grow(executor._caches[session], tokens)


def decode_items(
    executor: Any,
    sessions: int,
    want: Want = "logits",
    samplers: Sequence[SessionSampler | None] | None = None,
) -> list[StepItem]:
    """Returns the items of the next decode step of sessions 0, 1, .."""
    cached = executor._book.cached
    token = np.array([7], np.int64)
    samplers = samplers or [None] * sessions
    return [StepItem(s, cached[s], token, want, samplers[s]) for s in range(sessions)]


def close_all(executor: Any, sessions: int) -> None:
    """Closes sessions 0, 1, .."""
    for session in range(sessions):
        executor.close_session(session)


def weight_bytes(executor: Any) -> int:
    """Returns the bytes of weights that a decode step reads, all but those of the embedding.

    Of the embedding a step reads single rows only.
    """
    blocks = executor._model.blocks
    modules = [*blocks.layers, *(each for each in (blocks.norm, blocks.head) if each is not None)]
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


def cache_bytes(executor: Any) -> int:
    """Returns the bytes that one token takes in all blocks of the executor."""
    shape = executor._shape
    blocks = executor.key.last_block - executor.key.first_block
    return 2 * shape.heads * shape.head_size * shape.dtype.itemsize * blocks
