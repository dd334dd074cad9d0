"""Caches that pass in lent memory: a peer has read what it says, and every failure ends in frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_agent.generation.cache.cache_lending import LENT, LOAN_CHANGES, OFFERED, READY
from catenary_agent.generation.state.events import LoanMessage
from catenary_agent.generation.state.states import CLOSED, LEAVING
from catenary_protos.catenary.v1 import frame_pb2
from tests.gpu_agent.generation.migration.test_move_interleavings import (
    CHAINS,
    OFTEN,
    Cluster,
    Request,
    drawn_requests,
    examples,
    finish,
    losses,
    play,
    starts,
)
from tests.support.ring_harness import SECOND_NS

FROM, TO = CHAINS[5], CHAINS[3]
"""One agent with the whole model, and another one."""
PROMPT = [(5 * n + 3) % 48 for n in range(12)]
FAILURES = ["make", "open", "mark", "lend", "borrow"]
_Step = frame_pb2.CacheLoan
ENDS_OF_PIECES = (_Step.STEP_RETURN, _Step.STEP_REJECT)


class Lending(Cluster):
    """A cluster of one host."""

    def __init__(self, chunk: int = 4, period: int = 0, *, are_slow: bool = False) -> None:
        super().__init__(chunk, period, are_slow=are_slow, lends=True)
        self.lost_answers = 0
        """Number of pieces of which their lenders will never hear again."""

    @property
    def lendings(self):
        return {name: decoder.lending for name, decoder in self.decoders.items()}

    @property
    def borrowed(self) -> int:
        """Number of pieces that were read."""
        return sum(each.borrowed for each in self.lendings.values())

    def fail(self, agent: str, what: str) -> None:
        self.lendings[agent].fails.add(what)

    def loan(self, lender: str = "e", borrower: str = "c"):
        return self.rings[lender].migrations.lender._loans.get(borrower)

    def moving(self, count: int = 90, moves: int = 1) -> Request:
        """Starts a request, and begins its first move once it generates."""
        plan = [([TO, FROM][n % 2], False) for n in range(moves)]
        request = Request(list(PROMPT), count, {1: FROM}, 1, plan)
        self.start(1, request, (FROM, []))
        while len(self.answer(1)) < 2:
            self.once()
        assert self.begin(1)
        return request

    def cut(self, wire) -> None:
        self.lost_answers += sum(each.loan.step in ENDS_OF_PIECES for each in self.headers(wire))
        super().cut(wire)

    def headers(self, wire) -> list[frame_pb2.FrameHeader]:
        """Returns the headers of the frames on a wire."""
        return [frame_pb2.FrameHeader.FromString(data) for data, *_ in self.wires.get(wire, ())]

    def once(self) -> None:
        """Lets everything happen that can."""
        for wire in self.busy():
            self.deliver(wire)
        self.obey()
        for agent in self.ready():
            self.step(agent)

    def until(self, holds) -> None:
        for _ in range(1000):
            if holds():
                return
            self.once()
        raise AssertionError("it does not come to that")

    def take(self, holds) -> bool:
        """Takes the first frame off its wire of whose header something holds."""
        for frames in self.wires.values():
            for at, (data, _, _) in enumerate(frames):
                if holds(frame_pb2.FrameHeader.FromString(data)):
                    del frames[at]
                    return True
        return False


def test_a_session_whose_caches_are_lent_says_what_it_says_where_it_stays():
    world = Lending()
    request = world.moving()
    finish(world)
    assert len(world.answer(1)) == request.count
    assert request.current != 1
    assert world.borrowed > 1
    assert not world.loans_failed


def test_pieces_are_no_smaller_where_frames_are_short_for_their_link():
    fast, slow = Lending(), Lending(are_slow=True)
    for world in (fast, slow):
        request = world.moving()
        finish(world)
        assert len(world.answer(1)) == request.count
    assert slow.borrowed == fast.borrowed > 1


def test_memory_that_is_lent_once_serves_the_next_move_too():
    world = Lending()
    request = world.moving(200)
    world.until(lambda: request.current != 1)
    made = len(world.memories)
    request.plan = [(FROM, False), (TO, False)]
    for _ in range(2):
        before = request.current
        assert world.begin(1)
        world.until(lambda now=before: request.current != now)
    assert len(world.memories) == made + 1  # the other way
    finish(world)


@pytest.mark.parametrize("what", FAILURES)
def test_what_cannot_be_lent_leaves_in_frames_within_the_same_move(what):
    world = Lending()
    world.fail("e" if what in ("make", "lend") else "c", what)
    world.fail("e6" if what in ("make", "lend") else "c", what)
    request = world.moving()
    finish(world)
    assert request.current != 1
    assert not request.dropped
    assert len(world.answer(1)) == request.count
    assert not world.borrowed
    assert world.loans_failed == 1  # and no other try soon after


def test_a_piece_that_cannot_be_read_in_the_middle_of_a_move_comes_again_in_frames():
    world = Lending()
    request = world.moving()
    world.until(lambda: world.borrowed == 1)
    world.fail("c", "borrow")
    finish(world)
    assert request.current != 1
    assert not request.dropped
    assert len(world.answer(1)) == request.count
    assert (world.borrowed, world.loans_failed) == (1, 1)


def test_after_a_while_a_peer_is_offered_memory_again():
    world = Lending()
    world.fail("c", "open")
    request = world.moving(450)
    world.until(lambda: request.current != 1)
    came = len(world.answer(1))
    world.until(lambda: len(world.answer(1)) > came + 5)  # all that it left behind is closed
    world.lendings["c"].fails.clear()
    world.skipped_ns += 61 * SECOND_NS
    request.plan = [(FROM, True), (TO, False)]
    for _ in range(2):
        before = request.current
        assert world.begin(1)
        world.until(lambda now=before: request.current != now)
    assert world.borrowed
    finish(world)


def test_memory_is_given_back_by_both_when_it_is_not_needed():
    world = Lending()
    request = world.moving()
    world.run_out()
    assert request.current != 1
    assert world.loan().state is READY
    world.pass_time()
    assert world.loan() is None
    world.pass_time()
    assert not any(each.owned for each in world.lendings.values())
    assert not world.loans_failed
    finish(world)


def test_what_a_dead_peer_has_borrowed_is_given_back():
    world = Lending()
    world.moving()
    world.until(lambda: world.loan() is not None and world.loan().state is LENT)
    assert world.take(lambda header: header.cache.HasField("lent"))
    world.pass_time()  # nothing is heard of it
    assert world.loan() is None
    assert world.loans_failed == 1
    finish(world)


def test_a_session_that_was_handed_over_leaves_though_the_answer_to_its_last_piece_is_lost():
    world = Lending()
    request = world.moving()
    session = world.rings["e"].sessions.get(1)

    def is_last_piece_read() -> bool:
        answers = [each for each in world.headers(("c", "e")) if each.loan.step in ENDS_OF_PIECES]
        has_more = any(each.has_more for each in session.cache_sends)
        return session.state is LEAVING and not has_more and bool(answers)

    world.until(is_last_piece_read)
    world.cut(("c", "e"))
    world.run_out()
    assert request.current != 1
    assert world.loan().state is LENT
    assert session.state is LEAVING
    world.pass_time()
    assert world.loan() is None
    assert session.state is CLOSED
    assert world.loans_failed == 1
    finish(world)
    assert len(world.answer(1)) == request.count


def test_memory_is_given_back_at_once_when_the_link_to_its_borrower_breaks():
    world = Lending()
    world.moving()
    world.until(lambda: world.loan() is not None and world.loan().state is LENT)
    assert ("e", "c") in world.busy()
    world.cut(("e", "c"))
    assert world.loan() is None
    finish(world)


def test_an_offer_without_an_answer_ends_and_caches_leave_in_frames_meanwhile():
    world = Lending()
    request = world.moving()
    world.until(lambda: world.take(lambda header: header.loan.step == _Step.STEP_ACCEPT))
    world.run_out()
    assert request.current != 1
    assert not world.borrowed
    assert world.loan().state is OFFERED
    world.pass_time()
    assert world.loan() is None
    finish(world)


def test_answers_of_others_of_other_loans_and_those_that_come_twice_change_nothing():
    world = Lending()
    world.moving()
    world.until(lambda: world.loan() is not None and world.loan().state is LENT)
    loan, lender = world.loan(), world.rings["e"].migrations.lender
    ignored = world.rings["e"].migrations.ignored
    wrong = [
        _Step(step=_Step.STEP_RETURN, agent_id="a", loan_id=loan.loan_id, number=loan.number),
        _Step(step=_Step.STEP_RETURN, agent_id="c", loan_id=loan.loan_id + 1, number=loan.number),
        _Step(step=_Step.STEP_RETURN, agent_id="c", loan_id=loan.loan_id, number=loan.number + 1),
        _Step(step=_Step.STEP_ACCEPT, agent_id="c", loan_id=loan.loan_id, proof=loan.proof),
        _Step(step=_Step.STEP_DECLINE, agent_id="c", loan_id=loan.loan_id),
        _Step(step=99, agent_id="c", loan_id=loan.loan_id, number=loan.number),
    ]
    for said in wrong:
        world.rings["e"].handle(LoanMessage(said))
        assert loan.state is LENT
    assert world.rings["e"].migrations.ignored == ignored + len(wrong)
    assert lender._loans["c"] is loan
    finish(world)
    assert len(world.answer(1)) == 90


def rewrite(world, change):
    """Changes the headers of the frames that are on their way from the lender to the borrower."""
    frames = world.wires["e", "c"]
    for at, (data, payload, cache) in enumerate(frames):
        header = frame_pb2.FrameHeader.FromString(data)
        change(header)
        frames[at] = (header.SerializeToString(), payload, cache)


@pytest.mark.parametrize("change", [-1, 1, 1 << 40])
def test_a_piece_of_another_size_than_its_rows_fails_its_move_and_is_returned(change):
    world = Lending()
    request = world.moving()
    world.until(lambda: world.loan() is not None and world.loan().state is LENT)

    def changed(header):
        if header.cache.HasField("lent"):
            header.cache.lent.nbytes += change

    rewrite(world, changed)
    world.run_out()
    assert request.dropped
    assert not world.borrowed
    assert world.loan().state is READY
    finish(world)
    assert len(world.answer(1)) == request.count


def test_a_piece_in_memory_of_another_lender_is_not_read():
    world = Lending()
    request = world.moving()
    world.until(lambda: world.loan() is not None and world.loan().state is LENT)

    def changed(header):
        if header.cache.HasField("lent"):
            header.cache.lent.loan_id += 1

    rewrite(world, changed)
    world.run_out()
    assert not world.borrowed
    assert not request.dropped or request.current == 1
    finish(world)


def test_more_memory_than_may_be_lent_is_declined():
    world = Lending()
    world.moving()
    world.until(lambda: any(offered(frames) for frames in world.wires.values()))

    def changed(header):
        if header.loan.step == _Step.STEP_OFFER:
            header.loan.nbytes = 1 << 30

    rewrite(world, changed)
    world.run_out()
    assert (world.borrowed, world.loans_failed) == (0, 1)
    finish(world)


def offered(frames) -> bool:
    return any(
        frame_pb2.FrameHeader.FromString(data).loan.step == _Step.STEP_OFFER for data, *_ in frames
    )


def test_the_table_of_changes_has_every_state():
    assert set(LOAN_CHANGES) == {OFFERED, READY, LENT}
    assert {after for each in LOAN_CHANGES.values() for after in each} == {READY, LENT}


@pytest.mark.parametrize("count", OFTEN)
def test_whatever_cannot_be_read_every_answer_is_whole(count):
    @examples(count)
    @given(st.data(), st.integers(1, 6))
    def every_answer_is_whole(data, chunk):
        world = Lending(
            chunk, data.draw(st.sampled_from([0, 2, 3])), are_slow=data.draw(st.booleans())
        )
        acts = starts(world, drawn_requests(data))
        failures = st.tuples(st.sampled_from(sorted(world.decoders)), st.sampled_from(FAILURES))
        for agent, what in data.draw(st.lists(failures, max_size=3)):
            acts.append(lambda a=agent, w=what: world.fail(a, w))
        play(world, data, acts, 150)
        finish(world)
        for number, request in world.requests.items():
            assert not request.is_lost
            assert len(world.answer(number)) == request.count

    every_answer_is_whole()


@pytest.mark.parametrize("count", OFTEN)
def test_what_is_lost_while_caches_are_lent_is_never_said_wrong_and_all_comes_free(count):
    @examples(count)
    @given(st.data(), st.integers(1, 6))
    def nothing_wrong_is_said(data, chunk):
        world = Lending(
            chunk, data.draw(st.sampled_from([0, 2, 3])), are_slow=data.draw(st.booleans())
        )
        drawn = drawn_requests(data)
        acts = starts(world, drawn) + losses(world, data, drawn)
        play(world, data, data.draw(st.permutations(acts)), 150)
        if world.lost_answers:  # what these hold is free after the stall timeout, and not before
            world.run_out()
            world.pass_time()
        finish(world)

    nothing_wrong_is_said()
