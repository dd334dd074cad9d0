"""When the dispatcher grants, extends and revokes dispatch windows, with a clock that steps."""

from __future__ import annotations

import itertools

import pytest

from catenary_scheduler.book import Book
from catenary_scheduler.dispatch import PooledConfig, PooledDispatcher
from catenary_scheduler.dispatch.events import (
    AdoptedRows,
    AgentLost,
    BatchFailed,
    Command,
    DispatchBatch,
    ExtendWindow,
    GrantWindow,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCompleted,
    RevokeWindow,
    StageReported,
    Tick,
    WindowOver,
    WindowReported,
)
from catenary_scheduler.dispatch.pooled.windows import GrantedWindow, WindowState
from catenary_services.domain.ids import BatchId, GatewayId, ModelKey, RequestId
from catenary_services.domain.plan import ModelPlan
from catenary_services.errors import InternalError
from scheduling_cases.pipelines import CATS, DOGS, MS, joins, pipeline, plan, served, stage

CONFIG = PooledConfig(longest_window_ns=10 * MS)
LONE = served(pipeline(2, stage(0, "a", 1, 1.5)), slo_ms=1000)
TWO_HOPS = served(pipeline(2, stage(0, "a", 1, 1.5), stage(1, "b", 1, 1.5, row_bytes=10**6)))
RIVAL = served(pipeline(2, stage(0, "a", 1, 1.5, model=DOGS)), slo_ms=1000)


class Bench:
    """A dispatcher, a clock and a gateway that asks for one request after the other."""

    def __init__(self, *models: ModelPlan, agents: str = "ab", config: PooledConfig = CONFIG):
        self.book = Book()
        self.dispatcher = PooledDispatcher(config, book=self.book)
        self.number = 0
        self.now = 0.0
        self.said: list[Command] = []
        for agent in agents:
            self.tell(0, joins(agent))
        self.tell(0, PlanActivated(plan(*models)))

    def tell(self, ms: float, event: object) -> list[Command]:
        self.now = ms
        commands = self.dispatcher.handle(event, int(ms * MS))  # type: ignore[arg-type]
        self.said += commands
        return commands

    def ask(
        self,
        ms: float,
        which: ModelKey = CATS,
        *,
        gateway: str = "g",
        slo_ms: float = 1000,
        priority: int = 0,
        takes_windows: bool = True,
    ) -> list[Command]:
        self.number += 1
        request = RequestId(GatewayId(gateway), self.number)
        deadline = int((ms + slo_ms) * MS)
        arrived = RequestArrived(request, which, 1, deadline, priority, takes_windows=takes_windows)
        return self.tell(ms, arrived)

    def one_at_a_time(
        self, requests: int, which: ModelKey = CATS, **more: object
    ) -> GrantWindow | None:
        """Serves requests one after the other; returns the last window that was granted."""
        for _ in range(requests):
            self.ask(self.now + 1, which, **more)  # type: ignore[arg-type]
            self.pass_time(8)
            for each in [each for each in self.said if isinstance(each, DispatchBatch)]:
                for at, hop in enumerate(each.path):
                    end = hop.start_ns + hop.duration_ns
                    self.tell(self.now, StageReported(each.batch, at, hop.start_ns, end))
                for piece in each.slices:
                    self.tell(self.now, RequestCompleted(piece.request))
        grants = [each for each in self.said if isinstance(each, GrantWindow)]
        return grants[-1] if grants else None

    def pass_time(self, ms: float) -> None:
        end = int((self.now + ms) * MS)
        while (moment := self.dispatcher.next_wakeup()) is not None and moment <= end:
            self.tell(max(self.now, moment / MS), Tick())
        self.now = end / MS

    def report(self, window: GrantWindow, number: int, *rows: int, **more: object) -> list[Command]:
        said = {"requests": len(rows), "renew": False, **more}
        return self.tell(
            self.now,
            WindowReported(
                window.gateway,
                window.model,
                window.window,
                number,
                BatchId(window.first_batch),
                rows,
                said["requests"],  # type: ignore[arg-type]
                bool(said["renew"]),
                tuple(more.get("busy_ns", ())),  # type: ignore[arg-type]
            ),
        )

    def booked(self, resource: str = "gpu/a") -> list[tuple[float, float]]:
        records = [each for each in self.dispatcher.snapshot() if each.resource == resource]
        return [(each.start_ns / MS, each.end_ns / MS) for each in records if not each.done]

    @property
    def figures(self) -> dict[str, int]:
        return self.dispatcher.statistics()


def granted(bench: Bench, which: ModelKey = CATS) -> GrantWindow:
    window = bench.one_at_a_time(3, which)
    assert window is not None
    return window


def kinds(commands: list[Command]) -> list[type[Command]]:
    return [type(each) for each in commands]


