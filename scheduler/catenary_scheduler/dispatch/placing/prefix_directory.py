"""A directory of the beginnings of texts that chains have cached, as far as can be known.

A gateway sends numbers for the blocks of a prompt (`domain.prefixes`), and when the answer is
complete those of the blocks behind them. The chain that has computed them has them from then on,
until its agents drop them for something else. They do not tell, but the gateway hears with the
first token of the next session how much of it they had, so a belief that is wrong is found out
with the first session that follows it, and costs that one the computation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from catenary_services.domain.ids import AgentId
from catenary_services.domain.plan import ChainHop
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS

_MOST_BLOCKS = 16_384
"""The most blocks that are remembered of one chain: half a million tokens."""
_COMMON = 8
"""A block that so many requests began with is common: a head of many texts, and not the history of
a conversation. So many turns have few."""

Hops = tuple[ChainHop, ...]
CachedTokens = Mapping[Hops, int]
"""The number of a request's first tokens that chains should have cached, by their hops."""
NOTHING: CachedTokens = {}
"""The same of a request of which no chain has anything."""


class PrefixDirectory:
    """The blocks of one model's chains.

    Invariant: `_holders` has exactly the blocks of `_chains`, the other way round, and `_asked` has
    no others.
    """

    def __init__(self) -> None:
        self._chains: dict[Hops, OrderedDict[int, None]] = {}
        """The blocks of each chain, the latest used last."""
        self._holders: dict[int, dict[Hops, None]] = {}
        self._asked: dict[int, int] = {}
        """Number of requests that began with a block, since a chain has it."""

    def __len__(self) -> int:
        return sum(map(len, self._chains.values()))

    def seen(self, hops: Hops, hashes: Sequence[int], room_tokens: int = 0) -> None:
        """Notes that a chain has computed a text.

        Args:
            hops: The chain.
            hashes: The numbers of the text's blocks, from the beginning on.
            room_tokens: Tokens that its caches hold; 0 if that is not known.
        """
        if not hashes:
            return
        blocks = self._chains.setdefault(hops, OrderedDict())
        for number in reversed(hashes):  # later blocks are of no use without the earlier ones
            if number in blocks:
                blocks.move_to_end(number)
            else:
                blocks[number] = None
                self._holders.setdefault(number, {})[hops] = None
        most = min(_MOST_BLOCKS, room_tokens // PREFIX_BLOCK_TOKENS or _MOST_BLOCKS)
        while len(blocks) > most:
            self._drop(hops, next(iter(blocks)))

    def asked(self, hashes: Sequence[int]) -> None:
        """Counts a request that begins like that."""
        for number in hashes:
            if number not in self._holders:
                break
            self._asked[number] = self._asked.get(number, 0) + 1

    def common_tokens(self, hashes: Sequence[int]) -> int:
        """Returns how many of a text's first tokens are those of many texts."""
        count = 0
        while count < len(hashes) and self._asked.get(hashes[count], 0) >= _COMMON:
            count += 1
        return count * PREFIX_BLOCK_TOKENS

    def lacked(self, hops: Hops, hashes: Sequence[int], tokens: int) -> None:
        """Notes that a chain had only the first `tokens` of a text."""
        blocks = self._chains.get(hops, ())
        for number in hashes[tokens // PREFIX_BLOCK_TOKENS :]:
            if number in blocks:
                self._drop(hops, number)

    def tokens_on(self, hashes: Sequence[int], most: int) -> CachedTokens:
        """Returns how many of a text's first tokens each chain has, for those that have any.

        Args:
            hashes: The numbers of the text's blocks, from the beginning on.
            most: The most tokens that are of use.
        """
        if not hashes or hashes[0] not in self._holders:
            return NOTHING
        found: dict[Hops, int] = {}
        hashes = hashes[: most // PREFIX_BLOCK_TOKENS]
        for hops in self._holders[hashes[0]] if hashes else ():
            blocks, count = self._chains[hops], 1
            while count < len(hashes) and hashes[count] in blocks:
                count += 1
            found[hops] = count * PREFIX_BLOCK_TOKENS
        return found

    def agent_lost(self, agent: AgentId) -> None:
        """Forgets the chains through an agent: if it comes back, it holds nothing."""
        for hops in [each for each in self._chains if any(hop.agent == agent for hop in each)]:
            for number in list(self._chains[hops]):
                self._drop(hops, number)

    def validate(self) -> None:
        """Raises AssertionError unless the invariant holds."""
        for hops, blocks in self._chains.items():
            assert blocks
            assert all(hops in self._holders[number] for number in blocks)
        assert sum(map(len, self._holders.values())) == len(self)
        assert self._asked.keys() <= self._holders.keys()

    def _drop(self, hops: Hops, number: int) -> None:
        blocks, holders = self._chains[hops], self._holders[number]
        del blocks[number], holders[hops]
        if not blocks:
            del self._chains[hops]
        if not holders:
            del self._holders[number]
            self._asked.pop(number, None)
