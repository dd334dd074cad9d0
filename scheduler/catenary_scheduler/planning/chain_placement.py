"""Placements of models that generate text: their chains, and the hosts of the chains.

In a document they replace `pipelines`::

    session_tokens: 2048          # optional
    time_to_first_token_slo_ms: 800     # optional: for sessions that name no objectives
    time_per_output_token_slo_ms: 80    # optional, likewise
    chains:
      - capacity: 16
        role: mixed                   # optional; "prefill" chains run the prompts for "decode"
                                      # chains on other agents, "mixed" chains do both
        cache_tokens: 8192            # optional: total of all its sessions, if memory holds
                                      # fewer than all of them at full length
        hops:
          - {agent: agent-0, blocks: [0, 12]}
          - {agent: agent-1, blocks: [10, 30], entry: 12}   # hosts from 10, enters at 12
    hosts:                        # optional; by default what the chains need
      - {agent: agent-0, blocks: [0, 12], block_slots: 192}
      - {agent: agent-1, blocks: [10, 30], block_slots: 288, cache_tokens: 163840}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from catenary_scheduler.planning.document_fields import (
    blocks_of,
    fields_of,
    integer_of,
    items_of,
    text_of,
)
from catenary_services.domain.ids import AgentId
from catenary_services.domain.plan import ChainRole
from catenary_services.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class HopPlacement:
    """One hop of a chain: the blocks `[first_block, last_block)` of an agent, and the entry."""

    agent: AgentId
    first_block: int
    last_block: int
    entry: int
    """First block that the chain processes here; it processes `[entry, last_block)`."""

    @property
    def blocks(self) -> int:
        """Number of block slots that a session takes on this hop."""
        return self.last_block - self.entry

    @property
    def host(self) -> tuple[AgentId, int, int]:
        """Key of the host that this hop uses: agent, first block, end."""
        return self.agent, self.first_block, self.last_block


@dataclass(frozen=True, slots=True)
class ChainPlacement:
    """A path through all blocks of a model for up to `capacity` sessions at a time."""

    capacity: int
    hops: tuple[HopPlacement, ...]
    role: ChainRole = "mixed"
    cache_tokens: int = 0
    """Number of tokens that its caches hold for all sessions together; 0 if every session has room
    at full length."""


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """Blocks `[first_block, last_block)` on an agent, with room for `block_slots` block slots."""

    agent: AgentId
    first_block: int
    last_block: int
    block_slots: int
    cache_tokens: int = 0
    """Number of tokens that its memory holds, counted once per block; 0 if every slot has room at
    full length."""

    @property
    def host(self) -> tuple[AgentId, int, int]:
        """Key of this host among the hosts of a model: agent, first block, end."""
        return self.agent, self.first_block, self.last_block


def hosts_for(
    chains: Iterable[ChainPlacement], session_tokens: int = 0
) -> tuple[HostPlacement, ...]:
    """Returns the hosts of chains, with exactly the slots that all chains together may use.

    Args:
        chains: All chains of a model.
        session_tokens: Largest number of tokens of a session. It matters only if a chain states its
            `cache_tokens`.
    """
    slots: dict[tuple[AgentId, int, int], int] = {}
    tokens: dict[tuple[AgentId, int, int], int] = {}
    limited = set()
    for chain in chains:
        most = chain.cache_tokens or chain.capacity * session_tokens
        for hop in chain.hops:
            slots[hop.host] = slots.get(hop.host, 0) + chain.capacity * hop.blocks
            tokens[hop.host] = tokens.get(hop.host, 0) + most * hop.blocks
            if chain.cache_tokens:
                limited.add(hop.host)
    order = sorted(slots, key=lambda host: (host[1], host[2], host[0]))
    return tuple(
        HostPlacement(*host, slots[host], tokens[host] if host in limited else 0) for host in order
    )


def without_agents(
    chains: Iterable[ChainPlacement], hosts: Iterable[HostPlacement], gone: set[AgentId]
) -> tuple[tuple[ChainPlacement, ...], tuple[HostPlacement, ...]]:
    """Returns the chains that use none of the agents in `gone`, and the hosts of these chains."""
    left = tuple(c for c in chains if not any(hop.agent in gone for hop in c.hops))
    used = {hop.host for chain in left for hop in chain.hops}
    return left, tuple(host for host in hosts if host.host in used)


def chains_of_document(
    fields: Mapping[str, object], path: str, session_tokens: int
) -> tuple[tuple[ChainPlacement, ...], tuple[HostPlacement, ...]]:
    """Returns the chains and hosts of a model's entry in a document.

    Raises:
        InvalidInput: A field is wrong; the error names it, e.g.
            "models[0].chains[1].hops[0].entry".
    """
    chains = tuple(
        _chain(entry, f"{path}.chains[{i}]", session_tokens)
        for i, entry in items_of(fields["chains"], f"{path}.chains")
    )
    _check_roles(chains, path)
    if "hosts" not in fields:
        return chains, hosts_for(chains, session_tokens)
    hosts = tuple(
        _host(entry, f"{path}.hosts[{i}]")
        for i, entry in items_of(fields["hosts"], f"{path}.hosts")
    )
    _check_hosts(chains, hosts, path)
    return chains, hosts


def chain_documents(chains: Iterable[ChainPlacement]) -> list[dict[str, object]]:
    """Returns the entries from which `chains_of_document` reads the chains back."""
    return [
        {
            "capacity": chain.capacity,
            **({} if chain.role == "mixed" else {"role": chain.role}),
            **({"cache_tokens": chain.cache_tokens} if chain.cache_tokens else {}),
            "hops": [
                {
                    "agent": hop.agent,
                    "blocks": [hop.first_block, hop.last_block],
                    "entry": hop.entry,
                }
                for hop in chain.hops
            ],
        }
        for chain in chains
    ]


def host_documents(hosts: Iterable[HostPlacement]) -> list[dict[str, object]]:
    """Returns the entries from which `chains_of_document` reads the hosts back."""
    return [
        {
            "agent": host.agent,
            "blocks": [host.first_block, host.last_block],
            "block_slots": host.block_slots,
            **({"cache_tokens": host.cache_tokens} if host.cache_tokens else {}),
        }
        for host in hosts
    ]


def _chain(entry: object, path: str, session_tokens: int) -> ChainPlacement:
    optional = ("role", "cache_tokens")
    fields = fields_of(entry, path, required=("capacity", "hops"), optional=optional)
    tokens = _tokens(fields, path, session_tokens)
    capacity = integer_of(fields["capacity"], f"{path}.capacity", least=1)
    hops: list[HopPlacement] = []
    for i, item in items_of(fields["hops"], f"{path}.hops"):
        where = f"{path}.hops[{i}]"
        hop = _hop(item, where, hops[-1].last_block if hops else 0)
        if any(hop.agent == other.agent for other in hops):
            raise InvalidInput(f"{where}.agent", "a chain passes an agent once")
        hops.append(hop)
    for role in get_args(ChainRole):
        if fields.get("role", "mixed") == role:
            return ChainPlacement(capacity, tuple(hops), role, tokens)
    raise InvalidInput(f"{path}.role", f"must be one of {', '.join(get_args(ChainRole))}")


def _tokens(fields: Mapping[str, object], path: str, least: int) -> int:
    """Returns the number of tokens that caches hold; 0 if it is not stated.

    It is at least `least`, so that any one session has room when it is alone.
    """
    if "cache_tokens" not in fields:
        return 0
    return integer_of(fields["cache_tokens"], f"{path}.cache_tokens", least=least)


def _check_roles(chains: tuple[ChainPlacement, ...], path: str) -> None:
    """Raises InvalidInput if an agent is on a "prefill" and on a "decode" chain.

    A session is handed over from one chain to another one, on other agents.
    """
    agents: dict[str, set[AgentId]] = {}
    for chain in chains:
        agents.setdefault(chain.role, set()).update(hop.agent for hop in chain.hops)
    for agent in sorted(agents.get("prefill", set()) & agents.get("decode", set())):
        raise InvalidInput(f"{path}.chains", f"{agent} is on a prefill and on a decode chain")


def _hop(entry: object, path: str, expected: int) -> HopPlacement:
    fields = fields_of(entry, path, required=("agent", "blocks"), optional=("entry",))
    agent = AgentId(text_of(fields["agent"], f"{path}.agent"))
    first, last = blocks_of(fields["blocks"], f"{path}.blocks")
    if not first <= expected < last:
        raise InvalidInput(f"{path}.blocks", f"must contain block {expected}, which is the next")
    entry_block = expected
    if "entry" in fields:
        entry_block = integer_of(fields["entry"], f"{path}.entry", least=0)
        if entry_block != expected:
            raise InvalidInput(f"{path}.entry", f"must be {expected}: hops follow each other")
    return HopPlacement(agent, first, last, entry_block)


def _host(entry: object, path: str) -> HostPlacement:
    required = ("agent", "blocks", "block_slots")
    fields = fields_of(entry, path, required=required, optional=("cache_tokens",))
    agent = AgentId(text_of(fields["agent"], f"{path}.agent"))
    first, last = blocks_of(fields["blocks"], f"{path}.blocks")
    slots = integer_of(fields["block_slots"], f"{path}.block_slots", least=1)
    return HostPlacement(agent, first, last, slots, _tokens(fields, path, least=1))


def _check_hosts(
    chains: tuple[ChainPlacement, ...], hosts: tuple[HostPlacement, ...], path: str
) -> None:
    slots: dict[tuple[AgentId, int, int], int] = {}
    for i, host in enumerate(hosts):
        if host.host in slots:
            raise InvalidInput(f"{path}.hosts[{i}]", "is listed twice")
        slots[host.host] = host.block_slots
    for i, chain in enumerate(chains):
        for j, hop in enumerate(chain.hops):
            if hop.host not in slots:
                raise InvalidInput(f"{path}.chains[{i}].hops[{j}]", "is not among the hosts")
            if hop.blocks > slots[hop.host]:
                raise InvalidInput(
                    f"{path}.chains[{i}].hops[{j}]",
                    f"takes {hop.blocks} block slots, its host has {slots[hop.host]}",
                )
