from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.agents.epoch_claims import NEARBY, ClaimDecision, EpochClaim, EpochClaims
from catenary_scheduler.leadership.takeover_failures import TakeoverFailures
from catenary_services.domain.groups import EPOCH_LIMIT, FARTHEST_EPOCH, HIGHEST_GRANTED, first_id
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Epoch

A, B = AgentId("a"), AgentId("b")
OURS = Epoch(7)
SECOND = NANOSECONDS_PER_SECOND


def judged(
    claims: EpochClaims, agent: AgentId, epoch: int, leader: str = "", *, at_s: float = 0.0
) -> ClaimDecision:
    return claims.judge(EpochClaim(agent, epoch, leader), OURS, "us", round(at_s * SECOND))


@pytest.mark.parametrize("epoch", [0, 1, 6, 7])
def test_who_obeys_us_or_a_predecessor_obeys(epoch: int) -> None:
    assert judged(EpochClaims(), A, epoch) is ClaimDecision.OBEYS
    assert judged(EpochClaims(), A, epoch, "us") is ClaimDecision.OBEYS


def test_another_leader_of_our_epoch_and_a_higher_one_nearby_are_followed() -> None:
    assert judged(EpochClaims(), A, 7, "another") is ClaimDecision.FOLLOW
    assert judged(EpochClaims(), A, 8) is ClaimDecision.FOLLOW
    claims = EpochClaims()
    assert judged(claims, B, 7) is ClaimDecision.OBEYS
    assert (
        judged(claims, A, 7 + NEARBY) is ClaimDecision.FOLLOW
    )  # a few lost writes, whoever disagrees


@pytest.mark.parametrize("epoch", [2**64 - 1, 2**53 + 1, EPOCH_LIMIT, HIGHEST_GRANTED + 1])
def test_what_cannot_be_is_a_lie_whoever_agrees(epoch: int) -> None:
    assert judged(EpochClaims(), A, epoch) is ClaimDecision.LIE
    assert judged(EpochClaims(), A, 8 + FARTHEST_EPOCH) is ClaimDecision.LIE


def test_a_far_claim_is_a_lie_if_another_agent_remembers_less() -> None:
    claims = EpochClaims()
    assert judged(claims, B, 6) is ClaimDecision.OBEYS
    assert judged(claims, A, 10**6) is ClaimDecision.LIE


def test_agents_that_are_new_contradict_nobody() -> None:
    claims = EpochClaims()
    assert judged(claims, B, 0) is ClaimDecision.OBEYS
    assert judged(claims, A, 10**6) is ClaimDecision.WAIT


def test_a_redis_that_forgot_is_told_from_a_liar_by_waiting() -> None:
    claims = EpochClaims()
    assert judged(claims, A, 10**6) is ClaimDecision.WAIT
    assert judged(claims, B, 10**6, at_s=0.5) is ClaimDecision.WAIT
    assert judged(claims, A, 10**6, at_s=2.1) is ClaimDecision.FOLLOW
    liar = EpochClaims()
    assert judged(liar, A, 10**6) is ClaimDecision.WAIT
    assert judged(liar, B, 7, at_s=0.5) is ClaimDecision.OBEYS
    assert judged(liar, A, 10**6, at_s=2.1) is ClaimDecision.LIE


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 200_000), max_size=60))
def test_no_agent_ever_brings_epochs_to_their_end(said: list[int]) -> None:
    """A term follows one liar a few times, whatever it says and however long."""
    claims, ours = EpochClaims(), Epoch(7)
    for turn, epoch in enumerate(said):
        claim = EpochClaim(A, max(epoch, ours))
        if claims.judge(claim, ours, "us", turn * SECOND) is ClaimDecision.FOLLOW:
            ours = Epoch(claim.epoch + 1)
    assert ours <= 7 + 3 * (FARTHEST_EPOCH + 1)


@given(st.integers(0, EPOCH_LIMIT))
def test_ids_fit_whatever_the_epoch(epoch: int) -> None:
    assert 0 < first_id(epoch) < 2**63
    assert first_id(epoch) % 64 == 1
    assert first_id(epoch) >> 40 == epoch % 2**23


def test_trouble_is_counted_until_a_term_has_lasted() -> None:
    takeover_failures = TakeoverFailures()
    assert takeover_failures.in_words() == ""
    pauses = []
    for moment in range(8):
        takeover_failures.began(moment)
        pauses.append(takeover_failures.failed(RuntimeError("no\nway"), moment + 0.5))
    assert pauses[:3] == [0.2, 0.4, 0.8]
    assert pauses[-1] == 5.0
    assert takeover_failures.in_words() == "leading failed 8 times in a row: RuntimeError: no"
    takeover_failures.another_leads(50.0)
    assert takeover_failures.in_words() == ""
    assert takeover_failures.failures == 8  # it may fail there as well
    takeover_failures.began(100.0)
    takeover_failures.look(110.0)
    assert takeover_failures.failures == 8
    takeover_failures.look(131.0)
    assert (takeover_failures.failures, takeover_failures.in_words()) == (0, "")
    takeover_failures.began(200.0)
    assert takeover_failures.failed(ValueError("x"), 300.0) == 0.2
