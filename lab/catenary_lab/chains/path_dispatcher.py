"""Serving without chains: a path per request, slots in the order of arrival.

No cache is reserved. A request keeps the path it got when it arrived and waits until the block
slots it needs are free on every server of it. Requests that came earlier hold their slots there,
even while they wait. So every server grants its slots in the order of arrival, and a request starts
when all servers of its path have granted theirs; as all see the same order, there is no deadlock.

The dispatcher is for comparison in the simulator: a path needs a map of the network that a cluster
in service does not have, and a request that waits for one server keeps slots of the others idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from catenary_lab.chains.expected_occupancy import ExpectedOccupancy
from catenary_lab.chains.paths import Occupancy, Path, PathCosts, PathFinder, PathServer
from catenary_scheduler.dispatch.events import (
    CloseSessions,
    Command,
    Event,
    Reject,
    RequestCancelled,
    RequestCompleted,
    SessionRequested,
    SessionsClosed,
    StartSession,
)
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, RequestId, SessionId
from catenary_services.errors import NoActivePlan


class _Session:
    """A request on its path."""

    __slots__ = ("closing", "missing", "path", "request", "session")

    def __init__(self, request: RequestId, path: Path) -> None:
        self.request = request
        self.path = path
        self.missing = len(path.servers)
        """Number of servers of the path that have not granted their slots yet."""
        self.session: SessionId | None = None
        self.closing: dict[AgentId, int] = {}
        """Agents that hold slots of the session, by position of the server; filled when it
        starts."""


class PathDispatcher:
    """A dispatcher that gives each request a path, and grants slots in the order of arrival.

    Args:
        model: The only model it serves.
        servers: The servers that host blocks, in the order in which the policy numbers them.
        blocks: Number of blocks of the model.
        costs: The costs of the policy.
        beliefs: Beliefs by which requests are routed; None: they are routed by what servers hold.
    """

    def __init__(
        self,
        model: ModelKey,
        servers: Sequence[PathServer],
        blocks: int,
        costs: PathCosts,
        beliefs: ExpectedOccupancy | None = None,
    ) -> None:
        self._model = model
        self._beliefs = beliefs
        self._finder = PathFinder(servers, blocks, costs)
        self.occupancy = [Occupancy(server.slots) for server in servers]
        """Occupancy of each server, numbered as in `servers`."""
        self._queues: list[deque[tuple[_Session, int]]] = [deque() for _ in servers]
        self._sessions: dict[RequestId, _Session] = {}
        self._started: dict[SessionId, _Session] = {}
        self._next = 1

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:
        """Updates the state by one event and returns the commands that follow from it."""
        if isinstance(event, SessionRequested):
            return self._requested(event, now)
        if isinstance(event, SessionsClosed):
            return self._closed(event)
        if isinstance(event, RequestCompleted | RequestCancelled):
            return self._over(event.request)
        return []

    def next_wakeup(self) -> Nanoseconds | None:
        """Returns None: nothing here waits for time to pass."""
        return None

    def _requested(self, event: SessionRequested, now: Nanoseconds) -> list[Command]:
        servers = None
        if event.model == self._model:
            seen = self.occupancy if self._beliefs is None else self._beliefs.at(now)
            servers = self._finder.shortest(seen)
        if servers is None:
            return [Reject(event.request, NoActivePlan.reason, "no path through all blocks")]
        path = self._finder.path(servers, self._model)
        if self._beliefs is not None:
            self._beliefs.routed(servers, path.hops)
        session = _Session(event.request, path)
        self._sessions[event.request] = session
        for server, hop in zip(servers, path.hops, strict=True):
            state = self.occupancy[server]
            state.held += hop.blocks
            state.assigned += 1
            self._queues[server].append((session, hop.blocks))
        return self._grant(servers)

    def _grant(self, servers: Sequence[int]) -> list[Command]:
        """Grants free slots on these servers to the heads of their queues."""
        commands: list[Command] = []
        for server in servers:
            state = self.occupancy[server]
            queue = self._queues[server]
            while queue and queue[0][1] <= state.free:
                session, blocks = queue.popleft()
                state.free -= blocks
                session.missing -= 1
                if session.missing == 0:
                    commands.append(self._start(session))
        return commands

    def _start(self, session: _Session) -> StartSession:
        number = SessionId(self._next)
        self._next += 1
        session.session = number
        self._started[number] = session
        for server, hop in zip(session.path.servers, session.path.hops, strict=True):
            state = self.occupancy[server]
            state.running += 1
            session.closing[hop.agent] = server
        return StartSession(number, session.request, session.path.chain_id, session.path.hops)

    def _closed(self, event: SessionsClosed) -> list[Command]:
        freed = []
        for number in event.sessions:
            session = self._started.get(number)
            server = session.closing.pop(event.agent, None) if session is not None else None
            if session is None or server is None:
                continue
            at = session.path.servers.index(server)
            state = self.occupancy[server]
            state.free += session.path.hops[at].blocks
            self._leave(server, session.path.hops[at].blocks)
            state.running -= 1
            freed.append(server)
            if not session.closing:
                del self._started[number]
        return self._grant(freed)

    def _over(self, request: RequestId) -> list[Command]:
        session = self._sessions.pop(request, None)
        if session is None:
            return []
        if session.session is not None:
            return [CloseSessions(agent, (session.session,)) for agent in session.closing]
        return self._withdraw(session)

    def _withdraw(self, session: _Session) -> list[Command]:
        """Removes a waiting request from all queues."""
        for server, hop in zip(session.path.servers, session.path.hops, strict=True):
            left = deque(each for each in self._queues[server] if each[0] is not session)
            if len(left) == len(self._queues[server]):
                self.occupancy[server].free += hop.blocks
            self._queues[server] = left
            self._leave(server, hop.blocks)
        return self._grant(session.path.servers)

    def _leave(self, server: int, blocks: int) -> None:
        state = self.occupancy[server]
        state.held -= blocks
        state.assigned -= 1
