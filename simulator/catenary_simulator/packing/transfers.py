"""Transfers of moved sessions over links and boundaries, as caches or as tokens (Mell, V).

GPUs stand in machines. A cache that moves between machines passes the uplink of one and the
downlink of the other; a cache that stays in its machine passes the machine's bus. A cache larger
than its narrowest link carries in an epoch is sent in portions, one per epoch. A move that finds no
room is tried again in the next epoch. Placing does not wait for transfers: the tally only says how
much of the policy's moves the boundaries can carry.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from catenary_scheduler.packing.moves import Item
from catenary_scheduler.packing.transfers.transfers import TransferMove, divide


@dataclass(frozen=True, slots=True)
class TransferNetwork:
    """The capacity for moves in an epoch, beside the sessions' work.

    Attributes:
        gpus_per_machine: Number of GPUs that share a bus.
        bus_bytes: Bytes per epoch inside a machine.
        link_bytes: Bytes per epoch in each direction of a machine's link.
        prefill_tokens: Tokens per epoch that a GPU can read again.
    """

    gpus_per_machine: int
    bus_bytes: int
    link_bytes: int
    prefill_tokens: int


@dataclass(slots=True)
class TransferTally:
    """Counts of moves by the way they went.

    Attributes:
        kv: Number of moves as caches.
        tokens: Number of moves as tokens, which are read again at the target.
        carried: Number of times that a portion of a cache was sent and the rest had to follow.
        deferred: Number of times that a move found no room in an epoch.
        dropped: Number of waiting moves no longer needed: the session ended or moved on.
        kv_bytes: Bytes of all caches and portions that were sent.
        tokens_read: Tokens read again for moves as tokens.
    """

    kv: int = 0
    tokens: int = 0
    carried: int = 0
    deferred: int = 0
    dropped: int = 0
    kv_bytes: int = 0
    tokens_read: int = 0


@dataclass(frozen=True, slots=True)
class RequestedMove:
    """A move that the policy wants in an epoch; `held` is the number of tokens in the cache."""

    item: Item
    source: int
    target: int
    held: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A move that is under way; `sent` are its bytes sent in earlier epochs."""

    requested: RequestedMove
    sent: int = 0


class EpochTransfers:
    """The division of every epoch's moves into caches, tokens and deferred ones.

    Args:
        network: The boundaries.
        token_bytes: Bytes of the cache of one token.
    """

    def __init__(self, network: TransferNetwork, token_bytes: int) -> None:
        self.tally = TransferTally()
        self._network = network
        self._token_bytes = token_bytes
        self._waiting: dict[Item, _Pending] = {}

    def epoch(
        self, moves: Iterable[RequestedMove], held: Mapping[Item, int], *, counted: bool
    ) -> None:
        """Divides the moves of an epoch and those that the last one deferred.

        Args:
            moves: The moves of this epoch.
            held: Tokens in the caches of all present sessions.
            counted: Whether to add to the tally; the boundaries apply in any case.
        """
        tally = self.tally if counted else TransferTally()
        pending = self._pending(moves, held, tally)
        transfers = [self._transfer(number, each) for number, each in enumerate(pending)]
        links = {link: self._room(link) for each in transfers for link in each.links}
        reading: dict[Hashable, int] = {
            each.target: self._network.prefill_tokens for each in transfers
        }
        division = divide(transfers, links, reading)
        self._waiting = {}
        for number in division.kv:
            self._send(pending[number], transfers[number].kv, tally)
        for number in division.tokens:
            tally.tokens += 1
            tally.tokens_read += pending[number].requested.held
        for number in division.deferred:
            tally.deferred += 1
            self._waiting[pending[number].requested.item] = pending[number]

    def _pending(
        self, moves: Iterable[RequestedMove], held: Mapping[Item, int], tally: TransferTally
    ) -> list[_Pending]:
        """Returns the new and the waiting moves; a session that moved on again has one move."""
        pending: list[_Pending] = []
        for move in moves:
            before = self._waiting.pop(move.item, None)
            if before is None:
                pending.append(_Pending(move))
                continue
            tally.dropped += 1
            source = before.requested.source  # where its cache still is
            if source != move.target:
                pending.append(_Pending(RequestedMove(move.item, source, move.target, move.held)))
        for item, before in self._waiting.items():
            if item in held:
                pending.append(_Pending(replace(before.requested, held=held[item]), before.sent))
            else:
                tally.dropped += 1
        return pending

    def _send(self, pending: _Pending, portion: int, tally: TransferTally) -> None:
        requested, sent = pending.requested, pending.sent + portion
        tally.kv_bytes += portion
        if sent < self._token_bytes * requested.held:
            tally.carried += 1
            self._waiting[requested.item] = _Pending(requested, sent)
        else:
            tally.kv += 1

    def _transfer(self, number: int, pending: _Pending) -> TransferMove:
        requested = pending.requested
        source, target = self._machine(requested.source), self._machine(requested.target)
        links = (f"bus-{source}",) if source == target else (f"up-{source}", f"down-{target}")
        rest = self._token_bytes * requested.held - pending.sent
        portion = min(rest, *(self._room(link) for link in links))
        return TransferMove(
            number, requested.source, requested.target, portion, requested.held, links
        )

    def _machine(self, gpu: int) -> int:
        return gpu // self._network.gpus_per_machine

    def _room(self, link: str) -> int:
        return self._network.bus_bytes if link.startswith("bus") else self._network.link_bytes


class MachineSlots:
    """The places of active GPUs in machines; a new GPU gets the lowest free place."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._free: list[int] = []

    def of(self, gpu: int) -> int:
        """Returns the place of a GPU, which it gives to a new one."""
        if gpu not in self._of:
            self._of[gpu] = heapq.heappop(self._free) if self._free else len(self._of)
        return self._of[gpu]

    def keep(self, active: Iterable[int]) -> None:
        """Frees the places of all GPUs that are not active."""
        gone = self._of.keys() - set(active)
        for gpu in gone:
            heapq.heappush(self._free, self._of.pop(gpu))
