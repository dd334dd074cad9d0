"""The sizes of a language model, from its config, its weights and its graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_agent.decoders.embedding import EMBEDDING
from gpu_agent.decoders.onnx_graph import part_bytes
from gpu_agent.decoders.weights import WEIGHTS_FILE, stored_tensors
from services.domain.decoder import DecoderTable
from services.errors import InvalidInput

_FLOAT32_BYTES = 4


def read_table(folder: Path, precision: str, model_hash: str) -> DecoderTable:
    """Returns the sizes of the model in `folder`, its graph of `precision` included.

    Block and head count as the graph stores them, the embedding as the weights do.

    Raises:
        InvalidInput: If config, weights and graph do not fit together.
    """
    config = _json(folder / "config.json")
    blocks, head = part_bytes(folder / f"onnx-{precision}")
    if len(blocks) != config["num_hidden_layers"]:
        raise InvalidInput("config.json", f"names other layers than the graph's {len(blocks)}")
    embedding = stored_tensors(folder / WEIGHTS_FILE).get(EMBEDDING)
    if embedding is None:
        raise InvalidInput(WEIGHTS_FILE, f"has no {EMBEDDING}")
    heads = int(config["num_attention_heads"])
    key_value_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    return DecoderTable(
        model_hash=model_hash,
        blocks=len(blocks),
        hidden_size=int(config["hidden_size"]),
        attention_heads=heads,
        key_value_heads=key_value_heads,
        head_size=head_size,
        vocabulary_size=int(config["vocab_size"]),
        context_tokens=int(config["max_position_embeddings"]),
        end_token_ids=end_token_ids(folder),
        block_bytes=max(blocks),
        embedding_bytes=embedding.nbytes,
        head_bytes=head,
        cache_bytes_per_token=2 * key_value_heads * head_size * _FLOAT32_BYTES,
    )


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Returns the tokens that end a text: of the generation config and of the config."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            given = _json(folder / name).get("eos_token_id")
            found.extend(given if isinstance(given, list) else [given])
    return tuple(sorted({each for each in found if isinstance(each, int)}))


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(path.name, f"cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise InvalidInput(path.name, "is not an object")
    return document
