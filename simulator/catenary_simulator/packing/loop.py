"""The epochs of a cluster, in which sessions end, grow and arrive and the policy decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from catenary_scheduler.dispatch.events import Command
from catenary_scheduler.packing.lower_bound import lower_bound
from catenary_scheduler.packing.moves import EpochResult, Item
from catenary_scheduler.packing.policies import PackingPolicy
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_simulator.kernel import Kernel
from catenary_simulator.packing.invariants import broken_rules, violations
from catenary_simulator.packing.result import PackingCounts
from catenary_simulator.packing.transfers import EpochTransfers, MachineSlots, RequestedMove
from catenary_simulator.placement.workload import RequestWorkload

BLOCK_TOKENS = 16


def blocks(tokens: int) -> int:
    """Returns the number of cache blocks that `tokens` tokens take."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class PackingTiming:
    """The lengths of epochs and of waiting.

    Attributes:
        epochs: Number of epochs.
        warm_up: Number of epochs at the start that are not measured.
        epoch_s: Length of an epoch in seconds.
        step_tokens: Tokens that a running session generates in an epoch.
        patience: Epochs after which a waiting session gives up; None: never.
        reserve: Whether the policy is told the final lengths of sessions.
    """

    epochs: int
    warm_up: int
    epoch_s: float
    step_tokens: int
    patience: int | None = None
    reserve: bool = False


@dataclass(slots=True)
class _Session:
    prompt: int
    answer: int
    generated: int = 0
    waited: int = 0
    disturbed: bool = False

    def held_after(self, step: int) -> int:
        """Returns the tokens in the session's cache after `step` more tokens."""
        return self.prompt + min(self.answer, self.generated + step)


