"""Texts that begin alike: digests of their beginnings, and whatever is kept under these.

A text is cut into blocks of tokens. The digest of a block is made of its tokens and the digest of
the block before it, so it stands for everything up to the block's end: two texts have as many
digests in common as they have whole blocks in common from the beginning on. Agents keep cached keys
and values under digests that they compute themselves. The scheduler gets shorter numbers from the
gateways, which only help to guess where something is kept.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

PREFIX_BLOCK_TOKENS = 32
"""Tokens of a block: a beginning is shared in whole blocks only."""
MOST_PREFIX_HASHES = 4_096
"""The most numbers of one text that a gateway sends to the scheduler."""
_DIGEST_BYTES = 16
"""A collision would give a text the caches of another one, so digests are too long to find any."""
_HASH_BYTES = 8

Content = TypeVar("Content")
Digest = bytes | int
"""A name of a block and all before it; the simulator, which has no text, uses numbers."""


def extend_digests(digests: list[bytes], tokens: Sequence[int], blocks: int, root: bytes) -> None:
    """Appends the digests of further blocks of a text, up to `blocks` of them in all.

    Args:
        digests: The digests of its first blocks.
        tokens: The tokens of the text, as many as `blocks` have at least.
        blocks: The number of digests afterwards.
        root: Whatever else caches depend on.
    """
    before = digests[-1] if digests else root
    for block in range(len(digests), blocks):
        part = tokens[block * PREFIX_BLOCK_TOKENS : (block + 1) * PREFIX_BLOCK_TOKENS]
        before = blake2b(before + array("I", part).tobytes(), digest_size=_DIGEST_BYTES).digest()
        digests.append(before)


def prefix_hashes(tokens: Sequence[int], root: str = "") -> list[int]:
    """Returns the numbers by which the scheduler recognises the beginnings of a text.

    Args:
        tokens: The text.
        root: Whatever else caches depend on: the adapter of the model.

    Returns:
        One number of 64 bits for each whole block, `MOST_PREFIX_HASHES` at most.
    """
    digests: list[bytes] = []
    blocks = min(MOST_PREFIX_HASHES, len(tokens) // PREFIX_BLOCK_TOKENS)
    extend_digests(digests, tokens, blocks, root.encode())
    return [int.from_bytes(each[:_HASH_BYTES], "little") for each in digests]


class KeptBlocks(Generic[Content]):
    """Contents of blocks by their digests; those that were not used for longest go first.

    Invariant: `size` is the sum of the sizes of all blocks.
    """

    __slots__ = ("_blocks", "size")

    def __init__(self) -> None:
        self._blocks: OrderedDict[Digest, tuple[Content, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._blocks

    def known(self, digests: Iterable[Digest]) -> int:
        """Returns how many of the first blocks of a text are kept, without a gap."""
        count = 0
        for digest in digests:
            if digest not in self._blocks:
                break
            count += 1
        return count

    def use(self, digests: Sequence[Digest]) -> list[Content]:
        """Returns the contents of a text's first blocks, which count as used from now on.

        The first block counts as used last, since later ones are of no use without it.
        """
        for digest in reversed(digests):
            self._blocks.move_to_end(digest)
        return [self._blocks[digest][0] for digest in digests]

    def keep(self, digest: Digest, content: Content, size: int) -> None:
        """Keeps a block; `size` is what it counts for."""
        assert digest not in self._blocks
        self._blocks[digest] = (content, size)
        self.size += size

    def shrink(self, most: int) -> int:
        """Drops blocks until the others count for `most` at most; returns how many it dropped."""
        dropped = 0
        while self._blocks and self.size > most:
            _, (_, size) = self._blocks.popitem(last=False)
            self.size -= size
            dropped += 1
        return dropped

    def clear(self) -> None:
        """Drops all blocks."""
        self.shrink(0)

    def validate(self) -> None:
        """Raises AssertionError unless the sizes add up."""
        assert self.size == sum(size for _, size in self._blocks.values())
