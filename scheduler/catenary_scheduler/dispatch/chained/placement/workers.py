"""The workers of one model: every chain is one; of a pair (split phase) each half is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.placing.jobs import WorkerLimits
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import Nanoseconds
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import ChainHop, ModelPlan

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
