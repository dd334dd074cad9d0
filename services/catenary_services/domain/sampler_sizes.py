"""Memory for choosing tokens, without the logits, as a function of the vocabulary's size.

Sizes of weights and steps belong to a model and lie in its `decoder.json`; these belong to the
program, which computes them for every file, however old.
`gpu_agent/catenary_agent/decoders/sampling/choosing.py` keeps to the numbers here, and tests
compare them with what NumPy and PyTorch allocate.
"""

from __future__ import annotations

from dataclasses import dataclass

from catenary_services.domain.sampling import MAX_BIASED_TOKENS, MAX_LISTED_TOKENS

CPU_BLOCK_NUMBERS = 1 << 18
"""The number of logits handled at a time on a CPU. A row of 128k with its intermediate results
takes 3 MB of a core's cache."""
GPU_BLOCK_NUMBERS = 1 << 22
"""The number of logits handled at a time on a GPU: 32 rows of 128k, in 100 MB. With fewer, kernel
launches take longer than the work."""
COUNTED_SESSIONS = 8
"""PyTorch keeps counts of all tokens of the vocabulary, in tables for this many sessions each."""
SAID_TOKENS = 256
"""NumPy keeps the tokens that were said, and grows that memory by this many entries at a time."""

_WORD_BYTES = 24
"""Bytes per token of the vocabulary in a row being handled. The largest user is top-p with a sorted
vocabulary: the logit, the sorted logit and two 64-bit integers; PyTorch adds one byte for a mask.
"""
_ROW_BYTES = 1024
"""Bytes per row independent of the vocabulary: its parameters and the two tokens that remain."""
_COUNT_BYTES = 4
_SAID_BYTES = 12
"""Bytes of a token id with the number of times it was said, or with its bias."""
_LISTED_BYTES = 2 * 8
"""Bytes of a token that ends the answer, and of one that may be chosen."""


def rows_at_a_time(block_numbers: int, vocabulary: int) -> int:
    """Returns the number of rows that are handled at a time, at least 1."""
    return max(1, block_numbers // max(1, vocabulary))


@dataclass(frozen=True, slots=True)
class SamplerSizes:
    """Bytes that an executor with the last block takes to choose tokens, without the logits."""

    fixed_bytes: int = 0
    """Bytes kept from the first choice on: counters of the noise, one for two tokens."""
    counts_bytes: int = 0
    """Bytes kept for every `COUNTED_SESSIONS` sessions with penalties, or part of that many."""
    session_bytes: int = 0
    """Bytes kept for every session with penalties, biases or lists of tokens."""
    token_bytes: int = 0
    """Bytes kept for every token of a session with penalties."""
    row_bytes: int = 0
    """Bytes for every row handled at a time, while the tokens of a step are chosen."""
    rows: int = 0
    """The most rows that are handled at a time."""
    beside_bytes: int = 0
    """Bytes for every row of a step, while its tokens are chosen."""

    def kept_bytes(self, sessions: int, session_tokens: int) -> int:
        """Returns the bytes kept between steps if all `sessions` have penalties and biases."""
        pages = -(-sessions // COUNTED_SESSIONS)
        each = self.session_bytes + session_tokens * self.token_bytes
        return self.fixed_bytes + pages * self.counts_bytes + sessions * each

    def scratch_bytes(self, rows: int) -> int:
        """Returns the most bytes it takes to choose the tokens of `rows` rows, with any filters."""
        return min(rows, self.rows) * self.row_bytes + rows * self.beside_bytes


def sampler_sizes(vocabulary: int, block_numbers: int, *, in_torch: bool) -> SamplerSizes:
    """Returns the memory sizes of choosing tokens.

    Args:
        vocabulary: Columns of the logits.
        block_numbers: The number of logits handled at a time.
        in_torch: Whether the logits are PyTorch's, which keeps counts of the whole vocabulary.
            NumPy keeps counts of the tokens that were said, the biases, and lists of tokens.
    """
    return SamplerSizes(
        fixed_bytes=8 * ((vocabulary + 1) // 2),
        counts_bytes=COUNTED_SESSIONS * vocabulary * _COUNT_BYTES if in_torch else 0,
        session_bytes=0
        if in_torch
        else _SAID_BYTES * (SAID_TOKENS + MAX_BIASED_TOKENS) + _LISTED_BYTES * MAX_LISTED_TOKENS,
        token_bytes=0 if in_torch else _SAID_BYTES,
        row_bytes=(_WORD_BYTES + in_torch) * vocabulary,
        rows=rows_at_a_time(block_numbers, vocabulary),
        beside_bytes=_ROW_BYTES,
    )
