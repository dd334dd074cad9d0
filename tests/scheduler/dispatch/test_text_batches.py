"""Batches of texts within a budget of tokens: which rows go together, and what is booked for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.dispatch import PooledConfig, PooledDispatcher
from catenary_scheduler.dispatch.events import (
    AgentLost,
    DispatchBatch,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCompleted,
    StageReported,
    Tick,
)
from catenary_scheduler.dispatch.pooled.text_batches import least_size, pack_texts
from catenary_scheduler.dispatch.pooled.tracking import Request, RowRange
from catenary_scheduler.dispatch.text_lengths import TextLengths
from catenary_services.domain.model import TokenUnits
from scheduling_cases.pipelines import CATS, MS, joins, pipeline, plan, request, served, stage

UNITS = TokenUnits(16, 64)
"""Texts of up to 64 tokens: four units."""


def lengths(*tokens: int, units: TokenUnits = UNITS) -> TextLengths:
    runs = [(len(list(rows)), each) for each, rows in groupby(tokens)]
    return TextLengths.of(runs, units)


def rows_of(number: int, *tokens: int) -> RowRange:
    texts = lengths(*tokens)
    event = RequestArrived(request(number), CATS, len(tokens), 10**12, texts=texts)
    return RowRange(Request(event, 0, number), 0, len(tokens))


def linear(fixed: int, size: int = 64) -> list[int]:
    """Times of a device that takes `fixed` for any batch, and 10 for each token."""
    return [fixed + 160 * units for units in range(1, size + 1)]


def packed(ranges: list[RowRange], limit: int, work: list[int]) -> list[int]:
    return pack_texts(ranges, UNITS, limit, work).counts


def time_of(tokens: int, work: list[int]) -> float:
    """Times of sizes, and straight lines between and below them."""
    at = tokens / UNITS.tokens
    below = min(max(1, int(at)), len(work) - 1)
    return max(0.0, work[below - 1] + (at - below) * (work[below] - work[below - 1]))


def literally(ranges: list[list[int]], limit: int, work: list[int]) -> list[int]:
    """What `pack_texts` says it does, on lists of lengths."""
    room, counts = limit * UNITS.tokens, [0] * len(ranges)
    inside: list[int] = []
    head = ranges[0][0]
    others = sorted(
        range(1, len(ranges)), key=lambda at: (ranges[at][0] > head, abs(ranges[at][0] - head))
    )
    for at in [0, *others]:
        left = list(ranges[at])
        while left:
            run = list(next(groupby(left))[1])
            fits = [
                n
                for n in range(1, len(run) + 1)
                if (len(inside) + n) * max([*inside, *run]) <= room
            ]
            if not fits:
                break
            more = run[: fits[-1]]
            together = inside + more
            if inside:
                apart = time_of(len(inside) * max(inside), work) + time_of(sum(more), work)
                if time_of(len(together) * max(together), work) > apart + 1e-9:
                    break
            inside, left = together, left[len(more) :]
            if len(more) < len(run):
                break
        counts[at] = len(ranges[at]) - len(left)
        if (len(inside) + 1) * max(inside) > room:
            break
    return counts


TOKENS = st.lists(st.sampled_from([8, 9, 16, 20, 30, 33, 48, 64]), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(TOKENS, min_size=1, max_size=5),
    limit=st.integers(4, 24),
    fixed=st.sampled_from([0, 75, 405, 1600, 160_000]),
)
def test_batches_are_whole_rows_within_the_budget_that_gain_by_going_together(
    rows: list[list[int]], limit: int, fixed: int
) -> None:
    work = linear(fixed)
    ranges = [rows_of(number, *tokens) for number, tokens in enumerate(rows)]
    batch = pack_texts(ranges, UNITS, limit, work)
    assert batch.counts == literally(rows, limit, work)
    assert batch.counts[0] >= 1
    pairs = zip(rows, batch.counts, strict=True)
    inside = [each for tokens, count in pairs for each in tokens[:count]]
    assert (batch.rows, batch.tokens) == (len(inside), max(inside))
    assert batch.rows * batch.tokens <= limit * UNITS.tokens
    assert batch.is_full == ((batch.rows + 1) * batch.tokens > limit * UNITS.tokens)
    if batch.rows == sum(map(len, rows)):
        assert not batch.leaves_rows
    elif not batch.is_full:
        assert batch.leaves_rows


def test_where_time_is_by_the_token_rows_of_one_length_go_together() -> None:
    ranges = [rows_of(1, 8, 8, 8), rows_of(2, 64), rows_of(3, 8, 8, 64)]
    assert packed(ranges, 40, linear(0)) == [3, 0, 2]


def test_where_a_batch_costs_much_by_itself_rows_of_all_lengths_go_together() -> None:
    ranges = [rows_of(1, 8, 8, 8), rows_of(2, 64), rows_of(3, 8, 8, 64)]
    assert packed(ranges, 40, linear(10_000)) == [3, 1, 3]


def test_a_text_is_never_split_and_counts_as_a_few_tokens_at_least() -> None:
    assert packed([rows_of(1, 64), rows_of(2, 64)], 7, linear(10_000)) == [1, 0]
    assert packed([rows_of(1, *[1] * 9)], 4, linear(0)) == [8]
    assert least_size(rows_of(1, 33), UNITS) == 3
    assert least_size(rows_of(1, 1000), UNITS) == 4
    assert least_size(rows_of(1, 1000), None) == 1


def test_texts_of_unknown_lengths_count_as_full_ones() -> None:
    event = RequestArrived(request(1), CATS, 3, 10**12)
    unknown = RowRange(Request(event, 0, 1), 0, 3)
    assert least_size(unknown, UNITS) == 4
    assert packed([unknown], 8, linear(0)) == [2]


TIMES = tuple(2.0 + units for units in range(1, 17))
TEXTS = replace(served(pipeline(16, stage(0, "ab", *TIMES)), slo_ms=500), units=UNITS)


class Bench:
    """A dispatcher with two devices that take what is booked, and a clock."""

    def __init__(self, config: PooledConfig | None = None) -> None:
        self.dispatcher = PooledDispatcher(config)
        self.batches: list[DispatchBatch] = []
        self.refused: list[Reject] = []
        self.asked: dict[int, TextLengths] = {}
        for agent in "ab":
            self.tell(0, joins(agent))
        self.tell(0, PlanActivated(plan(TEXTS)))

    def tell(self, now: int, event: object) -> None:
        for command in self.dispatcher.handle(event, now):  # type: ignore[arg-type]
            if isinstance(command, DispatchBatch):
                self.batches.append(command)
            elif isinstance(command, Reject):
                self.refused.append(command)

    def ask(self, ms: float, *tokens: int, slo: float = 500) -> None:
        number = len(self.asked) + 1
        self.asked[number] = lengths(*tokens)
        now = int(ms * MS)
        event = RequestArrived(
            request(number),
            CATS,
            len(tokens),
            now + int(slo * MS),
            texts=self.asked[number],
        )
        self.tell(now, event)

    def wait(self) -> None:
        """Lets time pass until every row is on its way, and each batch has ended as booked."""
        done = 0
        while self.dispatcher.statistics()["queued_rows"] or done < len(self.batches):
            for batch in self.batches[done:]:
                hop = batch.path[-1]
                end = hop.start_ns + hop.duration_ns
                self.tell(end, StageReported(batch.batch, 0, hop.start_ns, end))
                done += 1
            moment = self.dispatcher.next_wakeup()
            if moment is None or not self.dispatcher.statistics()["queued_rows"]:
                continue
            self.tell(moment, Tick())

    def tokens_of(self, batch: DispatchBatch) -> list[int]:
        found = []
        for piece in batch.slices:
            texts = self.asked[piece.request.number]
            for row in range(piece.request_row, piece.request_row + piece.rows):
                found.append(texts.tokens[texts.run_at(row)])
        return found


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(TOKENS.map(sorted), min_size=1, max_size=6))
def test_every_row_goes_once_in_a_batch_that_is_booked_for_its_size(asked: list[list[int]]) -> None:
    bench = Bench()
    for number, tokens in enumerate(asked):
        bench.ask(number, *tokens)
    bench.wait()
    assert not bench.refused
    seen: dict[int, list[int]] = {number: [] for number in bench.asked}
    for batch in bench.batches:
        tokens = bench.tokens_of(batch)
        assert len(tokens) == batch.rows
        assert batch.size == batch.units == UNITS.of(len(tokens), max(tokens)) <= 16
        assert batch.path[0].duration_ns >= TIMES[batch.units - 1] * MS
        for piece in batch.slices:
            seen[piece.request.number] += range(piece.request_row, piece.request_row + piece.rows)
    assert all(rows == list(range(len(asked[n - 1]))) for n, rows in seen.items())


def test_short_texts_share_the_room_that_few_long_ones_take() -> None:
    short, long = Bench(), Bench()
    short.ask(0, *[8] * 32)
    long.ask(0, *[64] * 4)
    (batch,), (other,) = short.batches, long.batches
    assert (batch.rows, batch.units) == (32, 16)
    assert (other.rows, other.units) == (4, 16)
    assert batch.path[0].duration_ns == other.path[0].duration_ns == TIMES[15] * MS


def test_a_batch_that_leaves_rows_for_their_lengths_does_not_linger() -> None:
    bench, other = Bench(), Bench()
    bench.ask(0, *[8] * 10, 64)
    (first,) = bench.batches
    assert (first.rows, first.units, first.path[0].start_ns) == (10, 5, 0)
    bench.wait()
    assert [each.rows for each in bench.batches] == [10, 1]
    other.ask(0, *[8] * 10)  # nothing is left out: others may come
    assert not other.batches
    other.wait()
    assert other.batches[0].path[0].start_ns == 2 * MS


def test_a_long_text_is_refused_if_even_alone_it_would_be_late() -> None:
    bench = Bench()
    bench.ask(0, 8, slo=5)
    bench.ask(0, 64, slo=5)
    bench.wait()
    assert [refusal.request.number for refusal in bench.refused] == [2]
    assert bench.refused[0].earliest_finish_ns == TIMES[3] * MS
    assert [each.slices[0].request.number for each in bench.batches] == [1]


def test_a_deadline_makes_batches_smaller_but_never_smaller_than_their_first_text() -> None:
    bench = Bench()
    bench.ask(0, 64, 64, 64, slo=TIMES[4])
    assert [(each.rows, each.units) for each in bench.batches] == [(1, 4), (1, 4)]
    assert bench.batches[0].expected_finish_ns == TIMES[3] * MS


def test_rows_of_a_lost_batch_are_packed_again() -> None:
    bench = Bench()
    bench.ask(0, *[8] * 32)
    (batch,) = bench.batches
    bench.tell(MS, AgentLost(batch.path[0].agent))
    again = bench.batches[1]
    assert (again.rows, again.units) == (32, 16)
    assert again.path[0].agent != batch.path[0].agent
    bench.tell(2 * MS, RequestCompleted(request(1)))
    assert bench.dispatcher.statistics()["booked_batches"] == 0
