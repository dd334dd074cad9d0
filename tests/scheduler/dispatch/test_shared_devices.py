"""Photographs and chats on the same device: what is booked, promised and chosen."""

from __future__ import annotations

from catenary_scheduler.book import Book
from catenary_scheduler.dispatch import (
    ChainedConfig,
    ChainedDispatcher,
    CombinedDispatcher,
    PooledConfig,
    PooledDispatcher,
)
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    Command,
    DispatchBatch,
    Event,
    LatencyRefitted,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCompleted,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsProgressed,
    StageReported,
    StartSession,
)
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import Agent, Chain, ChainHop, ModelPlan, Pipeline, Plan, Stage

MS = 1_000_000
FAR = 10**12
CATS, LLAMA = ModelKey("cats", "1"), ModelKey("llama", "1")
A, B = AgentId("a"), AgentId("b")
BATCH_NS, STEP_NS = 10 * MS, 6 * MS
LINES = LatencyLines(10_000.0, 1.0 * MS, 0.0, 1.0 * MS, 5.0 * MS, 6.0 * MS)
PART = PartitionKey(LLAMA, 0, 4)


def vision(*agents: AgentId) -> ModelPlan:
    stage = Stage(PartitionKey(CATS, 0, 1), agents, (BATCH_NS,), 0)
    return ModelPlan(CATS, 10**9, (Pipeline("p", 1, (stage,)),))


def language(*agents: AgentId, lines: LatencyLines = LINES) -> ModelPlan:
    chains = [
        Chain(f"k-{agent}", (ChainHop(agent, PART, 0, 4),), 4, 50 * MS, lines=lines)
        for agent in agents
    ]
    return ModelPlan(LLAMA, 10**9, (), chains=tuple(chains))


class Cluster:
    """Two agents on servers of their own, and the dispatcher of both kinds."""

    def __init__(self, *models: ModelPlan, policy: str = "least-time") -> None:
        self.book = Book()
        self.at = CombinedDispatcher(
            PooledDispatcher(PooledConfig(), book=self.book),
            ChainedDispatcher(ChainedConfig(checked=True), self.book, policy=policy),
            self.book,
        )
        self.numbers = 0
        for agent in (A, B):
            self.tell(0, AgentJoined(Agent(agent, "x", ServerId(agent), 1, 10**9)))
        self.tell(0, PlanActivated(Plan(PlanId("p"), models)))

    def tell(self, at_ns: int, event: Event) -> list[Command]:
        return self.at.handle(event, at_ns)

    def request(self) -> RequestId:
        self.numbers += 1
        return RequestId(GatewayId("g"), self.numbers)

    def photograph(self, now: int, budget: int = FAR) -> DispatchBatch | Reject:
        request = self.request()
        (answer,) = self.tell(now, RequestArrived(request, CATS, 1, now + budget))
        assert isinstance(answer, DispatchBatch | Reject)
        return answer

    def computed(self, batch: DispatchBatch, start: int, end: int) -> None:
        """Reports a photograph and has its gateway say that it has the result."""
        self.tell(end, StageReported(batch.batch, 0, start, end))
        self.tell(end, RequestCompleted(batch.slices[0].request))

    def chat(self, now: int, objectives: TokenObjectives | None = None) -> StartSession:
        event = SessionRequested(self.request(), LLAMA, 8, 100, FAR, objectives=objectives)
        (start,) = self.tell(now, event)
        assert isinstance(start, StartSession)
        return start


def test_a_photograph_is_promised_the_time_it_takes_beside_a_chat() -> None:
    cluster = Cluster(vision(A), language(A))
    start = cluster.chat(0)
    now = 5_000 * MS  # its prompt has run
    batch = cluster.photograph(now)
    assert isinstance(batch, DispatchBatch)
    assert batch.expected_finish_ns == now + BATCH_NS + STEP_NS
    assert (batch.path[0].duration_ns, batch.path[0].steps_ns) == (BATCH_NS + STEP_NS, STEP_NS)
    cluster.computed(batch, now + STEP_NS, now + STEP_NS + BATCH_NS)
    cluster.tell(now, RequestCompleted(start.request))
    cluster.tell(now, SessionsClosed(A, (start.session,)))
    later = cluster.photograph(6_000 * MS)
    assert isinstance(later, DispatchBatch)
    assert later.expected_finish_ns == 6_000 * MS + BATCH_NS


