"""Clients with several gateways: what happens when one of them goes away."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

import catenary
import catenary_services.errors as served
from catenary import errors
from catenary.rpc.connection import Connection
from catenary.rpc.retry import RetryPolicy
from catenary.rpc.targets import split, targets_of

X = {"x": np.zeros(1, np.float32)}
TALK = "one two three four five six"
ANSWER = "ONE TWO THREE FOUR FIVE SIX "
POLICY = RetryPolicy(attempts=3, initial_backoff_s=0.001, max_backoff_s=0.01)


def both(connect: Any, gateways: Any, **settings: Any) -> Any:
    targets = ",".join(each.target for each in gateways)
    return connect.to(targets, **settings)


async def test_a_request_goes_to_another_gateway_at_once(gateways, connect):
    first, second = gateways
    first.failures.append(served.Unavailable("draining", retry_after_ns=10**9))
    result = await both(connect, gateways).infer("net", X)
    assert [each.id for each in first.requests] == [each.id for each in second.requests]
    assert second.requests[0].id == result.id


async def test_the_next_request_stays_where_the_last_one_was_answered(gateways, connect):
    first, second = gateways
    first.failures.append(served.Unavailable("draining"))
    client = both(connect, gateways)
    await client.infer("net", X)
    await client.infer("net", X)
    assert (len(first.requests), len(second.requests)) == (1, 2)


async def test_a_gateway_that_is_not_there_is_left(gateways, lost_target, connect):
    await connect.to(f"{lost_target},{gateways[1].target}").infer("net", X)
    assert len(gateways[1].requests) == 1


async def test_without_a_policy_every_gateway_is_asked_once(gateways, connect):
    for each in gateways:
        each.failures.extend([served.Unavailable("draining")] * 9)
    with pytest.raises(errors.UnavailableError):
        await both(connect, gateways).infer("net", X)
    assert [len(each.requests) for each in gateways] == [1, 1]


async def test_a_policy_begins_again_with_the_first(gateways, connect):
    for each in gateways:
        gone = served.Unavailable("draining", retry_after_ns=1)
        each.failures.extend([gone, gone])
    await both(connect, gateways, retry=POLICY).infer("net", X)
    assert [len(each.requests) for each in gateways] == [3, 2]


@pytest.mark.parametrize(
    "error", [served.Overloaded("full", retry_after_ns=1), served.InvalidInput("x", "is bad")]
)
async def test_what_another_gateway_would_say_as_well_is_not_asked_again(gateways, connect, error):
    gateways[0].failures.append(error)
    with pytest.raises(errors.CatenaryError):
        await both(connect, gateways).infer("net", X)
    assert gateways[1].requests == []


async def test_changes_of_the_cluster_are_not_repeated_elsewhere(gateways, connect):
    gateways[0].failures.append(served.Unavailable("between two leaders"))
    targets = [each.target for each in gateways]
    with pytest.raises(errors.UnavailableError):
        await both(connect, gateways, admin_target=targets).deploy("net")
    assert [len(each.orders) for each in gateways] == [1, 0]


async def test_an_answer_goes_on_at_another_gateway(gateways, connect):
    first, second = gateways
    first.last_word = "four"
    stream = both(connect, gateways).chat("lm", TALK, stream=True)
    pieces = [piece async for piece in stream]
    assert "".join(piece.text for piece in pieces) == ANSWER
    assert stream.so_far.token_ids == (0, 1, 2, 3, 4, 5)
    assert stream.so_far.finish_reason == "stop"
    assert list(second.orders[0].generated_token_ids) == [0, 1, 2]
    assert second.orders[0].sampling.seed == first.orders[0].sampling.seed
    assert second.orders[0].sampling.HasField("seed")


async def test_an_answer_survives_more_gateways_than_there_are_attempts(gateways, connect):
    first, second = gateways
    client = both(connect, gateways)
    first.last_word, second.last_word = "two", "three"
    stream = client.chat("lm", TALK, stream=True)
    seen = []
    async for piece in stream:
        seen.append(piece.text)
        if piece.text == "TWO ":
            first.last_word = "five"
        if piece.text == "THREE ":
            second.last_word = ""
        if piece.text == "ONE ":
            second.last_word = "three"
    assert "".join(seen) == ANSWER


async def test_a_gateway_too_old_to_go_on_ends_the_answer_with_the_error(gateways, connect):
    first, second = gateways
    first.last_word, second.goes_on = "four", False
    stream = both(connect, gateways).chat("lm", TALK, stream=True)
    with pytest.raises(errors.UnavailableError, match="the gateway stopped"):
        _ = [piece async for piece in stream]
    assert stream.so_far.text == "ONE TWO THREE "


async def test_a_gateway_that_is_full_is_asked_again_before_an_answer_is_given_up(
    gateways, connect
):
    first, second = gateways
    first.last_word = "four"
    second.failures.append(served.Overloaded("every chain is taken", retry_after_ns=1_000_000))
    result = await both(connect, gateways, retry=POLICY).chat("lm", TALK)
    assert result.text == ANSWER
    assert len(second.orders) == 2


async def test_an_answer_nobody_has_seen_begins_anew(gateways, connect):
    first, second = gateways
    first.last_word = "one"
    result = await both(connect, gateways).chat("lm", TALK)
    assert result.text == ANSWER
    assert list(second.orders[0].generated_token_ids) == []


async def test_one_target_and_no_policy_draw_no_seed_and_repeat_nothing(gateways, connect):
    gateways[0].last_word = "four"
    with pytest.raises(errors.UnavailableError):
        await connect.to(gateways[0]).chat("lm", TALK)
    assert not gateways[0].orders[0].sampling.HasField("seed")
    assert len(gateways[0].orders) == 1


async def test_a_stream_of_requests_is_not_repeated_but_the_next_goes_elsewhere(gateways, connect):
    first, second = gateways
    first.failures.append((grpc.StatusCode.UNAVAILABLE, "gone", ()))
    client = both(connect, gateways)
    with pytest.raises(errors.UnavailableError):
        _ = [each async for each in client.infer_stream([catenary.InferRequest("net", X)])]
    await client.infer("net", X)
    assert len(second.requests) == 1


def common() -> Connection:
    return Connection("127.0.0.1:1", None, None, False, 1.0, None, RetryPolicy(attempts=1))


@pytest.mark.parametrize(
    ("given", "single"),
    [
        ("a:1", ["a:1"]),
        ("a:1, b:2,", ["a:1", "b:2"]),
        (["a:1", "b:2"], ["a:1", "b:2"]),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", ["ipv4:10.0.0.1:1,10.0.0.2:1"]),
    ],
)
def test_targets_stand_in_a_row(given, single):
    assert split(given) == single


@pytest.mark.parametrize(
    ("targets", "admins", "field"),
    [
        ("", None, "target"),
        ("127.0.0.1:1,example.org:1", None, "target"),
        ("127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "127.0.0.1:8,127.0.0.1:9", "admin_target"),
    ],
)
def test_targets_that_do_not_fit_are_refused(targets, admins, field):
    with pytest.raises(errors.InvalidInputError) as caught:
        targets_of(common(), targets, admins)
    assert caught.value.field == field


def test_each_gateway_has_its_own_admin_port():
    targets = targets_of(common(), "127.0.0.1:1,127.0.0.1:2", "127.0.0.1:8,127.0.0.1:9")
    first = targets.current
    targets.leave(first)
    targets.leave(first)  # another call noticed it, too
    pair = {first.target: first.admin_target, targets.current.target: targets.current.admin_target}
    assert pair == {"127.0.0.1:1": "127.0.0.1:8", "127.0.0.1:2": "127.0.0.1:9"}
