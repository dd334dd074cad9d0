"""What `correct` does, case by case."""

from __future__ import annotations

import pytest

from catenary_scheduler.book import Book, PathHop, PoolMember, Reservation
from catenary_services.domain.ids import AgentId, BatchId, ResourceId, ServerId
from catenary_services.domain.plan import Agent
from catenary_services.errors import InternalError


@pytest.fixture
def book() -> Book:
    return Book()


def member(book: Book, name: str) -> PoolMember:
    return book.member(Agent(AgentId(name), "x", ServerId(f"s-{name}"), 1, 10**9))


def reserve(book: Book, batch: int, *steps: PathHop, expires: int = 1000) -> None:
    book.reserve(BatchId(batch), steps, expires)


def intervals(book: Book, resource: str) -> list[tuple[int, int, int]]:
    return sorted(
        (r.start_ns, r.end_ns, r.batch) for r in book.snapshot() if r.resource == resource
    )


def test_a_late_end_pushes_the_queue_of_its_device_in_order(book: Book) -> None:
    a = member(book, "a")
    for batch, start in ((1, 0), (2, 10), (3, 20), (4, 40)):
        reserve(book, batch, PathHop(a, start, 0, start, 10))
    correction = book.correct(BatchId(1), 0, 0, 15)
    assert correction == (5, (2, 3))
    assert intervals(book, "gpu/a") == [(0, 15, 1), (15, 25, 2), (25, 35, 3), (40, 50, 4)]


def test_a_displaced_batch_moves_its_later_stages_and_whoever_they_displace(book: Book) -> None:
    a, b = member(book, "a"), member(book, "b")
    reserve(book, 1, PathHop(a, 0, 0, 0, 10))
    reserve(book, 2, PathHop(a, 10, 0, 10, 10), PathHop(b, 20, 5, 25, 10))
    reserve(book, 3, PathHop(b, 35, 0, 35, 10))
    book.correct(BatchId(1), 0, 0, 17)
    assert intervals(book, "gpu/a") == [(0, 17, 1), (17, 27, 2)]
    assert intervals(book, "uplink/s-a") == intervals(book, "downlink/s-b") == [(27, 32, 2)]
    assert intervals(book, "gpu/b") == [(32, 42, 2), (42, 52, 3)]


def test_slack_swallows_a_small_delay(book: Book) -> None:
    a, b = member(book, "a"), member(book, "b")
    reserve(book, 1, PathHop(a, 0, 0, 0, 10), PathHop(b, 20, 5, 25, 10))
    correction = book.correct(BatchId(1), 0, 0, 18)
    assert correction == (8, ())
    assert intervals(book, "gpu/b") == [(25, 35, 1)]


def test_an_early_end_frees_the_rest_and_moves_nothing(book: Book) -> None:
    a = member(book, "a")
    reserve(book, 1, PathHop(a, 0, 0, 0, 10))
    reserve(book, 2, PathHop(a, 10, 0, 10, 10))
    assert book.correct(BatchId(1), 0, 0, 4) == (-6, ())
    assert intervals(book, "gpu/a") == [(0, 4, 1), (10, 20, 2)]


def test_a_batch_that_overtook_another_pushes_it_behind(book: Book) -> None:
    a = member(book, "a")
    reserve(book, 1, PathHop(a, 0, 0, 0, 10))
    reserve(book, 2, PathHop(a, 10, 0, 10, 10))
    book.correct(BatchId(2), 0, 3, 12)
    assert intervals(book, "gpu/a") == [(3, 12, 2), (12, 22, 1)]


def test_known_uses_stay_when_another_report_overlaps_them(book: Book) -> None:
    a = member(book, "a")
    reserve(book, 1, PathHop(a, 0, 0, 0, 10))
    reserve(book, 2, PathHop(a, 10, 0, 10, 10))
    book.correct(BatchId(1), 0, 0, 12)
    book.correct(BatchId(2), 0, 11, 19)
    assert intervals(book, "gpu/a") == [(0, 12, 1), (12, 19, 2)]


def test_a_report_of_a_later_hop_closes_the_hops_before_it(book: Book) -> None:
    a, b = member(book, "a"), member(book, "b")
    reserve(book, 1, PathHop(a, 0, 0, 0, 10), PathHop(b, 10, 5, 15, 10))
    book.correct(BatchId(1), 1, 8, 20)
    assert intervals(book, "gpu/a") == [(0, 8, 1)]
    assert intervals(book, "uplink/s-a") == []
    assert all(record.done for record in book.snapshot())


def test_expiry_moves_with_the_last_use(book: Book) -> None:
    a = member(book, "a")
    reserve(book, 1, PathHop(a, 0, 0, 0, 10))
    reserve(book, 2, PathHop(a, 10, 0, 10, 10), expires=30)
    book.correct(BatchId(1), 0, 0, 25)
    assert book.expire(44) == []
    assert book.next_expiry() == 45
    assert book.expire(45) == [2]


