"""Policy "slo" at the dispatcher: who waits, who is forced, who is refused, what is promised."""

from __future__ import annotations

import math

import pytest

from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.events import (
    AdoptedSession,
    AgentJoined,
    AgentLost,
    Command,
    LatencyRefitted,
    PlanActivated,
    Reject,
    RequestCompleted,
    SessionFailed,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsHeld,
    SessionsProgressed,
    StartSession,
    Tick,
)
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
    SessionId,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import (
    Agent,
    CacheCapacity,
    Chain,
    ChainHop,
    ChainRole,
    ModelPlan,
    Plan,
)

MS = 1_000_000
MODEL = ModelKey("m", "1")
PART = PartitionKey(MODEL, 0, 1)
LINES = LatencyLines(0.124e6, 13.9e6, 451.0, 0.0756e6, 22.5e6, 23.1e6)
SLOS = TokenObjectives(600 * MS, 30 * MS)
FAR = 1 << 60


class Cluster:
    """A dispatcher with workers, driven by hand."""

    def __init__(
        self,
        workers: int,
        *,
        slots: int = 8,
        objectives: TokenObjectives | None = SLOS,
        roles: tuple[ChainRole, ...] = (),
        lines: LatencyLines | None = LINES,
        cache: float = 0.0,
        may_pack: bool = False,
    ) -> None:
        self.dispatcher = ChainedDispatcher(ChainedConfig(checked=True), policy="slo")
        self.now = 0
        self.count = 0
        self.rejected: dict[RequestId, Reject] = {}
        self.started: dict[RequestId, StartSession] = {}
        chains, caches = [], []
        for number in range(workers):
            agent = AgentId(f"a{number}")
            role = roles[number] if roles else "mixed"
            self.tell(AgentJoined(Agent(agent, "x", ServerId("s"), 1, 1)))
            hops = (ChainHop(agent, PART, 0, 1),)
            chains.append(Chain(f"c{number}", hops, slots, 10**9 + number, role, lines, cache))
            caches.append(CacheCapacity(agent, PART, slots))
        served = ModelPlan(
            MODEL,
            FAR,
            (),
            chains=tuple(chains),
            caches=tuple(caches),
            objectives=objectives,
            packing="pack" if may_pack else "off",
        )
        self.tell(PlanActivated(Plan(PlanId("p"), (served,))))

    def tell(self, event: object) -> list[Command]:
        commands = self.dispatcher.handle(event, self.now)  # type: ignore[arg-type]
        for command in commands:
            if isinstance(command, StartSession):
                self.started[command.request] = command
            elif isinstance(command, Reject):
                self.rejected[command.request] = command
        return commands

    def ask(
        self, prompt: int = 100, objectives: TokenObjectives | None = None, priority: int = 0
    ) -> RequestId:
        self.count += 1
        request = RequestId(GatewayId("g"), self.count)
        self.tell(
            SessionRequested(
                request,
                MODEL,
                prompt,
                1000,
                FAR,
                priority,
                arrived_ns=self.now,
                objectives=objectives,
            )
        )
        return request

    def report(self, request: RequestId, tokens: int, decode_ns: float) -> None:
        """Its first token came when the rest says so, now is the moment of the latest."""
        first = self.now - round(decode_ns)
        progress = SessionProgress(request, tokens, max(1, first), round(decode_ns))
        self.tell(SessionsProgressed((progress,)))

    def agent(self, request: RequestId) -> AgentId:
        return self.started[request].hops[0].agent

    def wait(self, until: int) -> None:
        """Lets time go by, waking the dispatcher as it asks."""
        while (moment := self.dispatcher.next_wakeup()) is not None and moment <= until:
            assert moment > self.now or not self.dispatcher.queued(MODEL)
            self.now = max(moment, self.now)
            self.tell(Tick())
        self.now = until


def busy(workers: int, tokens: int = 3) -> tuple[Cluster, list[RequestId]]:
    """A cluster in which every worker has a session with hardly anything saved."""
    cluster = Cluster(workers)
    first = [cluster.ask() for _ in range(workers)]
    assert len({cluster.agent(each) for each in first}) == workers
    cluster.now = 200 * MS
    for each in first:
        cluster.report(each, tokens, (tokens - 1) * 29.9 * MS)
    return cluster, first


def test_an_idle_cluster_takes_requests_at_once_and_spreads_them() -> None:
    cluster = Cluster(3)
    agents = [cluster.agent(cluster.ask()) for _ in range(3)]
    assert sorted(agents) == ["a0", "a1", "a2"]
    assert cluster.dispatcher.statistics()["forced_placements"] == 0


