"""Windows by themselves: where batches run, held against a plain twin, and what a gateway does with them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from catenary_services.domain.ids import AgentId, BatchId, ModelKey, PartitionKey
from catenary_services.domain.windows.window import LATE_NS, SLOW_NS, DispatchWindow, WindowHop
from catenary_services.domain.windows.window_queue import WindowQueue, WindowRows, WindowUse

MS = 1_000_000
MODEL = ModelKey("m", "1")
FAR = 10_000 * MS


def hop(
    at: int, *compute_ms: float, transfer_ms: float = 0, start_ms: float = 0, end_ms: float = 100
) -> WindowHop:
    compute = tuple(int(ms * MS) for ms in compute_ms)
    transfer = tuple(int(transfer_ms * MS * rows) for rows in range(1, len(compute) + 1))
    return WindowHop(
        AgentId(f"a{at}"),
        PartitionKey(MODEL, at, at + 1),
        compute,
        transfer if transfer_ms else (),
        int(start_ms * MS),
        int(end_ms * MS),
    )


def window(*hops: WindowHop, batches: int = 50, most_wait_ms: float = 1000) -> DispatchWindow:
    most_wait_ns = int(most_wait_ms * MS)
    return DispatchWindow(BatchId(1), MODEL, hops, (BatchId(10), batches), most_wait_ns)


ONE_HOP = hop(0, 4, 6, 8, 10)


class Bench:
    """A queue with one window, and what it said."""

    def __init__(self, *hops: WindowHop, **terms: int) -> None:
        self.queue = WindowQueue()
        self.window = window(*(hops or (ONE_HOP,)), **terms)
        self.queue.granted(self.window, 0)
        self.number = 0
        self.sent: list[tuple[float, BatchId, int]] = []
        self.submitted: list[int] = []
        self.reports: list[WindowUse] = []

    def look(self, ms: float) -> None:
        actions = self.queue.look(int(ms * MS))
        for order in actions.orders:
            assert sum(each.rows for each in order.requests) == order.batch.rows
            self.sent.append((ms, order.batch.batch, order.batch.rows))
        self.submitted += actions.submissions
        self.reports += actions.reports

    def ask(self, ms: float, rows: int = 1, deadline_ns: int = FAR) -> bool:
        self.number += 1
        taken = self.queue.offer(MODEL, WindowRows(self.number, rows, deadline_ns), int(ms * MS))
        self.look(ms)
        return taken

    def answered(self, ms: float, batch: int) -> None:
        self.queue.answered(BatchId(batch), int(ms * MS))
        self.look(ms)


def test_rows_leave_at_once_while_the_path_is_idle_and_together_while_it_works() -> None:
    bench = Bench()
    assert bench.ask(10)
    assert bench.ask(10.5)
    assert bench.ask(11)
    assert bench.sent == [(10, 10, 1)]
    wakeup = bench.queue.next_wakeup()
    assert wakeup == 13 * MS  # the device is free at 14, and a batch leaves a little before
    bench.look(13)
    assert bench.sent[1:] == [(13, 11, 2)]


def test_an_answer_before_its_time_lets_the_next_batch_go() -> None:
    bench = Bench()
    bench.ask(10)
    bench.ask(11)
    bench.answered(12, 10)
    assert bench.sent == [(10, 10, 1), (12, 11, 1)]


def test_rows_keep_each_other_company_while_a_batch_of_a_fast_model_is_under_way() -> None:
    bench = Bench(hop(0, 0.2, 0.3, 0.4))
    bench.ask(10)
    bench.ask(10.5)
    bench.ask(11)
    assert bench.sent == [(10, 10, 1)]
    assert bench.queue.next_wakeup() == 12 * MS
    bench.look(12)
    assert bench.sent[1:] == [(12, 11, 2)]
    bench.answered(12.1, 11)
    bench.ask(12.2)
    assert bench.sent[2:] == [(12.2, 12, 1)]


def test_a_full_batch_leaves_even_if_the_path_works() -> None:
    bench = Bench()
    for _ in range(6):
        bench.ask(10)
    assert bench.sent == [(10, 10, 1), (10, 11, 4)]


def test_what_the_window_has_no_place_for_is_the_schedulers() -> None:
    bench = Bench()
    assert not bench.ask(10, rows=5)
    assert not bench.ask(97)
    assert not bench.ask(10, deadline_ns=14 * MS)
    bench = Bench(most_wait_ms=3)
    assert bench.ask(10)
    assert not bench.ask(10)
    assert bench.ask(11)


def test_rows_that_wait_when_a_window_ends_are_the_schedulers() -> None:
    bench = Bench(hop(0, 4, 60, end_ms=70))
    bench.ask(1)
    bench.ask(2)
    bench.queue.revoked(BatchId(1), False, 3 * MS)
    bench.look(3)
    assert bench.submitted == [2]
    (report,) = bench.reports
    assert (report.first_batch, report.rows, report.renew) == (10, (1,), False)
    assert report.busy_ns == (2 * MS,)
    assert not bench.ask(4)


def test_more_time_is_asked_for_once_if_the_window_is_used() -> None:
    bench = Bench()
    bench.ask(10)
    bench.answered(12, 10)
    bench.look(80)
    assert bench.reports == []
    bench.ask(81)
    bench.look(82)
    (report,) = bench.reports
    assert (report.number, report.renew, report.rows, report.requests) == (1, True, (1, 1), 2)
    assert bench.queue.asked_ns(BatchId(1), 1) == 81 * MS
    assert bench.queue.asked_ns(BatchId(1), 2) is None
    bench.queue.extended(BatchId(1), 1, (200 * MS,), 83 * MS)
    bench.queue.extended(BatchId(1), 1, (900 * MS,), 83 * MS)  # the answer comes twice
    bench.answered(90, 11)
    assert bench.ask(150)
    assert not bench.ask(199)
    bench.look(200)
    assert [(each.number, each.renew) for each in bench.reports] == [(1, True), (2, False)]


def test_a_path_that_is_slow_gets_nothing_more_and_what_is_late_is_handed_over() -> None:
    bench = Bench(hop(0, 4, 6, end_ms=500))
    bench.ask(10)
    slow_ms = 14 + SLOW_NS / MS
    assert not bench.ask(slow_ms + 0.1)
    assert bench.submitted == []
    assert bench.queue.next_wakeup() == 14 * MS + LATE_NS
    bench.look(14 + LATE_NS / MS)
    assert bench.submitted == [1]
    assert [each.renew for each in bench.reports] == [False]
    bench.answered(90, 10)  # after all; nobody minds
    assert bench.queue.is_idle


def test_a_batch_that_fails_ends_the_window() -> None:
    bench = Bench()
    bench.ask(10)
    bench.ask(10)
    bench.queue.failed(BatchId(10), 11 * MS)
    bench.look(11)
    assert bench.submitted == [1, 2]
    assert not bench.ask(12)


def test_a_window_that_is_lost_gives_back_what_has_no_answer() -> None:
    bench = Bench()
    bench.ask(10)
    bench.answered(14, 10)
    bench.ask(15)
    bench.queue.revoked(BatchId(1), True, 16 * MS)
    bench.look(16)
    assert bench.submitted == [2]


def test_a_window_without_ids_is_over() -> None:
    bench = Bench(batches=1)
    assert bench.ask(10)
    bench.answered(14, 10)
    assert not bench.ask(20)
    assert bench.queue.next_wakeup() == 100 * MS


def test_a_new_scheduler_is_told_of_everything() -> None:
    bench = Bench()
    bench.ask(10)
    bench.ask(10)
    assert sorted(bench.queue.clear()) == [1, 2]
    assert bench.queue.is_idle


class Twin:
    """A window in the plainest way: every use of every resource so far, and the first time after."""

    def __init__(self, hops: list[WindowHop]) -> None:
        self.hops = hops
        self.computed = [each.start_ns for each in hops]
        self.moved = [each.start_ns for each in hops]

    def place(self, rows: int, now: int) -> tuple[int, ...] | None:
        starts, moment = [], now
        for at, each in enumerate(self.hops):
            if each.transfer_ns:
                moment = max(moment, self.moved[at]) + each.transfer_ns[rows - 1]
                if max(moment, self.computed[at]) > each.end_ns - each.compute_ns[-1]:
                    return None
            start = max(moment, self.computed[at])
            if start + each.compute_ns[rows - 1] > each.end_ns:
                return None
            starts.append(start)
            moment = start + each.compute_ns[rows - 1]
        for at, each in enumerate(self.hops):
            self.moved[at] = starts[at]
            self.computed[at] = starts[at] + each.compute_ns[rows - 1]
        return tuple(starts)


paths = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(0, 20)), min_size=1, max_size=3
)


@given(
    path=paths,
    batches=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12)), max_size=12),
)
def test_batches_run_where_a_plain_twin_says(
    path: list[tuple[int, int, int]], batches: list[tuple[int, int]]
) -> None:
    hops = [
        hop(
            at,
            compute,
            compute + 1,
            compute + 2,
            transfer_ms=transfer if at else 0,
            start_ms=start,
            end_ms=60 + 20 * at,
        )
        for at, (compute, transfer, start) in enumerate(path)
    ]
    real, twin, now = window(*hops), Twin(hops), 0
    uses: list[list[tuple[int, int]]] = [[] for _ in hops]
    for rows, pause in batches:
        now += pause * MS // 16  # soon enough that no batch counts as slow
        placed = real.place(rows, now)
        assert (placed.starts_ns if placed else None) == twin.place(rows, now)
        if placed is None:
            continue
        real.send(placed, now)
        for at, start in enumerate(placed.starts_ns):
            uses[at].append((start, start + hops[at].compute_ns[rows - 1]))
    for each, spans in zip(hops, uses, strict=True):
        assert all(each.start_ns <= start and end <= each.end_ns for start, end in spans)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


@given(answers=st.lists(st.integers(0, 3), max_size=6), pause=st.integers(0, 5))
def test_answers_never_make_a_hop_free_before_what_is_left_needs_it(
    answers: list[int], pause: int
) -> None:
    real, now, open_batches = window(ONE_HOP), 0, 0
    for early in answers:
        placed = real.place(2, now)
        if placed is None:
            break
        real.send(placed, now)
        open_batches += 1
        now += pause * MS
        if early and open_batches:
            real.answered(placed.batch, now)
            open_batches = 0
            assert real.busy_ns(now) == (0,)
        else:
            following = real.place(1, now)
            assert following is None or following.starts_ns[0] >= placed.starts_ns[0] + 6 * MS
