"""The fast probe against PPipe's Algorithm 2 written out literally, and against every path."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.book import (
    Book,
    Path,
    PathHop,
    Pool,
    PoolChain,
    PoolMember,
    ProbeStage,
    earliest_slot,
)
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, BatchId, ServerId
from catenary_services.domain.plan import Agent


def literal_probe(
    legs: tuple[ProbeStage, ...], rows: int, now: int
) -> tuple[int, int, list[tuple[str, int, int, int, int]]]:
    """Algorithm 2 line by line; ties go to the latest-free GPU, as `probe` documents."""
    t_g, wait, last = now, 0, None
    path = []
    for position, leg in enumerate(legs):
        best = None
        for index, gpu in enumerate(leg.pool.members):
            t = t_g
            sent, l_n = t, 0
            if position and leg.row_bytes and last is not None and gpu.agent != last.agent:
                speed = min(last.bytes_per_second, gpu.bytes_per_second)
                l_n = -(-leg.row_bytes * rows * NANOSECONDS_PER_SECOND // speed)
                t = sent = earliest_slot([last.uplink, gpu.downlink], t, l_n)
                t += l_n
            l_i = gpu.gpu.with_steps(t, leg.compute_ns[rows - 1])
            t = earliest_slot([gpu.gpu], t, l_i)
            free = gpu.gpu.busy_until
            rank = (t + l_i, free > t, -free, -index)
            if best is None or rank < best[0]:
                best = (rank, gpu, (str(gpu.agent), sent, l_n, t, l_i))
        assert best is not None
        (finish, *_), last, step = best
        wait += finish - t_g - step[2] - step[4]
        t_g = finish
        path.append(step)
    return t_g, wait, path


def earliest_finish(legs: tuple[ProbeStage, ...], rows: int, now: int) -> int:
    """Tries every combination of members."""
    finishes = []
    for members in product(*(leg.pool.members for leg in legs)):
        moment = now
        for position, (leg, member) in enumerate(zip(legs, members, strict=True)):
            before = members[position - 1]
            if position and leg.row_bytes and member.agent != before.agent:
                speed = min(before.bytes_per_second, member.bytes_per_second)
                length = -(-leg.row_bytes * rows * NANOSECONDS_PER_SECOND // speed)
                moment = length + earliest_slot([before.uplink, member.downlink], moment, length)
            spent = member.gpu.with_steps(moment, leg.compute_ns[rows - 1])
            moment = spent + earliest_slot([member.gpu], moment, spent)
        finishes.append(moment)
    return min(finishes)


def plain(step: PathHop) -> tuple[str, int, int, int, int]:
    return (
        str(step.member.agent),
        step.transfer_start,
        step.transfer_ns,
        step.start,
        step.compute_ns,
    )


def outcome(path: Path) -> tuple[int, int, int, list[tuple[str, int, int, int, int]]]:
    return path.rows, path.finish_ns, path.wait_ns, [plain(step) for step in path.steps]


def literal_largest(
    chain: PoolChain, deadline: int, now: int
) -> tuple[int, int, int, list[tuple[str, int, int, int, int]]] | None:
    """Algorithm 1, lines 10 to 14, with a probe of every size."""
    for rows in range(chain.max_rows, 0, -1):
        path = chain.probe(rows, now)
        if path.finish_ns <= deadline:
            return outcome(path)
    return None


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Book, tuple[ProbeStage, ...]]:
    book = Book()
    count = draw(st.integers(1, 7))
    speeds = st.sampled_from([1, 1, 1, 2])
    members: list[PoolMember] = [
        book.member(
            Agent(
                AgentId(f"a{i}"),
                "x",
                ServerId(f"s{draw(st.integers(0, 3))}"),
                1,
                draw(speeds) * NANOSECONDS_PER_SECOND,
            )
        )
        for i in range(count)
    ]
    pools: dict[tuple[int, ...], Pool] = {}
    legs = []
    for position in range(draw(st.integers(1, 3))):
        chosen = tuple(draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True)))
        pool = pools.setdefault(chosen, Pool([members[i] for i in chosen]))
        base = draw(st.integers(1, 8))
        step = draw(st.integers(0, 3))
        row_bytes = draw(st.integers(0, 4)) if position else 0
        legs.append(ProbeStage(pool, tuple(base + step * i for i in range(4)), row_bytes))
    book.follow(pools.values())
    return book, tuple(legs)


@settings(max_examples=300)
@given(clusters(), st.data())
def test_probe_ends_first_of_all_paths_and_as_algorithm_2_where_that_does(
    cluster: tuple[Book, tuple[ProbeStage, ...]], data: st.DataObject
) -> None:
    book, legs = cluster
    now = 0
    prompts = False
    for batch in range(1, data.draw(st.integers(1, 25)) + 1):
        now += data.draw(st.integers(0, 4))
        rows = data.draw(st.integers(1, 4))
        if data.draw(st.integers(0, 3)) == 0:  # a device begins to compute steps, or ends it
            member = data.draw(st.sampled_from(legs[0].pool.members))
            steps = data.draw(st.sampled_from([(0, 0), (3, 512), (9, 4096)]))
            chunk = data.draw(st.integers(0, 8)) if steps[0] else 0
            prompts = prompts or chunk > 0
            member.gpu.take_steps(*steps, chunk, now + 5 if chunk else 0)
        # From any stage on, so that devices get gaps that are not at their end.
        part = legs[data.draw(st.integers(0, len(legs) - 1)) :]
        finish, wait, path = literal_probe(part, rows, now)
        chain = PoolChain(part)
        found = chain.probe(rows, now)
        if prompts:  # a batch may end earlier there that comes later, which no label tells
            assert found.finish_ns <= finish
        else:
            assert found.finish_ns == earliest_finish(part, rows, now)
        if found.finish_ns == finish:
            assert [plain(step) for step in found.steps] == path
            assert found.wait_ns == wait
        deadline = now + data.draw(st.integers(0, 60))
        largest = chain.largest(4, deadline, now)
        assert (None if largest is None else outcome(largest)) == literal_largest(
            chain, deadline, now
        )
        book.reserve(BatchId(batch), found.steps, now + 1000)
        if data.draw(st.integers(0, 3)) == 0:
            book.release(BatchId(data.draw(st.integers(1, batch))))
        elif data.draw(st.booleans()):
            begun = found.steps[0].start + data.draw(st.integers(-2, 5))
            book.correct(BatchId(batch), 0, begun, begun + data.draw(st.integers(1, 15)))


@settings(max_examples=150)
@given(clusters(), st.data())
def test_a_pool_knows_when_its_first_gpu_could_start(
    cluster: tuple[Book, tuple[ProbeStage, ...]], data: st.DataObject
) -> None:
    book, legs = cluster
    now = 0
    for batch in range(1, data.draw(st.integers(1, 15)) + 1):
        now += data.draw(st.integers(0, 4))
        book.prune(now)
        part = legs[data.draw(st.integers(0, len(legs) - 1)) :]
        found = PoolChain(part).probe(data.draw(st.integers(1, 4)), now)
        book.reserve(BatchId(batch), found.steps, now + 1000)
        if data.draw(st.booleans()):
            begun = found.steps[0].start + data.draw(st.integers(-2, 5))
            book.correct(BatchId(batch), 0, begun, begun + data.draw(st.integers(1, 15)))
        for leg in legs:
            ready, duration = now + data.draw(st.integers(-2, 20)), data.draw(st.integers(1, 9))
            assert leg.pool.earliest_start(ready, duration) == min(
                earliest_slot([member.gpu], ready, duration) for member in leg.pool.members
            )


def test_the_gpu_that_was_busy_last_is_taken_when_all_finish_alike() -> None:
    book = Book()
    agents = [Agent(AgentId(a), "x", ServerId(a), 1, 10**9) for a in "abc"]
    members = [book.member(agent) for agent in agents]
    pool = Pool(members)
    book.follow([pool])
    leg = ProbeStage(pool, (10,), 0)
    book.reserve(BatchId(1), [PathHop(members[1], 0, 0, 0, 10)], 100)
    book.reserve(BatchId(2), [PathHop(members[2], 0, 0, 0, 30)], 100)
    assert PoolChain((leg,)).probe(1, 20).steps[0].member is members[1]
