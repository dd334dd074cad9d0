"""What the whole system knows of a decoder language model without loading it.

Its blocks are the decoder layers; embedding belongs to block 0, the last norm and the projection to
the vocabulary to the last block. `decoder.json` lies beside `blocks.json` in the repository.
"""

from __future__ import annotations

from dataclasses import dataclass

CACHE_BLOCK_TOKENS = 16
"""Memory of caches is counted in blocks of so many tokens: a page of 4 KiB holds 16 tokens of a
head of 64 float32 numbers."""


@dataclass(frozen=True, slots=True)
class DecoderTable:
    """Sizes of a Llama-family model (Llama 2/3, Mistral, Qwen2/3, SmolLM2) as it is loaded."""

    model_hash: str
    """SHA-256 of the weights, the same as in the block table."""
    blocks: int
    hidden_size: int
    attention_heads: int
    key_value_heads: int
    head_size: int
    vocabulary_size: int
    context_tokens: int
    """Longest sequence the model was made for."""
    end_token_ids: tuple[int, ...]
    """Any of them ends a text."""
    block_bytes: int
    """Weights of one block."""
    embedding_bytes: int
    """Needed where block 0 is."""
    head_bytes: int
    """Last norm and projection; needed where the last block is."""
    cache_bytes_per_token: int
    """Key and value of one token in one block."""

    def weight_bytes(self, first_block: int, last_block: int) -> int:
        """Returns the weights of blocks `[first_block, last_block)`, with embedding and head."""
        weights = (last_block - first_block) * self.block_bytes
        weights += self.embedding_bytes if first_block == 0 else 0
        return weights + (self.head_bytes if last_block == self.blocks else 0)

    def slot_bytes(self, session_tokens: int) -> int:
        """Returns the bytes of one block slot: one session's cache in one block."""
        return session_tokens * self.cache_bytes_per_token
