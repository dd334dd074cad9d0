"""The table of a decoder that no machine could run: round sizes, so that sums are done by heart."""

from __future__ import annotations

from typing import Any

from catenary_services.domain.decoder import DecoderTable


def decoder_table(**changes: Any) -> DecoderTable:
    """Six blocks of 100 bytes, 50 each for the embedding and the head, a byte of cache a token."""
    usual: dict[str, Any] = {
        "model_hash": "0" * 64,
        "blocks": 6,
        "hidden_size": 8,
        "attention_heads": 2,
        "key_value_heads": 1,
        "head_size": 4,
        "vocabulary_size": 100,
        "context_tokens": 128,
        "end_token_ids": (2,),
        "block_bytes": 100,
        "embedding_bytes": 50,
        "head_bytes": 50,
        "cache_bytes_per_token": 1,
    }
    return DecoderTable(**usual | changes)
