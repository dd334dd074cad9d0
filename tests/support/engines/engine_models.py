"""A model that only an engine serves, as small as one can be: a tokenizer and a few sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from catenary_agent.decoders.importing.importing import block_table
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.models.model_repository import ModelRepository
from small_models.tiny_tokenizer import END, MORE, text_model

BLOCKS = 3
SESSION_TOKENS = 512
TABLE = DecoderTable(
    model_hash="",
    blocks=BLOCKS,
    hidden_size=16,
    attention_heads=2,
    key_value_heads=1,
    head_size=8,
    vocabulary_size=MORE,
    context_tokens=SESSION_TOKENS,
    end_token_ids=(END,),
    block_bytes=1_000,
    embedding_bytes=500,
    head_bytes=500,
    cache_bytes_per_token=64,
)


def write_adapter(folder: Path, rank: int = 4) -> None:
    """Writes the files of a LoRA adapter, whose weights nobody reads."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights of nobody")


def engine_model(
    root: Path,
    name: str = "tiny",
    *,
    platform: str = "llama_server",
    arguments: tuple[str, ...] = (),
    min_version: str = "",
    max_batch: int = 8,
    adapters: tuple[str, ...] = (),
) -> ModelKey:
    """Puts a model into the repository at `root`; with the platform "decoder" it has blocks, too."""
    key = ModelKey(name, "1")
    folder = text_model(root, name)
    repository = ModelRepository(root)
    is_gguf = platform != "vllm"
    file = "model.gguf" if is_gguf else "model.safetensors"
    (folder / file).write_bytes(b"weights of nobody")
    if platform == "decoder":
        (folder / "model.safetensors").write_bytes(b"weights of nobody")
    for each in adapters:
        write_adapter(folder / "adapters" / each)
    repository.write_manifest(
        ModelManifest(
            key=key,
            platform=platform,
            file="model.safetensors" if platform == "decoder" else file,
            slo_ns=60_000_000_000,
            max_batch=max_batch,
            float16_boundaries=False,
            session_tokens=SESSION_TOKENS,
            engine_file=file if platform == "decoder" else "",
            engine_arguments=arguments,
            min_version=min_version,
            adapters=tuple((each, f"adapters/{each}") for each in adapters),
        )
    )
    table = replace(TABLE, model_hash=repository.model_hash(key))
    repository.write_decoder_table(key, table)
    repository.write_block_table(key, block_table(table, (1_000_000,) * BLOCKS))
    return key
