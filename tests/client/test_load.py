from __future__ import annotations

import asyncio
import threading
from collections import Counter

import numpy as np
import pytest

import catenary
from catenary import InferRequest, InvalidInputError
from catenary.load import NOT_SENT, LoadReport, LoadSettings, run_load

REQUEST = InferRequest("net", {"x": np.zeros(2, np.float32)})


def test_percentiles_are_nearest_rank():
    report = LoadReport(latencies_ms=[float(n) for n in range(100, 0, -1)])
    found = [report.percentile_ms(percent) for percent in (1, 50, 99, 100)]
    assert found == [1.0, 50.0, 99.0, 100.0]
    assert LoadReport().percentile_ms(50) is None


def test_attainment_counts_failures_as_missed():
    report = LoadReport(latencies_ms=[10.0, 30.0], slo_ms=20.0)
    report.errors["OVERLOADED"] = 2
    assert (report.requests, report.attainment) == (4, 0.25)
    assert LoadReport(latencies_ms=[1.0]).attainment is None


def test_a_report_tells_late_from_refused_and_leaves_its_own_mistakes_out():
    report = LoadReport(latencies_ms=[10.0, 30.0], slo_ms=20.0)
    report.errors.update({"OVERLOADED": 3, "DEADLINE_EXCEEDED": 2, "INVALID_INPUT": 4})
    report.errors[NOT_SENT] = 1
    assert (report.good, report.late, report.refused, report.client) == (1, 4, 3, 4)
    assert report.attainment == 1 / 8
    facts = report.facts()
    assert [facts[name] for name in ("good", "late", "refused", "client")] == [1, 4, 3, 4]
    without = LoadReport(latencies_ms=[10.0, 30.0], errors=Counter({"OVERLOADED": 1}))
    assert (without.good, without.late, without.refused) == (2, 0, 1)


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"rate": -1.0}, {"concurrency": 0}])
def test_impossible_settings_are_named(wrong):
    with pytest.raises(InvalidInputError) as caught:
        LoadSettings(**{"seconds": 1.0, **wrong})
    assert caught.value.field in wrong


async def test_callers_of_the_closed_loop_wait_for_their_answers(server):
    lock, inside, most = threading.Lock(), 0, 0
    echo = server.reply

    def reply(request):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        answer = echo(request)
        with lock:
            inside -= 1
        return answer

    server.reply = reply
    async with catenary.AsyncClient(server.target) as client:
        report = await run_load(client, REQUEST, LoadSettings(0.3, concurrency=3))
    assert report.requests == len(server.requests)
    assert most <= 3
    assert len({request.id for request in server.requests}) == report.requests


async def test_open_loop_arrivals_do_not_wait_for_a_stalled_server(server):
    server.go.clear()
    async with catenary.AsyncClient(server.target) as client:
        load = asyncio.create_task(run_load(client, REQUEST, LoadSettings(0.5, rate=40, seed=1)))
        assert await asyncio.to_thread(server.waiting.wait, 5)
        # Sixteen requests occupy every thread of the server while none is answered.
        async with asyncio.timeout(30):
            while len(server.requests) < 8:
                await asyncio.sleep(0.01)
        server.go.set()
        report = await load
    assert not report.errors
    # The stall shows: the first requests waited for the eighth to arrive.
    assert report.percentile_ms(100) > 50
    assert 5 <= report.requests <= 60
