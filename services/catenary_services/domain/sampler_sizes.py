"""What choosing tokens takes where the logits are, beside them: a function of the vocabulary.

Sizes of weights and steps belong to a model and lie in its `decoder.json`; these belong to the
program, which computes them for every file, however old.
`gpu_agent/catenary_agent/decoders/sampling/choosing.py` keeps to the numbers here, and tests
compare them with what NumPy and PyTorch allocate.
"""

from __future__ import annotations

from dataclasses import dataclass

from catenary_services.domain.sampling import MAX_BIASED_TOKENS

CPU_BLOCK_NUMBERS = 1 << 18
"""Logits that are worked on at a time: a row of 128k, and what is made of it, takes 3 MB of a
core's cache."""
GPU_BLOCK_NUMBERS = 1 << 22
"""32 rows of 128k, and 100 MB: fewer at a time are too little work for the launches."""
COUNTED_SESSIONS = 8
"""PyTorch keeps counts of all words for so many sessions at a time."""
SAID_TOKENS = 256
"""NumPy keeps the words that were said, with room for so many more at a time."""

_WORD_BYTES = 24
"""Of a word in a row that is worked on: what top-p needs of a sorted vocabulary, which is the most.
Its logit, that in order, and two integers of 64 bits; PyTorch has a mark beside them."""
_ROW_BYTES = 1024
"""Of a row besides, whatever the vocabulary: its parameters, and the two words it comes down to."""
_COUNT_BYTES = 4
_SAID_BYTES = 12
"""A word's number and how often it was said; the same of a word with a bias."""


def rows_at_a_time(block_numbers: int, vocabulary: int) -> int:
    """Returns how many rows are worked on at a time, at least 1."""
    return max(1, block_numbers // max(1, vocabulary))


@dataclass(frozen=True, slots=True)
class SamplerSizes:
    """What an executor with the last block takes to choose tokens, beside the logits, in bytes."""

    fixed_bytes: int = 0
    """Kept from the first choice on: counters of the noise, a number for two words."""
    counts_bytes: int = 0
    """Kept for every `COUNTED_SESSIONS` sessions with penalties, or a part of them."""
    session_bytes: int = 0
    """Kept for every session with penalties or biases."""
    token_bytes: int = 0
    """Kept for every token of a session with penalties."""
    row_bytes: int = 0
    """While a step's tokens are chosen, for every row that is worked on at a time."""
    rows: int = 0
    """So many rows are worked on at a time, at most."""
    beside_bytes: int = 0
    """While a step's tokens are chosen, for every row of it."""

    def kept_bytes(self, sessions: int, session_tokens: int) -> int:
        """Returns what is kept between steps if all sessions have penalties and biases."""
        pages = -(-sessions // COUNTED_SESSIONS)
        each = self.session_bytes + session_tokens * self.token_bytes
        return self.fixed_bytes + pages * self.counts_bytes + sessions * each

    def scratch_bytes(self, rows: int) -> int:
        """Returns what choosing the tokens of so many rows takes at most, filters or not."""
        return min(rows, self.rows) * self.row_bytes + rows * self.beside_bytes


def sampler_sizes(vocabulary: int, block_numbers: int, *, in_torch: bool) -> SamplerSizes:
    """Returns what choosing tokens takes.

    Args:
        vocabulary: Columns of the logits.
        block_numbers: Logits that are worked on at a time.
        in_torch: The logits are PyTorch's, which has counts of all words; NumPy has those of what
            was said, and the biases.
    """
    return SamplerSizes(
        fixed_bytes=8 * ((vocabulary + 1) // 2),
        counts_bytes=COUNTED_SESSIONS * vocabulary * _COUNT_BYTES if in_torch else 0,
        session_bytes=0 if in_torch else _SAID_BYTES * (SAID_TOKENS + MAX_BIASED_TOKENS),
        token_bytes=0 if in_torch else _SAID_BYTES,
        row_bytes=(_WORD_BYTES + in_torch) * vocabulary,
        rows=rows_at_a_time(block_numbers, vocabulary),
        beside_bytes=_ROW_BYTES,
    )
