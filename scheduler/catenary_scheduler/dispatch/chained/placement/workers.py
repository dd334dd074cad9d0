"""The workers of one model: every chain is one; of a pair (split phase) each half is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.placing.jobs import WorkerLimits
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, Nanoseconds
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import ChainHop, ModelPlan

_LOOK_AT_BATCHES_NS = 100 * NANOSECONDS_PER_MILLISECOND
"""Least time between looks at the batches on the devices of chains."""
_NOTABLE = 0.05
"""Waits that differ by less than this share of a step change nothing."""
GAMMA = 0.5
"""Half of an answer counts: the mean over its time, which ATGT measures."""
UNKNOWN = LatencyLines(0.0, 0.0, 0.0, 0.0, 0.0)
"""The lines of chains of which nothing is known: only their number of sessions counts."""


class ChainWorkers:
    """Workers of one model, by route.

    Attributes:
        routes: Routes that may be used, for prompts or for everything.
        open: Their workers.
        kinds: One worker of each kind of these; workers of a kind are alike.
        decode_routes: Routes that may be used to generate (split phase).
        decode_open: Their workers.
        decode_kinds: One worker of each kind of these.
        has_lines: True if the latency lines of all workers that may be used are known.
    """

    def __init__(self) -> None:
        self.routes: list[ChainState] = []
        self.open: list[Worker] = []
        self.kinds: list[Worker] = []
        self.decode_routes: list[ChainState] = []
        self.decode_open: list[Worker] = []
        self.decode_kinds: list[Worker] = []
        self.has_lines = False
        self._lines: dict[tuple[ChainHop, ...], tuple[LatencyLines | None, float]] = {}
        self._workers: dict[ChainState, Worker] = {}
        self._waits: dict[ChainState, float] = {}
        """Nanoseconds that a step of each worker waits for batches on its devices."""
        self._waits_seen: Nanoseconds = 0

    def all(self) -> list[Worker]:
        """Returns the workers of all routes, also of those that are not to be used any more."""
        return list(self._workers.values())

    def activate(self, plan: ModelPlan | None) -> None:
        """Takes the lines of a plan; `rebuild` must follow."""
        self._lines = {}
        for chain in plan.chains if plan is not None else ():
            self._lines[chain.hops] = (chain.lines, chain.cache_tokens or math.inf)

    def refit(self, lines: Iterable[tuple[tuple[ChainHop, ...], LatencyLines]]) -> None:
        """Takes new latency lines of chains."""
        for hops, fitted in lines:
            if hops in self._lines:
                self._lines[hops] = (fitted, self._lines[hops][1])
        for route, worker in self._workers.items():
            self._adopt(route, worker)
        self._sort_kinds()

    def wait_for_batches(self, slots: SlotLedger, now: Nanoseconds) -> bool:
        """Takes in how long steps wait for batches of other models on the same devices.

        Returns:
            True if that changed notably since it was last taken in.
        """
        if now - self._waits_seen < _LOOK_AT_BATCHES_NS:
            return False
        self._waits_seen = now
        has_changed = False
        for route, worker in self._workers.items():
            wait = slots.wait_ns(route.claims, now)
            known = self._waits.get(route, 0.0)
            if abs(wait - known) > _NOTABLE * (worker.lines.decode_ns + known):
                self._waits[route] = wait
                self._adopt(route, worker)
                has_changed = True
        if has_changed:
            self._sort_kinds()
        return has_changed

    def rebuild(self, routes: Sequence[ChainState], busy: Set[Worker]) -> None:
        """Takes the routes to be used from now on.

        Args:
            routes: The routes.
            busy: Workers that have sessions, which still count on other routes.
        """
        prefill = [route for route in routes if route.role == "prefill"]
        decode = [route for route in routes if route.role == "decode"]
        if prefill and decode:
            # Mixed routes beside pairs take prompts as pairs do; the choice of the pair decides
            # where they stay.
            self.decode_routes = decode
            self.routes = [route for route in routes if route.role != "decode"]
        else:
            self.decode_routes, self.routes = [], list(routes)
        here = set(routes)
        self._workers = {
            route: worker
            for route, worker in self._workers.items()
            if route in here or worker in busy
        }
        self._waits = {route: ns for route, ns in self._waits.items() if route in self._workers}
        for route, worker in self._workers.items():
            self._adopt(route, worker)
        self.open = [self.of(route) for route in self.routes]
        self.decode_open = [self.of(route) for route in self.decode_routes]
        self._sort_kinds()

    def _sort_kinds(self) -> None:
        self.kinds = _kinds(self.open)
        self.decode_kinds = _kinds(self.decode_open)
        self.has_lines = all(
            worker.lines is not UNKNOWN for worker in [*self.kinds, *self.decode_kinds]
        )

    def of(self, route: ChainState) -> Worker:
        """Returns the worker of a route, made on first use."""
        worker = self._workers.get(route)
        if worker is None:
            worker = self._workers[route] = Worker(UNKNOWN, WorkerLimits(0, 0, math.inf, GAMMA))
            self._adopt(route, worker)
        return worker

    def _adopt(self, route: ChainState, worker: Worker) -> None:
        lines, capacity = self._lines.get(route.hops, (None, math.inf))
        split = route.role == "decode"
        wait_ns = self._waits.get(route, 0.0)
        if lines is not None and wait_ns:
            lines = lines.delayed(wait_ns)
        worker.adopt(lines or UNKNOWN, WorkerLimits(0, 0, capacity, GAMMA, 1.0, split))

    def mixed(self) -> list[tuple[ChainState, Worker]]:
        """Returns the usable workers that both run prompts and generate."""
        both = zip(self.routes, self.open, strict=True)
        return [(route, worker) for route, worker in both if route.role == "mixed"]

    def look(self, now: Nanoseconds) -> None:
        """Updates all workers, so that the next decision need not."""
        for worker in self.open:
            worker.look(now)


def _kinds(workers: Iterable[Worker]) -> list[Worker]:
    """Returns one of all workers that have the same lines and the same capacity."""
    found: dict[tuple[LatencyLines, float], Worker] = {}
    for worker in workers:
        found.setdefault((worker.lines, worker.limits.cache_capacity), worker)
    return list(found.values())
