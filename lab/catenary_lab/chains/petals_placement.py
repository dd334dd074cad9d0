"""The baseline PETALS: the blocks that a server takes when it joins.

Borzunov et al., "Distributed Inference and Fine-tuning of Large Language Models Over The Internet"
(NeurIPS 2023), `block_selection` and `throughput` of its code: servers join one after another, and
each takes the consecutive blocks that are served worst so far. Nothing is placed again later.

Loads are exact integers: windows often tie, and in floating point the order of summation would
decide (it moved published results by up to 6 %). The first of several equal windows is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from catenary_lab.chains.windows import EMPTY, Window, common_integers, least_sorted
from catenary_scheduler.planning.chains.problem import Number, exact
from catenary_services.errors import InvalidInput

_AUTOGRAD_BYTES = 2 * 1024**3
_AUTOGRAD_HIDDEN = 14336
_NF4_BYTES = Fraction(17, 32)  # 4 bits and a float32 scale per 256 .. as PETALS counts it: 0.53125
_WEIGHT_ALLOWANCE = Fraction(101, 100)
_CACHED_TOKENS = 4096
_CACHED_TOKENS_MULTI_QUERY = 16384
_FLOAT16_BYTES = 2


@dataclass(frozen=True, slots=True)
class PetalsModel:
    """The model as PETALS counts its memory."""

    blocks: int
    hidden_size: int
    parameters_per_block: int
    attention_heads: int = 1
    kv_heads: int = 1

    @property
    def reserve_bytes(self) -> Fraction:
        """Memory in bytes that is kept free for autograd, A."""
        return Fraction(_AUTOGRAD_BYTES * self.hidden_size, _AUTOGRAD_HIDDEN)

    @property
    def block_bytes(self) -> Fraction:
        """Weights of one block in NF4, in bytes, w."""
        return self.parameters_per_block * _NF4_BYTES * _WEIGHT_ALLOWANCE

    @property
    def cache_bytes(self) -> Fraction:
        """Attention cache in bytes that a server keeps for each of its blocks, k."""
        groups = self.attention_heads // self.kv_heads
        multi_query = self.kv_heads == 1 and self.attention_heads > 1
        tokens = _CACHED_TOKENS_MULTI_QUERY if multi_query else _CACHED_TOKENS
        return Fraction(2 * self.hidden_size * tokens * _FLOAT16_BYTES, groups)

    def sessions(self, session_block_bytes: Number) -> int:
        """Returns how many sessions a server takes at a time, floor(k / s_c)."""
        return int(self.cache_bytes / exact(session_block_bytes))

    def slots(self, hosted: int, session_block_bytes: Number) -> int:
        """Returns the block slots of a server with `hosted` blocks, floor(m k / s_c)."""
        return int(hosted * self.cache_bytes / exact(session_block_bytes))


@dataclass(frozen=True, slots=True)
class PetalsServer:
    """A server that joins the swarm."""

    memory_bytes: Number
    forward_rps: Number
    """Number of forward passes of one block that it computes per second."""
    network_rps: Number
    """Number of requests that its network carries per second."""

    def hosted(self, model: PetalsModel) -> int:
        """Returns how many blocks the server takes: min(L, floor((M - A) / (w + k)))."""
        room = exact(self.memory_bytes) - model.reserve_bytes
        return min(model.blocks, max(0, int(room / (model.block_bytes + model.cache_bytes))))

    def throughput(self, hosted: int) -> Fraction:
        """Returns the throughput r = min(f / ((1 + m) / 2), n) of a server with m blocks."""
        return min(exact(self.forward_rps) * 2 / (1 + hosted), exact(self.network_rps))


def petals_placement(
    model: PetalsModel, servers: Sequence[PetalsServer], order: Sequence[int]
) -> list[Window]:
    """Returns the blocks of every server, by its index.

    A server takes the window whose sorted loads are least.

    Args:
        model: The model to place.
        servers: The servers that join.
        order: The order in which they join, a permutation of their indices.

    Raises:
        InvalidInput: `order` is not a permutation.
    """
    if sorted(order) != list(range(len(servers))):
        raise InvalidInput("order", "must name every server once")
    counts = [server.hosted(model) for server in servers]
    rates = common_integers(
        [server.throughput(count) for server, count in zip(servers, counts, strict=True)]
    )
    loads = [0] * model.blocks
    placed = [EMPTY] * len(servers)
    for index in order:
        count = counts[index]
        if count == 0:
            continue
        first = least_sorted(loads, count)
        placed[index] = Window(first, first + count)
        for block in range(first, first + count):
            loads[block] += rates[index]
    return placed