def test_a_request_waits_for_what_others_have_saved_and_is_taken_once_that_is_enough() -> None:
    cluster, first = busy(1)
    late = cluster.ask()
    assert late not in cluster.started
    cluster.now += 50 * MS
    cluster.report(first[0], 100, 99 * 25.0 * MS)
    assert cluster.agent(late) == "a0"
    assert cluster.dispatcher.statistics()["forced_placements"] == 0


def test_who_cannot_be_placed_well_is_placed_in_time_for_its_first_token_and_counted() -> None:
    cluster, _ = busy(2)
    asked = cluster.now
    request = cluster.ask(prompt=1000)
    cluster.wait(asked + 300 * MS)
    assert request not in cluster.started
    cluster.wait(asked + 560 * MS)
    assert request in cluster.started
    started = cluster.started[request]
    assert 0 < started.predicted_first_token_ns <= 600 * MS
    assert cluster.dispatcher.statistics()["forced_placements"] == 1


def test_a_long_prompt_that_fits_nowhere_does_not_hold_up_short_ones() -> None:
    cluster, first = busy(1)
    cluster.now += 50 * MS
    cluster.report(first[0], 30, 29 * 27.0 * MS)  # 87 ms saved
    long, short = cluster.ask(prompt=2500), cluster.ask(prompt=20)
    assert long not in cluster.started
    assert short in cluster.started


def test_short_ones_never_starve_a_long_prompt() -> None:
    cluster, first = busy(1)
    asked = cluster.now
    long = cluster.ask(prompt=2500)
    tokens = 30
    while long not in cluster.started and cluster.now < asked + 600 * MS:
        cluster.ask(prompt=5)
        cluster.wait(cluster.now + 20 * MS)
        tokens += 1
        cluster.report(first[0], tokens, (tokens - 1) * 28.0 * MS)
    assert cluster.now - asked <= (600 - 0.124 * 2500) * MS


def test_priority_goes_first_when_a_place_opens() -> None:
    cluster, first = busy(1)
    plain, urgent = cluster.ask(), cluster.ask(priority=1)
    cluster.now += 50 * MS
    cluster.report(first[0], 20, 19 * 28.5 * MS)  # enough for one prompt, not for two
    assert urgent in cluster.started
    assert plain not in cluster.started


def test_slots_of_the_book_are_the_hard_limit() -> None:
    cluster = Cluster(1, slots=1)
    cluster.ask()
    second = cluster.ask()
    cluster.wait(5000 * MS)
    assert second not in cluster.started
    session = cluster.started[RequestId(GatewayId("g"), 1)]
    cluster.tell(RequestCompleted(session.request, SessionProgress(session.request, 9, 1, 1)))
    cluster.tell(SessionsClosed(AgentId("a0"), (session.session,)))
    assert second in cluster.started


@pytest.mark.parametrize(
    ("prompt", "objectives", "constraint"),
    [
        (5000, TokenObjectives(600 * MS, 30 * MS), "c"),
        (10, TokenObjectives(600 * MS, 20 * MS), "b"),
    ],
)
def test_what_no_empty_worker_can_keep_is_refused_with_the_figures(
    prompt: int, objectives: TokenObjectives, constraint: str
) -> None:
    cluster = Cluster(2)
    request = cluster.ask(prompt, objectives)
    refused = cluster.rejected[request]
    assert refused.reason == "SLO_UNATTAINABLE"
    assert refused.details["constraint"] == constraint
    assert float(refused.details["needed"]) > float(refused.details["allowed"])
    assert cluster.dispatcher.statistics()["inadmissible_requests"] == 1


def test_what_no_cache_can_hold_is_refused_whoever_named_the_objectives() -> None:
    cluster = Cluster(1, cache=500.0)
    assert cluster.rejected[cluster.ask(prompt=600)].details["constraint"] == "e"


def test_objectives_of_the_model_that_cannot_be_kept_refuse_nobody() -> None:
    cluster = Cluster(1)
    request = cluster.ask(prompt=5000)
    assert request in cluster.started
    assert cluster.dispatcher.statistics()["inadmissible_requests"] == 1


def test_without_objectives_the_fastest_free_chain_is_taken_and_its_load_counts() -> None:
    cluster = Cluster(2, slots=2, objectives=None)
    assert [cluster.agent(cluster.ask()) for _ in range(4)] == ["a0", "a0", "a1", "a1"]
    assert cluster.started[RequestId(GatewayId("g"), 1)].objectives is None
    other = Cluster(2, objectives=None)
    other.ask()
    assert other.agent(other.ask(objectives=SLOS)) == "a1"


def test_workers_nothing_is_known_of_are_filled_evenly() -> None:
    cluster = Cluster(2, lines=None)
    assert sorted(cluster.agent(cluster.ask()) for _ in range(4)) == ["a0", "a0", "a1", "a1"]
    assert cluster.started[RequestId(GatewayId("g"), 1)].predicted_per_token_ns == 0