def test_a_promise_that_the_device_cannot_keep_is_not_given() -> None:
    cluster = Cluster(vision(A), language(A))
    cluster.chat(0)
    refused = cluster.photograph(5_000 * MS, BATCH_NS + STEP_NS - 1)
    assert isinstance(refused, Reject)
    assert isinstance(cluster.photograph(5_000 * MS, BATCH_NS + STEP_NS), DispatchBatch)


def test_photographs_go_where_nobody_chats_first() -> None:
    cluster = Cluster(vision(A, B), language(A))
    cluster.chat(0)
    now = 5_000 * MS
    batches = [cluster.photograph(now) for _ in range(2)]
    assert [b.path[0].agent for b in batches if isinstance(b, DispatchBatch)] == [B, A]


def test_a_prompt_counts_from_the_start_of_its_session() -> None:
    cluster = Cluster(vision(A), language(A))
    cluster.chat(0)
    batch = cluster.photograph(1)
    assert isinstance(batch, DispatchBatch)
    chunk = 8 * 10_000 + MS
    assert batch.path[0].steps_ns == STEP_NS + chunk


def test_steps_are_booked_by_the_lines_as_they_were_fitted_anew() -> None:
    cluster = Cluster(vision(A), language(A))
    cluster.chat(0)
    slower = LatencyLines(10_000.0, 1.0 * MS, 0.0, 1.0 * MS, 8.0 * MS, 9.0 * MS)
    cluster.tell(MS, LatencyRefitted(LLAMA, (((ChainHop(A, PART, 0, 4),), slower),)))
    batch = cluster.photograph(5_000 * MS)
    assert isinstance(batch, DispatchBatch)
    assert batch.path[0].steps_ns == 9 * MS


def test_a_successor_books_the_same_steps_once_it_has_the_plan() -> None:
    cluster = Cluster(vision(A), language(A))
    cluster.chat(0)
    other = Cluster()
    other.at.restore(cluster.at.snapshot())
    other.tell(0, PlanActivated(Plan(PlanId("p"), (vision(A), language(A)))))
    batch = other.photograph(5_000 * MS)
    assert isinstance(batch, DispatchBatch)
    assert batch.path[0].steps_ns == STEP_NS


def busy_with_photographs(cluster: Cluster) -> int:
    """Reports photographs that keep agent a busy half of ten seconds; returns their end."""
    for start in range(0, 10_000 * MS, 2 * BATCH_NS):
        batch = cluster.photograph(start)
        assert isinstance(batch, DispatchBatch)
        cluster.computed(batch, start, start + BATCH_NS)
    return 10_000 * MS


def test_a_chat_takes_the_agent_that_computes_no_photographs() -> None:
    cluster = Cluster(vision(A), language(A, B))
    assert cluster.chat(0).hops[0].agent == A  # of equals the first
    fresh = Cluster(vision(A), language(A, B))
    now = busy_with_photographs(fresh)
    assert fresh.chat(now).hops[0].agent == B


def test_tokens_are_promised_at_the_pace_beside_photographs() -> None:
    idle, busy = (Cluster(vision(A), language(A)) for _ in range(2))
    now = busy_with_photographs(busy)
    alone = idle.chat(now).predicted_per_token_ns
    shared = busy.chat(now).predicted_per_token_ns
    assert alone == STEP_NS
    assert 1.8 * STEP_NS < shared < 2.2 * STEP_NS  # batches have half of the time, steps the rest


def test_an_objective_that_photographs_leave_no_time_for_sends_a_chat_elsewhere() -> None:
    objectives = TokenObjectives(0, 8 * MS)
    cluster = Cluster(vision(A), language(A, B), policy="slo")
    now = busy_with_photographs(cluster)
    chosen = [cluster.chat(now + at * 100 * MS, objectives).hops[0].agent for at in range(2)]
    assert chosen[0] == B


def test_a_chat_that_goes_on_keeps_its_share() -> None:
    cluster = Cluster(vision(A), language(A))
    start = cluster.chat(0)
    progress = SessionProgress(start.request, 20, 10 * MS, 400 * MS)
    cluster.tell(500 * MS, SessionsProgressed((progress,)))
    batch = cluster.photograph(600 * MS)
    assert isinstance(batch, DispatchBatch)
    assert batch.path[0].steps_ns == STEP_NS
