"""A cluster in virtual time whose messages take as long as they like, and may be lost on purpose.

The dispatcher and the auditor are the real ones; agents and gateways are small models of what the
real ones do with sessions and batches. Streams keep their order, frames do not; no frame takes
`FRAME_MS` or longer, which is less than the grace of the auditor.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from catenary_scheduler.book import Book
from catenary_scheduler.book.book import agents_of
from catenary_scheduler.dispatch import (
    ChainedConfig,
    ChainedDispatcher,
    CombinedDispatcher,
    PooledConfig,
    PooledDispatcher,
)
from catenary_scheduler.dispatch.auditing import (
    AgentHoldings,
    Auditor,
    ExpectedSession,
    GatewayRequests,
    Leak,
    SchedulerHoldings,
    remedy_of,
)
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    BatchFailed,
    CancelBatch,
    CloseSessions,
    Command,
    DispatchBatch,
    Event,
    MoveRequested,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestCompleted,
    SessionFailed,
    SessionMoved,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsProgressed,
    StageReported,
    StartSession,
    Tick,
)
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
    SessionId,
)
from catenary_services.domain.plan import (
    Agent,
    CacheCapacity,
    Chain,
    ChainHop,
    ModelPlan,
    Pipeline,
    Plan,
    Stage,
)

MS = 1_000_000
STREAM_MS = 300
FRAME_MS = 1_500
GRACE_MS = 3_000
INTERVAL_MS = 4_000
ANSWER_TIMEOUT_MS = 1_000
DEADLINE_MS = 600_000
"""Nothing of what leaks is mended by a deadline here."""
LLM, CNN = ModelKey("llm", "1"), ModelKey("cnn", "1")
AGENTS = tuple(AgentId(f"a{i}") for i in range(4))
WHOLE = PartitionKey(LLM, 0, 2), PartitionKey(LLM, 2, 4)


def _chain(name: str, first: AgentId, second: AgentId) -> Chain:
    hops = (ChainHop(first, WHOLE[0], 0, 2), ChainHop(second, WHOLE[1], 2, 4))
    return Chain(name, hops, 3, 10**9)


CHAINS = _chain("c0", AGENTS[0], AGENTS[1]), _chain("c1", AGENTS[2], AGENTS[3])
PLAN = Plan(
    PlanId("p"),
    (
        ModelPlan(
            LLM,
            DEADLINE_MS * MS,
            (),
            chains=CHAINS,
            caches=tuple(
                CacheCapacity(hop.agent, hop.partition, 6) for chain in CHAINS for hop in chain.hops
            ),
        ),
        ModelPlan(
            CNN,
            DEADLINE_MS * MS,
            (
                Pipeline(
                    "line",
                    2,
                    (
                        Stage(PartitionKey(CNN, 0, 1), AGENTS[:2], (50 * MS, 60 * MS), 0),
                        Stage(PartitionKey(CNN, 1, 2), AGENTS[2:], (50 * MS, 60 * MS), 1000),
                    ),
                ),
            ),
        ),
    ),
)


@dataclass
class SimAgent:
    """What an agent holds. `over`: sessions and batches whose late frames are recognised."""

    name: AgentId
    sessions: dict[SessionId, tuple[ChainHop, ...]] = field(default_factory=dict)
    passed_on: set[SessionId] = field(default_factory=set)
    leads: dict[SessionId, SessionId] = field(default_factory=dict)
    batches: dict[BatchId, int] = field(default_factory=dict)
    over: set[SessionId] = field(default_factory=set)
    missing: dict[BatchId, set[GatewayId]] = field(default_factory=dict)
    """Gateways whose rows are waited for."""
    cancelled: set[BatchId] = field(default_factory=set)


@dataclass
class SimRequest:
    """What a gateway knows of a request: tokens, and the starts it believes (when sent, or None)."""

    number: int
    tokens: int = 0
    wanted: int = 0
    believed: dict[SessionId, int | None] = field(default_factory=dict)
    starts: dict[SessionId, StartSession] = field(default_factory=dict)


Filter = Callable[[str], bool]


def gateways_of(order: DispatchBatch) -> list[GatewayId]:
    """Returns the gateways with rows in a batch."""
    return list(dict.fromkeys(piece.request.gateway for piece in order.slices))


class World:
    """Four agents, two gateways, one scheduler.

    Attributes:
        loses: Asked before each message or frame, by its kind; True loses it.
        leaks: All that the auditor found.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0
        self.loses: Filter = lambda kind: False
        self.leaks: list[tuple[int, Leak]] = []
        book = Book()
        self.book = book
        config = replace(ChainedConfig(checked=True), move_deadline_ns=300_000 * MS)
        self.dispatcher = CombinedDispatcher(
            PooledDispatcher(PooledConfig(), book=book),
            ChainedDispatcher(config, book, first_session=1000),
            book,
        )
        self.agents = {name: SimAgent(name) for name in AGENTS}
        self.gateways: dict[GatewayId, dict[int, SimRequest]] = {
            GatewayId(name): {} for name in ("g0", "g1")
        }
        self.in_flight: dict[BatchId, int] = {}
        self.open: set[RequestId] = set()
        self.auditor = Auditor(GRACE_MS * MS)
        self._asked = 0
        self._wake: int | None = None
        self._numbers = 0
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._streams: defaultdict[tuple[str, str], int] = defaultdict(int)
        for name in AGENTS:
            self.feed(AgentJoined(Agent(name, "x", ServerId(name), 1, 10**9)))
        self.feed(PlanActivated(PLAN))
        self.after(INTERVAL_MS, self.ask)

    # ---- time and messages ----

    def after(self, delay_ms: float, work: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        moment = self.now + round(delay_ms * MS)
        heapq.heappush(self._queue, (moment, self._count, work, arguments))

    def run(self, until_ms: float) -> None:
        """Lets everything happen up to a moment."""
        end = round(until_ms * MS)
        while True:
            wake = self._wake
            moment = self._queue[0][0] if self._queue else end
            if wake is not None and wake < min(moment, end):
                self.now = max(self.now, wake)
                self.feed(Tick())
                continue
            if not self._queue or moment > end:
                break
            self.now, _, work, arguments = heapq.heappop(self._queue)
            work(*arguments)
        self.now = end

    def stream(self, kind: str, path: tuple[str, str], work: Callable[..., None], *a: Any) -> None:
        """A message of a stream: late, but in order."""
        if self.loses(kind):
            return
        arrives = self.now + round(self.random.random() ** 3 * STREAM_MS * MS)
        arrives = self._streams[path] = max(arrives, self._streams[path])
        self.after((arrives - self.now) / MS, work, *a)

    def frame(self, kind: str, work: Callable[..., None], *a: Any) -> None:
        """A frame: late, in any order."""
        if not self.loses(kind):
            self.after(self.random.random() ** 3 * FRAME_MS, work, *a)

    def tell(self, who: str, event: Event) -> None:
        """Somebody tells the scheduler something."""
        self.stream(type(event).__name__, (who, ""), self.feed, event)

    # ---- the scheduler ----

    def feed(self, event: Event) -> None:
        if isinstance(event, RequestArrived | SessionRequested):
            self.open.add(event.request)
        elif isinstance(event, RequestCompleted | RequestCancelled):
            self.open.discard(event.request)
        elif isinstance(event, StageReported) and event.position == 1:
            self.in_flight.pop(event.batch, None)
        commands = self.dispatcher.handle(event, self.now)
        self._wake = self.dispatcher.next_wakeup()
        for command in commands:
            self.carry_out(command)

    def carry_out(self, command: Command) -> None:
        kind = type(command).__name__
        if isinstance(command, StartSession):
            gateway = command.request.gateway
            self.stream(kind, ("", gateway), self.on_start, gateway, command)
        elif isinstance(command, DispatchBatch):
            self.in_flight[command.batch] = 0
            for gateway in gateways_of(command):
                self.stream(kind, ("", gateway), self.on_dispatch, gateway, command)
        elif isinstance(command, CloseSessions):
            agent = command.agent
            self.stream(kind, ("", agent), self.on_close, self.agents[agent], command.sessions)
        elif isinstance(command, CancelBatch):
            self.in_flight.pop(command.batch, None)
            for agent in command.agents:
                self.stream(kind, ("", agent), self.on_cancel, self.agents[agent], command.batch)
        elif isinstance(command, Reject):
            self.open.discard(command.request)
            gateway = command.request.gateway
            self.stream(kind, ("", gateway), self.on_reject, gateway, command.request.number)

    def facts(self) -> SchedulerHoldings:
        pooled, chained = self.dispatcher.pooled, self.dispatcher.chained
        followed = frozenset(pooled.followed())
        return SchedulerHoldings(
            sessions={each.session: each for each in chained.claims()},
            followed=followed,
            booked={
                batch: agents_of(self.book.ahead(batch))
                for batch in self.book.batches()
                if batch not in followed
            },
            in_flight=frozenset(self.in_flight),
            requests=frozenset((*pooled.open_requests(), *chained.open_requests())),
            open=frozenset(self.open),
            agents=frozenset(self.agents),
            gateways=frozenset(self.gateways),
        )

    # ---- audits ----

    def ask(self) -> None:
        self._asked += 1
        self.auditor.begin(self.facts())
        for agent in self.agents.values():
            self.stream("ask", ("", agent.name), self.on_ask_agent, agent, self._asked)
        for gateway in self.gateways:
            self.stream("ask", ("", gateway), self.on_ask_gateway, gateway, self._asked)
        self.after(ANSWER_TIMEOUT_MS, self.judge)

    def judge(self) -> None:
        for leak in self.auditor.end(self.facts(), self.now):
            self.leaks.append((self.now, leak))
            self.mend(leak)
        self.after(INTERVAL_MS - ANSWER_TIMEOUT_MS, self.ask)

    def mend(self, leak: Leak) -> None:
        remedy = remedy_of(leak)
        if leak.request is not None and leak.session is None:
            self.open.discard(leak.request)
        if isinstance(remedy, CancelBatch):
            self.carry_out(remedy)
        elif remedy is not None:
            self.feed(remedy)
        elif leak.batch is not None:
            self.in_flight.pop(leak.batch, None)

    def on_ask_agent(self, agent: SimAgent, number: int) -> None:
        held = AgentHoldings(
            frozenset(agent.batches),
            dict(agent.sessions),
            frozenset(agent.passed_on),
            frozenset(agent.leads),
        )
        self.stream("answer", (agent.name, ""), self.hear_agent, agent.name, held, number)

    def hear_agent(self, agent: AgentId, held: AgentHoldings, number: int) -> None:
        if number == self._asked:
            self.auditor.agent_says(agent, held)

    def on_ask_gateway(self, gateway: GatewayId, number: int) -> None:
        wants = GatewayRequests(
            {
                each.number: tuple(
                    ExpectedSession(session, None if sent is None else max(1, self.now - sent))
                    for session, sent in each.believed.items()
                )
                for each in self.gateways[gateway].values()
            }
        )
        self.stream("answer", (gateway, ""), self.hear_gateway, gateway, wants, number)

    def hear_gateway(self, gateway: GatewayId, wants: GatewayRequests, number: int) -> None:
        if number == self._asked:
            self.auditor.gateway_says(gateway, wants)

    # ---- gateways ----

    def generate(self, gateway: GatewayId, tokens: int) -> RequestId:
        """A client asks for text."""
        request = self._new(gateway, tokens)
        deadline = self.now + DEADLINE_MS * MS
        self.tell(gateway, SessionRequested(request, LLM, 4, max(tokens, 1), deadline))
        return request

    def infer(self, gateway: GatewayId) -> RequestId:
        """A client sends a photograph."""
        request = self._new(gateway, 0)
        self.tell(gateway, RequestArrived(request, CNN, 1, self.now + DEADLINE_MS * MS))
        return request

    def _new(self, gateway: GatewayId, tokens: int) -> RequestId:
        self._numbers += 1
        self.gateways[gateway][self._numbers] = SimRequest(self._numbers, wanted=tokens)
        return RequestId(gateway, self._numbers)

    def cancel(self, request: RequestId) -> None:
        """A client goes away."""
        if self.gateways[request.gateway].pop(request.number, None) is not None:
            self.tell(request.gateway, RequestCancelled(request))

    def on_reject(self, gateway: GatewayId, number: int) -> None:
        self.gateways[gateway].pop(number, None)

    def on_start(self, gateway: GatewayId, order: StartSession) -> None:
        request = self.gateways[gateway].get(order.request.number)
        if request is None:
            return
        if order.moves is None:
            request.believed.clear()
        elif order.moves not in request.believed:
            failed = SessionFailed(order.session, None, "PARTITION_LOST", "", True)
            self.tell(gateway, failed)
            return
        request.believed[order.session] = None
        request.starts[order.session] = order
        # The link may be busy for longer than any frame takes.
        self.after(self.random.random() ** 4 * 2 * GRACE_MS, self.send_opening, request, order)

    def send_opening(self, request: SimRequest, order: StartSession) -> None:
        if order.session not in request.believed:
            return
        request.believed[order.session] = self.now
        if order.moves is None:
            first = self.agents[order.hops[0].agent]
            self.frame("opening", self.on_opening, first, order, 0)
        else:
            old = request.starts.get(order.moves)
            if old is not None:
                leader = self.agents[old.hops[0].agent]
                self.frame("move", self.on_move, leader, order, old)

    def on_token(self, order: StartSession, position: int) -> None:
        gateway, number = order.request
        request = self.gateways[gateway].get(number)
        if request is None or order.session not in request.believed or position != request.tokens:
            return
        request.tokens += 1
        if order.moves in request.believed:  # it has taken over
            request.believed = {order.session: request.believed[order.session]}
        progress = SessionProgress(order.request, request.tokens, MS, MS)
        if request.tokens >= request.wanted:
            del self.gateways[gateway][number]
            self.tell(gateway, RequestCompleted(order.request, progress))
        else:
            self.tell(gateway, SessionsProgressed((progress,)))

    def on_dispatch(self, gateway: GatewayId, order: DispatchBatch) -> None:
        waiting = self.gateways[gateway]
        mine = [each.request for each in order.slices if each.request.gateway == gateway]
        first = order.path[0].agent
        # Of rows that nobody waits for any more it may send blanks, or not know how.
        if self.random.random() < 0.5 or any(each.number in waiting for each in mine):
            self.frame("rows", self.on_rows_of, gateway, self.agents[first], order)
        else:
            self.tell(gateway, BatchFailed(order.batch, first, "CANCELLED", "", True))

    def on_result(self, order: DispatchBatch) -> None:
        for piece in order.slices:
            gateway, number = piece.request
            if self.gateways[gateway].pop(number, None) is not None:
                self.tell(gateway, RequestCompleted(piece.request))

    # ---- agents: batches ----

    def on_rows_of(self, gateway: GatewayId, agent: SimAgent, order: DispatchBatch) -> None:
        """Rows of one gateway: it waits for those of the others."""
        if order.batch in agent.cancelled:
            return
        agent.batches[order.batch] = 0
        missing = agent.missing.setdefault(order.batch, set(gateways_of(order)))
        missing.discard(gateway)
        if not missing:
            self.on_rows(agent, order, 0)

    def on_rows(self, agent: SimAgent, order: DispatchBatch, position: int) -> None:
        if order.batch in agent.cancelled:
            return
        agent.batches[order.batch] = position
        self.after(self.random.random() * 80, self.computed, agent, order, position)

    def computed(self, agent: SimAgent, order: DispatchBatch, position: int) -> None:
        if agent.batches.pop(order.batch, None) is None:
            return
        report = StageReported(order.batch, position, self.now - 50 * MS, self.now)
        self.tell(agent.name, report)
        if position + 1 < len(order.path):
            following = self.agents[order.path[position + 1].agent]
            self.frame("rows", self.on_rows, following, order, position + 1)
        else:
            self.frame("result", self.on_result, order)

    def on_cancel(self, agent: SimAgent, batch: BatchId) -> None:
        agent.batches.pop(batch, None)
        agent.cancelled.add(batch)

    # ---- agents: sessions ----

    def on_opening(self, agent: SimAgent, order: StartSession, hop: int) -> None:
        if order.session in agent.over or order.session in agent.sessions:
            return
        agent.sessions[order.session] = (order.hops[hop],)
        self.after(self.random.random() ** 3 * 2000, self.prompted, agent, order, hop)

    def prompted(self, agent: SimAgent, order: StartSession, hop: int) -> None:
        """Its part of the prompt is done."""
        if order.session not in agent.sessions:
            return
        if hop + 1 < len(order.hops):
            following = self.agents[order.hops[hop + 1].agent]
            agent.passed_on.add(order.session)
            self.frame("opening", self.on_opening, following, order, hop + 1)
        else:
            self.sample(order, 0)

    def sample(self, order: StartSession, position: int) -> None:
        """The last agent of a ring samples a token; every agent must have the session."""
        ring = [self.agents[hop.agent] for hop in order.hops]
        if any(order.session not in agent.sessions for agent in ring):
            return  # a row finds nobody: the ring stands still
        request = self.gateways[order.request.gateway].get(order.request.number)
        self.frame("token", self.on_token, order, position)
        wanted = request.wanted if request is not None else position + 1
        if position + 1 >= wanted:
            for agent in ring:
                self.ends(agent, order.session)
            return
        leader = ring[0]
        for successor, source in list(leader.leads.items()):
            if source == order.session and self.random.random() < 0.5:
                self.hand_over(leader, order, successor, position + 1)
                return
        self.after(20 + self.random.random() * 400, self.sample, order, position + 1)

    def ends(self, agent: SimAgent, session: SessionId) -> None:
        """An agent closes a session unasked, and says so."""
        if agent.sessions.pop(session, None) is not None:
            agent.over.add(session)
            self.stop_leading(agent, session)
            self.tell(agent.name, SessionsClosed(agent.name, (session,)))

    def stop_leading(self, agent: SimAgent, session: SessionId) -> None:
        for successor in [each for each, source in agent.leads.items() if source == session]:
            del agent.leads[successor]
            self.fails(agent, successor)

    def fails(self, agent: SimAgent, session: SessionId) -> None:
        agent.over.add(session)
        self.tell(agent.name, SessionsClosed(agent.name, (session,)))
        self.tell(agent.name, SessionFailed(session, agent.name, "UNAVAILABLE", "", True))

    def on_close(self, agent: SimAgent, sessions: tuple[SessionId, ...]) -> None:
        for session in sessions:
            agent.sessions.pop(session, None)
            agent.leads.pop(session, None)
            agent.over.add(session)
            self.stop_leading(agent, session)
        self.tell(agent.name, SessionsClosed(agent.name, sessions))

    # ---- agents: moves ----

    def on_move(self, leader: SimAgent, order: StartSession, old: StartSession) -> None:
        if order.session in leader.over or order.session in leader.leads:
            return
        if old.session not in leader.sessions:
            self.fails(leader, order.session)
            return
        leader.leads[order.session] = old.session
        for hop, each in enumerate(order.hops):
            self.frame("round", self.on_round, self.agents[each.agent], order, hop)

    def on_round(self, agent: SimAgent, order: StartSession, hop: int) -> None:
        if order.session not in agent.over:
            agent.sessions[order.session] = (order.hops[hop],)

    def hand_over(
        self, leader: SimAgent, old: StartSession, successor: SessionId, position: int
    ) -> None:
        request = self.gateways[old.request.gateway].get(old.request.number)
        order = request.starts.get(successor) if request is not None else None
        if order is None or any(
            successor not in self.agents[hop.agent].sessions for hop in order.hops
        ):
            self.after(50, self.sample, old, position)
            return
        del leader.leads[successor]
        self.tell(leader.name, SessionMoved(successor, old.session))
        self.ends(leader, old.session)
        self.after(20, self.sample, order, position)

    # ---- what tests ask ----

    def moved(self) -> None:
        """The scheduler has some session go to another chain."""
        views = self.dispatcher.chained.sessions()
        if views:
            view = self.random.choice(views)
            self.feed(MoveRequested(view.session, mode="kv"))

    def calm(self) -> None:
        """Every client goes away."""
        for gateway, requests in self.gateways.items():
            for number in list(requests):
                self.cancel(RequestId(gateway, number))

    def left_over(self) -> dict[str, Any]:
        """Returns what somebody still holds, or the book thinks so."""
        facts = self.facts()
        found: dict[str, Any] = {
            "sessions": list(facts.sessions),
            "followed": list(facts.followed),
            "booked": list(facts.booked),
            "in flight": list(facts.in_flight),
            "requests": list(facts.requests),
            "open": list(facts.open),
            "slots": self.book.slots.sessions(),
            "held": [s for agent in self.agents.values() for s in agent.sessions],
            "led": [s for agent in self.agents.values() for s in agent.leads],
            "batches": [b for agent in self.agents.values() for b in agent.batches],
        }
        return {name: each for name, each in found.items() if each}
