"""Divisions keep every boundary, and defer no more than the greedy; rarely more than they must."""

import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.packing.transfers.transfers import (
    KINDS,
    TransferDivision,
    TransferMove,
    _Bins,
    divide,
)

LINKS = ("a", "b", "c")
TARGETS = (0, 1, 2)
MOVE = st.tuples(
    st.sampled_from(TARGETS),
    st.integers(0, 9),
    st.integers(0, 9),
    st.lists(st.sampled_from(LINKS), unique=True, max_size=2),
)
LINK_CAPACITY = st.dictionaries(st.sampled_from(LINKS), st.integers(0, 20))
COMPUTE_CAPACITY = st.dictionaries(st.sampled_from(TARGETS), st.integers(0, 20))


def moves_of(drawn: Sequence[tuple[int, int, int, list[str]]]) -> list[TransferMove]:
    return [
        TransferMove(number, "old", target, kv, tokens, tuple(links))
        for number, (target, kv, tokens, links) in enumerate(drawn)
    ]


def divide_exact(
    moves: Sequence[TransferMove],
    link_capacity: Mapping[str, int],
    compute_capacity: Mapping[Hashable, int],
) -> TransferDivision:
    """Returns a division that defers as few moves as possible, by exhaustive search.

    The search is meant for a dozen moves at most: there are 3^n divisions, and only those are
    pruned that defer as many moves as one already found.
    """
    best = TransferDivision((), (), tuple(sorted(move.id for move in moves)))
    bins = _Bins(link_capacity, compute_capacity)

    def search(at: int) -> None:
        nonlocal best
        if len(bins.deferred) >= len(best.deferred):
            return
        if at == len(moves):
            best = bins.division()
            return
        for kind in KINDS:
            if bins.place(moves[at], (kind,)):
                search(at + 1)
                bins.withdraw(moves[at])
        bins.deferred.append(moves[at])
        search(at + 1)
        bins.deferred.pop()

    search(0)
    return best


def assert_kept(
    moves: Sequence[TransferMove],
    done: TransferDivision,
    links: Mapping[str, int],
    targets: Mapping[Hashable, int],
) -> None:
    by_id = {move.id: move for move in moves}
    assert sorted(done.kv + done.tokens + done.deferred) == sorted(by_id)
    sent: Counter[str] = Counter()
    for move in map(by_id.__getitem__, done.kv):
        sent.update(dict(zip(move.links, move.link_bytes or [move.kv] * 9, strict=False)))
    assert all(size <= links.get(link, 0) for link, size in sent.items())
    read: Counter[Hashable] = Counter()
    for move in map(by_id.__getitem__, done.tokens):
        read[move.target] += move.tokens
    assert all(tokens <= targets.get(target, 0) for target, tokens in read.items())


def greedy_of_the_paper(
    moves: Sequence[TransferMove], links: Mapping[str, int], targets: Mapping[Hashable, int]
) -> int:
    """Returns how many moves it defers."""
    link_room, target_room, deferred = dict(links), dict(targets), 0
    for move in sorted(moves, key=lambda move: (-move.kv, move.id)):
        if all(move.kv <= link_room.get(link, 0) for link in move.links):
            for link in move.links:
                link_room[link] = link_room.get(link, 0) - move.kv
        elif move.tokens <= target_room.get(move.target, 0):
            target_room[move.target] = target_room.get(move.target, 0) - move.tokens
        else:
            deferred += 1
    return deferred


@given(st.lists(MOVE, max_size=6), LINK_CAPACITY, COMPUTE_CAPACITY)
@settings(max_examples=70, deadline=None)
def test_boundaries_are_kept_and_the_twin_is_no_worse(
    drawn: list[tuple[int, int, int, list[str]]],
    links: dict[str, int],
    targets: dict[Hashable, int],
) -> None:
    moves = moves_of(drawn)
    done, best = divide(moves, links, targets), divide_exact(moves, links, targets)
    assert_kept(moves, done, links, targets)
    assert_kept(moves, best, links, targets)
    greedy = greedy_of_the_paper(moves, links, targets)
    assert len(best.deferred) <= len(done.deferred) <= greedy


@given(st.lists(MOVE, max_size=8), LINK_CAPACITY, COMPUTE_CAPACITY, st.randoms())
@settings(max_examples=30, deadline=None)
def test_everybody_divides_alike_in_whatever_order_moves_come(
    drawn: list[tuple[int, int, int, list[str]]],
    links: dict[str, int],
    targets: dict[Hashable, int],
    order: random.Random,
) -> None:
    moves = moves_of(drawn)
    shuffled = order.sample(moves, len(moves))
    assert divide(shuffled, links, targets) == divide(moves, links, targets)


def test_where_boundaries_press_it_defers_as_few_as_possible_nearly_always() -> None:
    draw = random.Random(7)
    worse = greedy_worse = 0
    for _ in range(100):
        moves = []
        for number in range(7):
            tokens = draw.randint(50, 900)
            source, target = draw.sample(TARGETS, 2)
            path = (f"{source}:up", f"{target}:down")
            moves.append(TransferMove(number, source, target, 2 * tokens, tokens, path))
        links = {
            f"{at}:{way}": draw.choice((500, 2000)) for at in TARGETS for way in ("up", "down")
        }
        targets: dict[Hashable, int] = {at: draw.choice((300, 900)) for at in TARGETS}
        least = len(divide_exact(moves, links, targets).deferred)
        worse += len(divide(moves, links, targets).deferred) > least
        greedy_worse += greedy_of_the_paper(moves, links, targets) > least
    assert greedy_worse >= 5, "these cases tell nothing"
    assert worse <= 1


def test_the_largest_goes_as_caches_while_links_have_room() -> None:
    moves = [TransferMove(1, 0, 1, 60, 30, ("l",)), TransferMove(2, 0, 1, 80, 40, ("l",))]
    done = divide(moves, {"l": 100}, {1: 100})
    assert done == TransferDivision(kv=(2,), tokens=(1,), deferred=())
    assert done.kinds() == {1: "tokens", 2: "kv"}


def test_of_two_of_one_size_the_lower_id_comes_first() -> None:
    moves = [TransferMove(number, 0, 1, 60, 30, ("l",)) for number in (4, 3)]
    assert divide(moves, {"l": 100}, {}) == TransferDivision(kv=(3,), tokens=(), deferred=(4,))


def test_links_may_carry_different_parts_of_a_session() -> None:
    move = TransferMove(1, 0, 1, 100, 10, ("long", "short"), (90, 10))
    assert divide([move], {"long": 90, "short": 10}, {}).kv == (1,)
    assert divide([move], {"long": 90, "short": 9}, {}).deferred == (1,)


def test_what_passes_no_link_is_never_deferred() -> None:
    move = TransferMove(1, 0, 1, 100, 10, ())
    assert divide([move], {}, {}).kv == (1,)
