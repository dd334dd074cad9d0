from __future__ import annotations

import grpc
import numpy as np
import pytest

import catenary_services.errors as served
from catenary import RetryPolicy, errors

X = {"x": np.zeros(1, np.float32)}
QUICK = RetryPolicy(attempts=3, initial_backoff_s=0.001, max_backoff_s=0.01)


def wait(error, attempt=1, remaining_s=10.0, luck=0.0):
    policy = RetryPolicy(attempts=4, initial_backoff_s=0.1, max_backoff_s=0.3)
    return policy.wait_s(error, attempt, remaining_s, luck)


def test_backoff_grows_to_its_limit_and_attempts_end():
    down = errors.UnavailableError("down")
    assert [wait(down, attempt, luck=1.0) for attempt in (1, 2, 3)] == [0.1, 0.2, 0.3]
    assert wait(down, 4) is None
    assert wait(down, 1, luck=0.0) == pytest.approx(0.05)


def test_advice_is_never_cut_short():
    full = errors.OverloadedError("full", retry_after_s=2.0)
    assert wait(full, luck=0.0) == 2.0
    assert wait(full, luck=1.0) == pytest.approx(2.2)


def test_advice_past_the_limit_is_not_waited_for():
    assert wait(errors.OverloadedError("full", retry_after_s=2.0), remaining_s=1.9) is None


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidInputError("bad"),
        errors.OverloadedError("too large for ever"),
        errors.DeadlineExceededError("late"),
        errors.StaleEpochError("old"),
        errors.InternalError("bug"),
    ],
)
def test_what_repeating_does_not_help_is_not_repeated(error):
    assert wait(error) is None


@pytest.mark.parametrize("settings", [{"attempts": 0}, {"max_backoff_s": 0.0}, {"multiplier": 0.5}])
def test_impossible_policies_are_refused(settings):
    with pytest.raises(errors.InvalidInputError) as caught:
        RetryPolicy(**settings)
    assert caught.value.field in settings


async def test_nothing_is_repeated_without_a_policy(server, connect):
    server.failures.append(served.Unavailable("draining"))
    with pytest.raises(errors.UnavailableError):
        await connect.to(server).infer("net", X)
    assert len(server.requests) == 1


async def test_a_repeated_request_keeps_its_id(server, connect):
    server.failures += [
        served.Overloaded("full", retry_after_ns=1_000_000),
        (grpc.StatusCode.UNAVAILABLE, "restarting", ()),
    ]
    result = await connect.to(server, retry=QUICK).infer("net", X)
    assert [request.id for request in server.requests] == [result.id] * 3


async def test_the_last_error_is_raised_when_attempts_run_out(server, connect):
    texts = ("one", "two", "three")
    server.failures += [served.Unavailable(text, retry_after_ns=1_000_000) for text in texts]
    with pytest.raises(errors.UnavailableError, match="three") as caught:
        await connect.to(server, retry=QUICK).infer("net", X, request_id="mine")
    assert caught.value.request_id == "mine"
    assert len(server.requests) == 3


async def test_attempts_share_one_deadline_and_one_slo(server, connect):
    server.failures.append(served.Overloaded("full", retry_after_ns=300_000_000))
    client = connect.to(server, retry=QUICK)
    await client.infer("net", X, slo_ms=5000, timeout_s=3)
    first, second = server.requests
    assert first.parameters["slo_ms"].int64_param == 5000
    assert second.parameters["slo_ms"].int64_param <= 4700
    # gRPC sends timeouts rounded: it reuses an encoded one that is within a few per cent.
    assert server.deadlines[1] <= server.deadlines[0] - 0.15


async def test_advice_beyond_the_slo_is_raised_at_once(server, connect):
    server.failures.append(served.Overloaded("full", retry_after_ns=30_000_000_000))
    with pytest.raises(errors.OverloadedError) as caught:
        await connect.to(server, retry=QUICK).infer("net", X, slo_ms=500)
    assert caught.value.retry_after_s == 30.0
    assert len(server.requests) == 1


async def test_changes_of_the_cluster_are_never_repeated(server, connect):
    server.failures.append(served.Unavailable("between two leaders"))
    with pytest.raises(errors.UnavailableError):
        await connect.to(server, retry=QUICK).deploy("net")
    assert len(server.orders) == 1