def test_a_gateway_that_asks_again_and_again_is_granted_its_path() -> None:
    bench = Bench(LONE)
    assert bench.one_at_a_time(2) is None
    window = bench.one_at_a_time(1)
    assert window is not None
    (hop,) = window.hops
    assert hop.compute_ns == (MS, 3 * MS // 2)
    assert (hop.end_ns - bench.now * MS) / MS == pytest.approx(10 - 8 + 2, abs=2)
    assert bench.booked() == [(hop.start_ns / MS, hop.end_ns / MS)]


def test_a_window_is_reserved_on_every_device_and_link_of_its_path() -> None:
    bench = Bench(TWO_HOPS, config=PooledConfig(longest_window_ns=10 * MS, window_share=1))
    window = bench.one_at_a_time(3)
    assert window is not None
    first, second = window.hops
    assert second.transfer_ns == (MS, 2 * MS)
    assert bench.booked("gpu/a") == [(first.start_ns / MS, first.end_ns / MS)]
    assert bench.booked("gpu/b") == [(second.start_ns / MS, second.end_ns / MS)]
    links = [(second.start_ns / MS, second.end_ns / MS - 1.5)]
    assert bench.booked("uplink/a") == bench.booked("downlink/b") == links


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (PooledConfig(longest_window_ns=0), {}),
        (PooledConfig(max_linger_ns=None), {"slo_ms": 5}),
        (CONFIG, {"takes_windows": False}),
        (CONFIG, {"priority": 1}),
        (CONFIG, {"slo_ms": 15}),
    ],
)
def test_what_windows_are_not_for(config: PooledConfig, more: dict[str, object]) -> None:
    bench = Bench(LONE, config=config)
    assert bench.one_at_a_time(5, **more) is None


def test_a_path_that_crosses_itself_is_not_granted() -> None:
    there_and_back = served(
        pipeline(
            2,
            stage(0, "a", 1, 1.5),
            stage(1, "b", 1, 1.5, row_bytes=1000),
            stage(2, "a", 1, 1.5, row_bytes=1000),
        ),
        slo_ms=1000,
    )
    bench = Bench(there_and_back)
    bench.one_at_a_time(6)
    assert bench.figures["dispatched_batches"] == 6
    assert bench.figures["granted_windows"] == 0
    assert bench.dispatcher.snapshot() == []


def test_two_gateways_or_models_that_want_a_path_get_no_window_there() -> None:
    bench = Bench(LONE)
    for at in range(6):
        bench.one_at_a_time(1, gateway=f"g{at % 2}")
    bench = Bench(LONE, RIVAL)
    for at in range(6):
        bench.one_at_a_time(1, (CATS, DOGS)[at % 2])
    assert bench.figures["granted_windows"] == 0


def test_a_window_is_extended_while_it_is_used() -> None:
    bench = Bench(LONE)
    window = granted(bench)
    (extended,) = bench.report(window, 1, 1, 1, renew=True)
    assert isinstance(extended, ExtendWindow)
    assert extended.number == 1
    (end,) = extended.ends_ns
    assert end > window.hops[0].end_ns
    assert bench.booked()[-1][1] == end / MS
    assert bench.report(window, 1, 1, 1, renew=True) == []  # said twice
    assert bench.report(window, 2, renew=True) == []  # used by nothing since


def test_a_window_is_not_extended_into_time_that_is_booked_or_wanted() -> None:
    bench = Bench(LONE)
    window = granted(bench)
    bench.ask(bench.now)  # of the same gateway: waits for the path
    assert bench.report(window, 1, 1, 1, renew=True) == []
    bench = Bench(LONE)
    window = granted(bench)
    end = window.hops[0].end_ns
    bench.book.hold(BatchId(99_999), 0, (bench.book.timeline("gpu/a"),), end + 1, end + 2)
    assert bench.report(window, 1, 1, 1, renew=True) == []
    assert bench.booked()[0] == (window.hops[0].start_ns / MS, end / MS)