def test_lines_fitted_anew_are_believed_at_once() -> None:
    cluster = Cluster(2)
    slow = LatencyLines(1e6, 100e6, 451.0, 0.1e6, 29e6, 29e6)
    hops = (ChainHop(AgentId("a0"), PART, 0, 1),)
    cluster.tell(LatencyRefitted(MODEL, ((hops, slow),)))
    assert cluster.agent(cluster.ask()) == "a1"
    assert cluster.started[RequestId(GatewayId("g"), 1)].predicted_per_token_ns < 24 * MS


def test_a_restarted_session_runs_its_answer_again_and_goes_first() -> None:
    cluster, first = busy(2)
    waits = cluster.ask()
    cluster.now += 50 * MS
    cluster.report(first[0], 200, 199 * 29.9 * MS)
    lost = cluster.started[first[0]]
    cluster.tell(
        SessionFailed(lost.session, lost.hops[0].agent, "PARTITION_LOST", "gone", retryable=True)
    )
    assert cluster.started[first[0]].session != lost.session
    assert waits not in cluster.started
    assert cluster.dispatcher.statistics()["rerun_tokens"] == 200


def test_pairs_take_the_prompt_and_the_rest_on_different_workers() -> None:
    roles: tuple[ChainRole, ...] = ("prefill", "decode", "decode")
    cluster = Cluster(3, roles=roles)
    requests = [cluster.ask(), cluster.ask()]
    assert [cluster.started[each].hops[0].agent for each in requests] == ["a0", "a0"]
    ends = [cluster.started[each].decode_hops[0].agent for each in requests]
    assert sorted(ends) == ["a1", "a2"]
    cluster.now += 200 * MS
    placer = cluster.dispatcher._table.model_queue(MODEL).placer
    assert placer is not None
    cluster.report(requests[0], 5, 4 * 25.0 * MS)
    assert [len(worker.running_sequences) for worker in placer.workers.open] == [1]


def test_a_successor_counts_adopted_sessions_and_what_they_have_done() -> None:
    cluster = Cluster(2)
    cluster.tell(AgentLost(AgentId("a0")))
    held = AdoptedSession(SessionId(0), (ChainHop(AgentId("a1"), PART, 0, 1),))
    cluster.tell(SessionsHeld(AgentId("a1"), (held,)))
    request = RequestId(GatewayId("g"), 99)
    cluster.now = 5000 * MS
    cluster.tell(
        SessionRequested(
            request,
            MODEL,
            100,
            1000,
            FAR,
            in_flight=held,
            arrived_ns=0,
            progress=SessionProgress(request, 50, 100 * MS, 49 * 25 * MS),
        )
    )
    placer = cluster.dispatcher._table.model_queue(MODEL).placer
    assert placer is not None
    running = placer.loads._running[request][1]
    assert (running.generated_tokens, running.carried_tokens, running.is_new) == (50, 0, False)


def test_nothing_is_left_of_sessions_that_ended() -> None:
    cluster = Cluster(2)
    for _ in range(6):
        request = cluster.ask()
        if request not in cluster.started:
            cluster.wait(cluster.now + 600 * MS)
        started = cluster.started[request]
        cluster.tell(RequestCompleted(request, SessionProgress(request, 1, 50 * MS, 0)))
        cluster.tell(SessionsClosed(started.hops[0].agent, (started.session,)))
    placer = cluster.dispatcher._table.model_queue(MODEL).placer
    assert placer is not None
    assert not placer.loads._running
    assert not placer.loads._prompts
    for worker in placer.workers.open:
        assert (len(worker.running_sequences), worker.context_tokens, worker.final_tokens) == (
            0,
            0.0,
            0.0,
        )
        worker.look(cluster.now)
        assert worker.least_saved_ns == math.inf
    figures = cluster.dispatcher.statistics()
    assert figures["attainment_millionths"] == 1_000_000
    assert figures["attainment_samples"] == 6


@pytest.mark.parametrize("may_pack", [True, False])
def test_sessions_are_packed_only_if_allowed_and_attainment_is_safe(may_pack: bool) -> None:
    cluster = Cluster(3, may_pack=may_pack)
    placer = cluster.dispatcher._table.model_queue(MODEL).placer
    assert placer is not None
    first = cluster.ask()
    cluster.now += 100 * MS
    cluster.report(first, 100, 99 * 23.1 * MS)
    before = cluster.ask()
    assert cluster.agent(before) != cluster.agent(first)  # nothing is known of attainment yet
    for _ in range(300):
        placer.adaptation.ended(attained=True, forced=False)
    after = cluster.ask()
    assert (cluster.agent(after) == cluster.agent(first)) is may_pack
    assert cluster.dispatcher.statistics()["packing_models"] == may_pack
