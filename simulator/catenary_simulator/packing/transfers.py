"""How moves would travel: links between machines, boundaries, caches or tokens or later (Mell, V).

GPUs stand in machines. A cache that changes the machine passes the uplink of one and the downlink
of the other; one that stays passes the machine's bus. A cache larger than its narrowest link takes
in an epoch goes in portions, one an epoch. What finds no room comes up again in the next epoch.
Placing does not wait for any of it: the shares say how far the boundaries carry what the policy
wants.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from catenary_scheduler.packing.moves import Item
from catenary_scheduler.packing.transfers.transfers import TransferMove, divide


@dataclass(frozen=True, slots=True)
class TransferNetwork:
    """What an epoch has room for beside the work.

    Attributes:
        gpus_per_machine: That share a bus.
        bus_bytes: Per epoch, inside a machine.
        link_bytes: Per epoch, up or down a machine's link.
        prefill_tokens: Per epoch, that a GPU can read again.
    """

    gpus_per_machine: int
    bus_bytes: int
    link_bytes: int
    prefill_tokens: int


@dataclass(slots=True)
class TransferTally:
    """How many moves went which way.

    Attributes:
        kv: As caches.
        tokens: As tokens, read again at the target.
        carried: Times a portion of a cache went and the rest had to follow.
        deferred: Times a move found no room in an epoch.
        dropped: Not needed any more when their turn came: the session ended or moved on.
        kv_bytes: Of caches and portions that went.
        tokens_read: By those that went as tokens.
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
    """A session that is to move in an epoch; `held` are the tokens of its cache."""

    item: Item
    source: int
    target: int
    held: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A move, and the bytes of it that have gone in earlier epochs."""

    wanted: RequestedMove
    sent: int = 0


class EpochTransfers:
    """Divides the moves of every epoch.

    Args:
        network: The boundaries.
        token_bytes: Cache of one token.
    """

    def __init__(self, network: TransferNetwork, token_bytes: int) -> None:
        self.tally = TransferTally()
        self._network = network
        self._token_bytes = token_bytes
        self._waiting: dict[Item, _Pending] = {}

    def epoch(
        self, moves: Iterable[RequestedMove], held: Mapping[Item, int], *, counted: bool
    ) -> None:
        """Divides what an epoch brings and what the last one left.

        Args:
            moves: Of this epoch.
            held: Tokens of all sessions there are.
            counted: Add to the tally; else the boundaries hold, but nothing is noted.
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
            tally.tokens_read += pending[number].wanted.held
        for number in division.deferred:
            tally.deferred += 1
            self._waiting[pending[number].wanted.item] = pending[number]

    def _pending(
        self, moves: Iterable[RequestedMove], held: Mapping[Item, int], tally: TransferTally
    ) -> list[_Pending]:
        """Returns the moves with those that waited; one that moved on again moves once."""
        pending: list[_Pending] = []
        for move in moves:
            before = self._waiting.pop(move.item, None)
            if before is None:
                pending.append(_Pending(move))
                continue
            tally.dropped += 1
            source = before.wanted.source  # where its cache still is
            if source != move.target:
                pending.append(_Pending(RequestedMove(move.item, source, move.target, move.held)))
        for item, before in self._waiting.items():
            if item in held:
                pending.append(_Pending(replace(before.wanted, held=held[item]), before.sent))
            else:
                tally.dropped += 1
        return pending

    def _send(self, pending: _Pending, portion: int, tally: TransferTally) -> None:
        wanted, sent = pending.wanted, pending.sent + portion
        tally.kv_bytes += portion
        if sent < self._token_bytes * wanted.held:
            tally.carried += 1
            self._waiting[wanted.item] = _Pending(wanted, sent)
        else:
            tally.kv += 1

    def _transfer(self, number: int, pending: _Pending) -> TransferMove:
        wanted = pending.wanted
        source, target = self._machine(wanted.source), self._machine(wanted.target)
        links = (f"bus-{source}",) if source == target else (f"up-{source}", f"down-{target}")
        rest = self._token_bytes * wanted.held - pending.sent
        portion = min(rest, *(self._room(link) for link in links))
        return TransferMove(number, wanted.source, wanted.target, portion, wanted.held, links)

    def _machine(self, gpu: int) -> int:
        return gpu // self._network.gpus_per_machine

    def _room(self, link: str) -> int:
        return self._network.bus_bytes if link.startswith("bus") else self._network.link_bytes


class MachineSlots:
    """Which place in the machines an active GPU of the policy has: the lowest that is free."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._free: list[int] = []

    def of(self, gpu: int) -> int:
        """Returns the place of a GPU; a new one gets one."""
        if gpu not in self._of:
            self._of[gpu] = heapq.heappop(self._free) if self._free else len(self._of)
        return self._of[gpu]

    def keep(self, active: Iterable[int]) -> None:
        """Frees the places of all GPUs but these."""
        gone = self._of.keys() - set(active)
        for gpu in gone:
            heapq.heappush(self._free, self._of.pop(gpu))