def test_what_is_left_of_a_window_is_free_once_its_gateway_says_so() -> None:
    bench = Bench(LONE)
    window = granted(bench)
    assert kinds(bench.report(window, 1, 1)) == [WindowOver]
    assert bench.booked() == []
    bench = Bench(LONE)
    window = granted(bench)
    bench.report(window, 1, 1, busy_ns=(MS // 2,))
    assert bench.booked()[-1][1] == bench.now + 0.5
    bench.pass_time(1)
    assert bench.booked() == []
    assert bench.said[-1] == WindowOver(window.window)


def test_a_window_ends_by_itself_and_each_that_was_not_used_is_followed_by_a_longer_pause() -> None:
    bench = Bench(LONE)
    window = granted(bench)
    bench.pass_time(20)
    assert bench.booked() == []
    assert WindowOver(window.window) in bench.said
    assert (bench.figures["expired_windows"], bench.figures["unused_windows"]) == (1, 1)
    grants_ms = list[float]()
    for _ in range(40):
        before = bench.figures["granted_windows"]
        bench.one_at_a_time(1)
        if bench.figures["granted_windows"] > before:
            grants_ms.append(bench.now)
    gaps_ms = [b - a for a, b in itertools.pairwise(grants_ms)]
    assert 2 * 20 - 9 <= gaps_ms[0] <= 2 * 20 + 9  # a window, and a pause as long
    assert len(gaps_ms) >= 3
    assert gaps_ms == sorted(gaps_ms)
    assert gaps_ms[-1] > 2 * gaps_ms[0]


def test_the_time_of_a_revoked_window_stays_taken_until_its_gateway_has_heard() -> None:
    bench = Bench(LONE, RIVAL)
    window = granted(bench)
    commands = bench.ask(bench.now, DOGS)
    assert RevokeWindow(window.window, window.gateway, False) in commands
    end = window.hops[0].end_ns / MS
    assert bench.booked()[-1][1] == end
    bench.pass_time(0.5)
    commands = bench.report(window, 1, 1)
    assert WindowOver(window.window) in commands
    bench.pass_time(3)
    *_, sent = [each for each in bench.said if isinstance(each, DispatchBatch)]
    assert sent.path[0].partition.model == DOGS
    assert sent.path[0].start_ns < end * MS  # not behind the window


def test_no_request_is_turned_away_because_of_a_window() -> None:
    bench = Bench(LONE, RIVAL, config=PooledConfig(longest_window_ns=40 * MS))
    window = granted(bench)
    bench.ask(bench.now, DOGS, slo_ms=6)
    assert not [each for each in bench.said if isinstance(each, Reject)]
    bench.pass_time(1)
    bench.report(window, 1, 1)
    bench.pass_time(2)
    assert isinstance(bench.said[-1], DispatchBatch)


def test_its_own_gateways_requests_leave_a_window_alone_unless_they_are_urgent() -> None:
    bench = Bench(LONE)
    granted(bench)
    assert RevokeWindow not in kinds(bench.ask(bench.now))
    assert RevokeWindow in kinds(bench.ask(bench.now, priority=1))


@pytest.mark.parametrize("lost", [True, False])
def test_windows_end_with_what_they_were_granted_by(lost: bool) -> None:
    bench = Bench(LONE)
    window = granted(bench)
    event = AgentLost(joins("a").agent.agent_id) if lost else PlanActivated(plan(LONE, RIVAL))
    commands = bench.tell(bench.now, event)
    assert RevokeWindow(window.window, window.gateway, lost) in commands
    assert (bench.booked() == []) == lost


def test_a_batch_that_takes_longer_than_the_window_moves_what_is_behind_it() -> None:
    bench = Bench(LONE)
    window = granted(bench)
    bench.ask(bench.now)
    bench.pass_time(3)
    *_, behind = [each for each in bench.said if isinstance(each, DispatchBatch)]
    end = window.hops[0].end_ns
    assert behind.path[0].start_ns >= end
    bench.now = end / MS + 3
    late = StageReported(window.first_batch, 0, end - MS, end + 2 * MS, rows=1)
    bench.dispatcher.handle(late, int(bench.now * MS))
    assert bench.booked()[-1][0] == end / MS + 2


def test_a_failure_ends_the_window_and_late_rows_are_watched() -> None:
    bench = Bench(LONE)
    window = granted(bench)
    failed = BatchFailed(window.first_batch, None, "INTERNAL", "no", True)
    assert kinds(bench.tell(bench.now, failed)) == [RevokeWindow]
    request = RequestId(GatewayId("g"), 1000)
    deadline = int((bench.now + 900) * MS)
    adopted = AdoptedRows(BatchId(window.first_batch + 1), 0, 1, int(bench.now * MS))
    bench.tell(bench.now, RequestArrived(request, CATS, 1, deadline, 0, (adopted,)))
    bench.tell(bench.now + 1, AgentLost(joins("a").agent.agent_id))
    assert adopted.batch not in bench.dispatcher.followed()
    bench.tell(bench.now, joins("a"))
    bench.pass_time(10)
    *_, again = [each for each in bench.said if isinstance(each, DispatchBatch)]
    assert again.slices[0].request == request


def test_failures_of_a_device_count_whoever_dispatched_the_batch() -> None:
    bench = Bench(LONE)
    window = granted(bench)
    agent = joins("a").agent.agent_id
    for at in range(3):
        failed = BatchFailed(BatchId(window.first_batch + at), agent, "DEVICE_FAILED", "no", True)
        bench.tell(bench.now, failed)
    assert bench.figures["opened_circuits"] == 1
    bench.one_at_a_time(6)
    assert bench.figures["granted_windows"] == 1


def test_a_window_takes_only_the_steps_of_its_table() -> None:
    bench = Bench(LONE)
    window = GrantedWindow(granted(bench), [], 10 * MS)
    window.become(WindowState.OVER)
    with pytest.raises(InternalError, match="over cannot be revoked"):
        window.become(WindowState.REVOKED)