def test_reserve_refuses_what_is_booked_and_leaves_no_trace(book: Book) -> None:
    a, b = member(book, "a"), member(book, "b")
    reserve(book, 1, PathHop(b, 0, 0, 18, 10))
    before = book.snapshot()
    with pytest.raises(InternalError):
        reserve(book, 2, PathHop(a, 0, 0, 0, 10), PathHop(b, 10, 5, 15, 10))
    assert book.snapshot() == before
    with pytest.raises(InternalError):
        reserve(book, 1, PathHop(a, 0, 0, 0, 10))


def test_restore_resolves_overlaps_of_a_torn_journal(book: Book) -> None:
    def booked(batch: int, start: int) -> Reservation:
        return Reservation(BatchId(batch), 0, ResourceId("gpu/a"), start, start + 10, 90)

    book.restore([booked(1, 0), booked(2, 5)])
    assert intervals(book, "gpu/a") == [(0, 10, 1), (10, 20, 2)]
    book.restore([booked(1, 50)])
    assert intervals(book, "gpu/a") == [(0, 10, 1), (10, 20, 2)]


def test_pruning_forgets_only_what_is_over_and_reported(book: Book) -> None:
    a = member(book, "a")
    reserve(book, 1, PathHop(a, 0, 0, 0, 10))
    reserve(book, 2, PathHop(a, 10, 0, 10, 10))
    book.correct(BatchId(1), 0, 0, 10)
    book.prune(50)
    assert intervals(book, "gpu/a") == [(10, 20, 2)]


def test_a_late_start_moves_the_whole_interval_and_pushes_the_queue(book: Book) -> None:
    a = member(book, "a")
    for batch, start in ((1, 0), (2, 10), (3, 30)):
        reserve(book, batch, PathHop(a, start, 0, start, 10))
    assert book.correct(BatchId(1), 0, 4, None) == (4, (2,))
    assert intervals(book, "gpu/a") == [(4, 14, 1), (14, 24, 2), (30, 40, 3)]
    assert book.correct(BatchId(1), 0, 4, 12) == (-2, ())
    assert intervals(book, "gpu/a") == [(4, 12, 1), (14, 24, 2), (30, 40, 3)]


def test_an_early_start_frees_the_end_of_the_interval(book: Book) -> None:
    a = member(book, "a")
    reserve(book, 1, PathHop(a, 20, 0, 20, 10))
    assert book.correct(BatchId(1), 0, 5, None) == (-15, ())
    reserve(book, 2, PathHop(a, 15, 0, 15, 10))
    assert intervals(book, "gpu/a") == [(5, 15, 1), (15, 25, 2)]


def test_what_has_begun_ends_where_the_next_begins(book: Book) -> None:
    a = member(book, "a")
    for batch, start in ((1, 0), (2, 10), (3, 20)):
        reserve(book, batch, PathHop(a, start, 0, start, 10))
    book.correct(BatchId(1), 0, 0, None)
    assert book.correct(BatchId(2), 0, 6, None) == (-4, ())
    assert intervals(book, "gpu/a") == [(0, 6, 1), (6, 16, 2), (20, 30, 3)]
    assert book.correct(BatchId(1), 0, 0, 6) == (0, ())


def test_what_was_overtaken_before_it_began_moves_behind(book: Book) -> None:
    a = member(book, "a")
    reserve(book, 1, PathHop(a, 0, 0, 0, 10))
    reserve(book, 2, PathHop(a, 10, 0, 10, 10))
    assert book.correct(BatchId(2), 0, 2, None) == (-8, (1,))
    assert intervals(book, "gpu/a") == [(2, 12, 2), (12, 22, 1)]


def test_nothing_waits_for_time_that_is_held(book: Book) -> None:
    a = member(book, "a")
    book.hold(BatchId(1), 0, (a.gpu,), 0, 20)
    reserve(book, 2, PathHop(a, 20, 0, 20, 10))
    reserve(book, 3, PathHop(a, 30, 0, 30, 10))
    assert book.start_windows(BatchId(2)) == [(0, 0)]
    assert book.start_windows(BatchId(3)) == [(30, 2)]


def test_a_use_waits_for_what_is_booked_ahead_of_it_and_not_yet_over(book: Book) -> None:
    a, b, c = member(book, "a"), member(book, "b"), member(book, "c")
    reserve(book, 1, PathHop(a, 0, 0, 0, 10), PathHop(c, 10, 5, 15, 10))
    reserve(book, 2, PathHop(b, 0, 0, 0, 12), PathHop(c, 15, 5, 25, 10))
    assert book.start_windows(BatchId(2)) == [(0, 0), (15, 1), (25, 1)]
    book.correct(BatchId(1), 0, 0, 10)
    book.correct(BatchId(1), 1, 10, 15, transfer=True)
    assert book.start_windows(BatchId(2)) == [(0, 0), (0, 0), (25, 1)]