class PackingLoop(Kernel):
    """One run of a packing policy, as one kernel entry per epoch.

    Sizes are in blocks and are those at the end of the epoch that begins (G14). Events of an epoch
    take effect at its end: a session that arrives is placed then, and a session that ends leaves
    its room then. A session generates while it has a place; after a preemption it goes on where it
    was.

    Args:
        policy: The packing policy, without sessions.
        capacity: Capacity of a GPU, in blocks.
        sessions: The sessions in order of arrival; each fits an empty GPU.
        pace: The lengths of epochs and of waiting.
        transfers: The division of moves by boundaries; None: moves are only counted.
        stopwatch: Clock in nanoseconds to time every epoch's decision; None: they are not timed.
    """

    def __init__(
        self,
        policy: PackingPolicy,
        capacity: int,
        sessions: RequestWorkload,
        pace: PackingTiming,
        transfers: EpochTransfers | None = None,
        stopwatch: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(None, ())
        self.counts = PackingCounts()
        self._policy = policy
        self._capacity = capacity
        self._pace = pace
        self._transfers = transfers
        self._stopwatch = stopwatch
        self._arrivals = _by_epoch(sessions, pace.epoch_s)
        self._next = next(self._arrivals, None)
        self._slots = MachineSlots()
        self._present: dict[Item, _Session] = {}
        self._queued: dict[Item, None] = {}
        self._sizes: dict[Item, int] = {}
        self._measured = False
        self.at(0, 0, None)

    def arrive(self, number: int) -> None:
        """Does nothing: sessions arrive with the epoch at whose begin they are placed."""

    def happen(self, order: int, what: object) -> None:
        """Begins the epoch whose number is `order`."""
        self._measured = order >= self._pace.warm_up
        departed = self._departed()
        grown = self._grown()
        arrived = self._arrived(order)
        begin = self._stopwatch() if self._stopwatch else 0
        result = self._policy.epoch(departed, grown, arrived)
        if self._stopwatch and self._measured:
            self.counts.decision_ns.append(self._stopwatch() - begin)
        self._note(result)
        self._generate()
        if order + 1 < self._pace.epochs:
            next_s = (order + 1) * self._pace.epoch_s
            self.at(round(next_s * NANOSECONDS_PER_SECOND), order + 1, None)

    def carry_out(self, commands: list[Command]) -> None:
        """Does nothing: without a dispatcher there are no commands."""

    def unanswered(self) -> int:
        return len(self._present)

    def is_over(self) -> bool:
        return self.is_empty()

    def _departed(self) -> list[Item]:
        """Removes and returns the sessions that have ended or give up waiting."""
        counts, patience = self.counts, self._pace.patience
        ended = [item for item, each in self._present.items() if each.generated >= each.answer]
        tired = [
            item
            for item in self._queued
            if patience is not None and self._present[item].waited >= patience
        ]
        if self._measured:
            counts.ended += len(ended)
            counts.undisturbed += sum(not self._present[item].disturbed for item in ended)
            counts.gave_up += len(tired)
        for item in (*ended, *tired):
            del self._present[item], self._sizes[item]
            self._queued.pop(item, None)
        return [*ended, *tired]

    def _grown(self) -> dict[Item, int]:
        """Returns the new sizes, in blocks, of the running sessions that grow."""
        if self._pace.reserve:
            return {}
        grown: dict[Item, int] = {}
        for item, session in self._present.items():
            size = blocks(session.held_after(self._pace.step_tokens))
            if item not in self._queued and size != self._sizes[item]:
                grown[item] = self._sizes[item] = size
        return grown

    def _arrived(self, epoch: int) -> dict[Item, int]:
        arrived: dict[Item, int] = {}
        while self._next is not None and self._next[0] <= epoch:
            _, item, session = self._next
            self._present[item] = session
            step = session.answer if self._pace.reserve else self._pace.step_tokens
            arrived[item] = self._sizes[item] = blocks(session.held_after(step))
            self._next = next(self._arrivals, None)
        if self._measured:
            self.counts.arrived += len(arrived)
        return arrived

    def _note(self, result: EpochResult) -> None:
        counts, policy = self.counts, self._policy
        for item in result.preempted:
            self._present[item].disturbed = True
        self._queued = dict.fromkeys(result.queued)
        active = policy.bins()
        counts.gpus.append(len(active))
        moves = self._wanted(result)
        self._slots.keep(active)
        if self._transfers is not None:
            held = {item: each.held_after(0) for item, each in self._present.items()}
            self._transfers.epoch(moves, held, counted=self._measured)
        if not self._measured:
            return
        step = self._pace.step_tokens
        real = [
            blocks(each.held_after(step))
            for item, each in self._present.items()
            if item not in self._queued
        ]
        counts.used += sum(real)
        counts.lower_bounds += lower_bound(real, self._capacity)
        counts.migrations += len(moves)
        counts.migrated_tokens += sum(move.held for move in moves)
        counts.preemptions += len(result.preempted)
        counts.recomputed_tokens += sum(
            self._present[item].held_after(0) for item in result.preempted
        )
        counts.queued += len(self._queued)
        counts.queued_peak = max(counts.queued_peak, len(self._queued))
        counts.present += len(self._present)
        found = violations(policy, self._capacity, self._sizes, self._queued.keys())
        counts.violations += len(found) + len(broken_rules(policy))

    def _wanted(self, result: EpochResult) -> list[RequestedMove]:
        """Returns the moves, with the places of their GPUs in machines."""
        return [
            RequestedMove(
                move.item,
                self._slots.of(move.source),
                self._slots.of(move.target),
                self._present[move.item].held_after(0),
            )
            for move in result.moves
        ]

    def _generate(self) -> None:
        step = self._pace.step_tokens
        for item, session in self._present.items():
            if item in self._queued:
                session.waited += 1
                session.disturbed = True
            else:
                session.generated = min(session.answer, session.generated + step)


def _by_epoch(sessions: RequestWorkload, epoch_s: float) -> Iterator[tuple[int, int, _Session]]:
    """Yields for each session the epoch at whose begin it is placed, its number, and itself."""
    length_ns = epoch_s * NANOSECONDS_PER_SECOND
    for number, moment in enumerate(sessions.arrived_ns):
        session = _Session(sessions.prompts[number], sessions.answers[number])
        yield ceil(moment / length_ns), number, session
