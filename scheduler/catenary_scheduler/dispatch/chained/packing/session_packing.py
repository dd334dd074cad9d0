"""Packing of running sessions, epoch by epoch: which are looked at, which move, which wait.

Once per epoch every model with a goal is looked at: what its sessions will hold at the end of the
coming epoch (`view`), where they should be (`pool`: Mell for "pack", even loads for "balance"),
which of these moves may be made and pay (`checks`), and which of them go as caches, which as
tokens, and which not now (`MigrationBudget`). A move that was not made is not remembered: if it is
still wanted in the next epoch, it is found again.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.migration.moving import SessionMigration
from catenary_scheduler.dispatch.chained.packing.checks import MoveChecks
from catenary_scheduler.dispatch.chained.packing.model import ModelPacking
from catenary_scheduler.dispatch.chained.packing.pool import ProposedMove
from catenary_scheduler.dispatch.chained.packing_rules import PackingRules
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.packing.moves import PackingMove
from catenary_scheduler.packing.transfers.ordering import in_waves
from catenary_scheduler.packing.transfers.transfer_costs import ChainActivity
from catenary_scheduler.packing.transfers.transfers import TransferKind, TransferMove
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds
from catenary_services.domain.plan import Agent

PACKING_COUNTERS = (
    "packing_epochs",
    "packing_wanted",
    "packing_full",
    "packing_harmful",
    "packing_worthless",
    "packing_deferred",
    "packing_moves",
    "packing_faults",
)
"""Counters of packing. In order: epochs in which sessions were looked at; wanted moves; moves not
made for lack of room, because an objective would be missed, because the session ends soon, because
of limits of links and chains; moves begun; packers made anew."""


class SessionPacking:
    """Packs the sessions of all models that have a goal.

    Args:
        table: The dispatcher's state; its plan and its model queues say what there is to pack.
        migration: Begins moves.
        rules: When sessions are looked at, and which moves are worth making.
    """

    def __init__(
        self, table: SessionTable, migration: SessionMigration, rules: PackingRules
    ) -> None:
        self._table = table
        self._migration = migration
        self._rules = rules
        self._models: dict[ModelKey, ModelPacking] = {}
        self._classes: dict[AgentId, str] = {}
        self._due: Nanoseconds | None = None
        """The end of the present epoch; None: no model has a goal, or none has a session."""
        for name in PACKING_COUNTERS:
            table.counters.setdefault(name, 0)

    # What happened

    def agent_joined(self, agent: Agent) -> None:
        """Notes the device class of an agent: chains of agents of one class are packed together."""
        self._classes[agent.agent_id] = agent.device_class

    def plan_activated(self) -> None:
        """Takes the goals of the plan in force."""
        plan = self._table.plan
        before, self._models = self._models, {}
        for model in plan.models if plan is not None else ():
            if model.packing != "off" and model.chains:
                known = before.get(model.model)
                if known is None:
                    known = ModelPacking(self._rules)
                known.activate(model)
                self._models[model.model] = known
        if not self._models:
            self._due = None

    def started(self, sequence: SequenceRequest) -> None:
        """Counts a new session, so that the next one is put beside it before the epoch is over."""
        packed = self._models.get(sequence.model) if self._models else None
        if packed is not None and sequence.session is not None:
            packed.started(sequence, sequence.session)

    def after_event(self) -> None:
        """Looks at the sessions if the epoch is over."""
        table = self._table
        if not self._models:
            return
        now = table.now
        if self._due is None:
            if table.sessions:
                self._due = now + self._rules.epoch_ns
        elif now >= self._due:
            self._due = now + self._rules.epoch_ns if table.sessions else None
            self._epoch()

    def next_moment(self) -> Nanoseconds | None:
        """Returns when the present epoch is over; None if there is nothing to pack."""
        return self._due

    def needed(self, model: ModelKey) -> int:
        """Returns how many chains the sessions of a model need at this moment.

        0 for a model that is not packed onto few chains.
        """
        packed = self._models.get(model)
        return packed.needed if packed is not None and packed.goal == "pack" else 0

    def statistics(self) -> dict[str, int]:
        return {
            "packing_goals": len(self._models),
            "packed_chains": sum(each.chains for each in self._models.values()),
            "packed_chains_in_use": sum(each.in_use for each in self._models.values()),
        }

    # An epoch

    def _epoch(self) -> None:
        table = self._table
        looked = {}
        for key, packed in self._models.items():
            model_queue = table.model_queues.get(key)
            if model_queue is not None:
                looked[key] = packed
                packed.begin(model_queue, self._classes)
        for sequence in table.sequences.values():
            session = sequence.session
            if session is not None:
                found = looked.get(sequence.model)
                if found is not None:
                    found.see(sequence, session, table.now)
        for key, packed in looked.items():
            table.counters["packing_epochs"] += 1
            wanted = packed.wanted()
            table.counters["packing_faults"] += packed.take_faults()
            if wanted:
                table.counters["packing_wanted"] += len(wanted)
                self._move(table.model_queues[key], packed, wanted)

    def _move(
        self, model_queue: ModelQueue, packed: ModelPacking, wanted: list[ProposedMove]
    ) -> None:
        """Begins the wanted moves that may be made."""
        table, counters = self._table, self._table.counters
        checks = MoveChecks(table, self._migration, model_queue, self._rules, packed.lines)
        asked: dict[int, tuple[TransferMove, ProposedMove]] = {}
        loads: dict[str, ChainActivity] = {}
        for each, chain in _in_order(wanted, self._rules.most_moves):
            name = chain.route.chain_id
            if name not in loads:
                loads[name] = checks.load(chain, packed.sharing(chain))
            move = checks.transfer(each, chain)
            if not checks.has_room(each, chain):
                counters["packing_full"] += 1
            elif not each.chain.overflows and not checks.is_worth_it(
                each, checks.times(move, loads[name])
            ):
                counters["packing_worthless"] += 1
            elif not checks.keeps_objectives(each, chain):
                counters["packing_harmful"] += 1
            else:
                chain.holds(each.tokens, each.size)
                asked[move.id] = move, (each, chain)
        if asked:
            self._begin(checks, packed, asked, loads)

    def _begin(
        self,
        checks: MoveChecks,
        packed: ModelPacking,
        asked: dict[int, tuple[TransferMove, ProposedMove]],
        loads: dict[str, ChainActivity],
    ) -> None:
        table = self._table
        moves = [move for move, _ in asked.values()]
        division = table.migration_budget.divide(table.now, moves, dict(loads.items()))
        table.counters["packing_deferred"] += len(division.deferred)
        ways: tuple[tuple[TransferKind, tuple[int, ...]], ...] = (
            ("kv", division.kv),
            ("tokens", division.tokens),
        )
        for way, numbers in ways:
            for number in numbers:
                each, chain = asked[number][1]
                if checks.starts(each, chain, way):
                    packed.moved(each, table.now)
                    table.counters["packing_moves"] += 1


def _in_order(wanted: list[ProposedMove], most: int) -> list[ProposedMove]:
    """Returns the possible moves; moves for which others wait come first (G15).

    Sessions that rest stay where they are, unless their chain overflows.
    """
    able = [
        (seen, target)
        for seen, target in sorted(wanted, key=_smallest_first)
        if not seen.rests or seen.chain.overflows
    ][:most]
    moves, room = [], {}
    for number, (seen, target) in enumerate(able):
        moves.append(PackingMove(number, seen.chain.number, target.number, seen.size))
        for chain in (seen.chain, target):
            room[chain.number] = max(0, chain.capacity - chain.held)
    ordering = in_waves(moves, room)
    ordered = [move for wave in ordering.waves for move in wave]
    return [able[moves.index(move)] for move in [*ordered, *ordering.deferred]]


def _smallest_first(wanted: ProposedMove) -> tuple[int, int]:
    """Sort key: small sessions find room first; the session id makes the order total."""
    return wanted[0].size, int(wanted[0].session.session_id)
