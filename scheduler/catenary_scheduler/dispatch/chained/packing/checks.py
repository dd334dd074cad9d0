"""Decides which moves are made: there is room, no objective is harmed, and the move pays."""

from __future__ import annotations

import math

from catenary_scheduler.dispatch.chained.migration.moving import SessionMigration
from catenary_scheduler.dispatch.chained.packing.view import PackedChain, SessionSnapshot
from catenary_scheduler.dispatch.chained.packing_rules import PackingRules
from catenary_scheduler.dispatch.chained.placement.workers import UNKNOWN
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_scheduler.packing.transfers.transfer_costs import ChainActivity, MoveTimes
from catenary_scheduler.packing.transfers.transfers import TransferKind, TransferMove
from catenary_services.domain.latency import LatencyLines


class MoveChecks:
    """Checks the moves of one model in one epoch.

    Args:
        table: The dispatcher's state.
        migration: Begins moves.
        model_queue: The queue of the model.
        rules: Which moves are worth making.
        lines: Latency lines of the plan's chains, for models without a placer that keeps them.
    """

    def __init__(
        self,
        table: SessionTable,
        migration: SessionMigration,
        model_queue: ModelQueue,
        rules: PackingRules,
        lines: dict[str, LatencyLines | None],
    ) -> None:
        self._table = table
        self._migration = migration
        self._model_queue = model_queue
        self._rules = rules
        self._lines = lines
        self._lengths = table.lengths_of(model_queue.model)

    def has_room(self, seen: SessionSnapshot, chain: PackedChain) -> bool:
        """True if a chain has a slot and memory for a session, beside all it holds now (G15).

        The source keeps its caches until the session is handed over, so what other sessions are
        about to leave does not count as free before they have left.
        """
        if chain.held + seen.size > chain.capacity:
            return False
        if not chain.route.has_room(seen.tokens + seen.growth):
            return False
        return not self._migration.obstacle(seen.session.session_id, chain.route)

    @property
    def is_harmless(self) -> bool:
        """True unless the model's sessions already miss their objectives.

        If they do, lines or predicted lengths are wrong, and must not be used to put sessions
        closer together.
        """
        placer = self._model_queue.placer
        if placer is None or not placer.adaptation.samples or self._model_queue.packing != "pack":
            return True
        return placer.adaptation.attainment >= placer.adaptation.config.target

    def keeps_objectives(self, seen: SessionSnapshot, chain: PackedChain) -> bool:
        """True if constraints b and e hold on a chain with one more session."""
        if not (self.is_harmless or seen.chain.overflows):
            return False
        placer = self._model_queue.placer
        held = placer.loads.running_of(seen.sequence.request) if placer is not None else None
        if placer is None or held is None:
            return True
        worker, running = self._worker(chain), held[1]
        if worker is None:
            return True
        worker.look(self._table.now)
        left = max(1.0, running.final_tokens - running.generated_tokens)
        theta = placer.adaptation.theta
        share = placer.loads.prompt_share.of_each(self._model_queue.usable, self._table.now)
        return worker.has_context(
            seen.tokens, left, running.per_token_ns, theta, share
        ) and worker.has_cache(seen.tokens, left)

    def may_read(self, seen: SessionSnapshot, chain: PackedChain) -> bool:
        """True if reading its tokens again on a chain harms no session there (c and d)."""
        worker = self._worker(chain)
        placer = self._model_queue.placer
        if worker is None or placer is None:
            return True
        if not worker.may_join(seen.tokens):
            return False
        ready = self._table.now + worker.ready_ns(seen.tokens)
        if worker.first_due_ns and ready > worker.first_due_ns:
            return False
        return worker.stall_ns(seen.tokens) <= placer.adaptation.theta * worker.least_saved_ns

    def is_worth_it(self, seen: SessionSnapshot, times: MoveTimes) -> bool:
        """True if a session goes on for long enough that moving it pays.

        The gain of a move lasts as long as the session does; its cost is links, or time of the
        target chain, for as long as the move takes.
        """
        event = seen.sequence.event
        generated = seen.sequence.generated_tokens
        whole = self._lengths.repredict(event.prompt_tokens, generated, event.max_tokens)
        left_ns = (whole - generated) / max(1, seen.growth) * self._rules.epoch_ns
        if left_ns < self._rules.least_left_ns:
            return False
        known = [each for each in (times.kv_ns, times.tokens_ns) if each is not None]
        return not known or left_ns >= self._rules.worth * min(known)

    def times(self, move: TransferMove, load: ChainActivity) -> MoveTimes:
        """Returns the duration of a move by either mode."""
        return self._table.migration_budget.times(move, load)

    def transfer(self, seen: SessionSnapshot, chain: PackedChain) -> TransferMove:
        """Returns the data of a move; none where the size of the caches is not known."""
        number, hops = int(seen.session.session_id), seen.session.hops
        source, target = seen.chain.route.chain_id, chain.route.chain_id
        cost = self._table.migration_budget.cost(hops, chain.route.hops, seen.tokens)
        if cost is None:
            return TransferMove(number, source, target, 0, seen.tokens, ())
        return cost.move(number, source, target)

    def load(self, chain: PackedChain, sharing: int) -> ChainActivity:
        """Returns the present work of a chain."""
        worker = self._worker(chain)
        if worker is None or worker.lines is UNKNOWN:
            lines = self._lines.get(chain.route.chain_id)
            return ChainActivity(lines, chain.sessions, chain.tokens, 0, sharing)
        tightest = worker.tightest_ns
        pace = 0 if tightest == math.inf else int(tightest)
        return ChainActivity(
            worker.lines, len(worker.running_sequences), worker.now_tokens, pace, sharing
        )

    def starts(self, seen: SessionSnapshot, chain: PackedChain, way: TransferKind) -> bool:
        """Begins a move if it is still possible; True if it began."""
        if way == "tokens" and not self.may_read(seen, chain):
            return False
        return self._migration.move(seen.session.session_id, chain.route, way, "packing")

    def _worker(self, chain: PackedChain) -> Worker | None:
        placer = self._model_queue.placer
        return placer.workers.of(chain.route) if placer is not None else None
