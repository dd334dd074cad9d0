"""An agent measures a link when a scheduler orders it."""

from __future__ import annotations

from catenary_protos.catenary.v1 import scheduler_pb2

Measured = scheduler_pb2.LinkMeasured


def order(number: int, peer: str) -> scheduler_pb2.MeasureLinkTo:
    return scheduler_pb2.MeasureLinkTo(
        number=number, peer_id=peer, most_bytes=1 << 20, deadline_ns=20 * 10**9
    )


async def test_two_agents_without_shared_memory_measure_their_link(bench):
    scheduler = await bench.scheduler()
    await bench.agent(scheduler.port, transports=["tcp"])
    await bench.agent(scheduler.port, agent_id="a-1", transports=["tcp"])
    hellos = await scheduler.wait_for("hello", 2)
    peers = scheduler_pb2.Directory(peers=[hello.peer for hello in hellos])
    await scheduler.tell_all(directory=peers)
    await scheduler.order(measure_link=order(5, hellos[0].agent_id))
    [said] = await scheduler.wait_for("link_measured")
    assert (said.number, said.outcome, said.why) == (5, Measured.OUTCOME_MEASURED, "")
    assert said.round_trip_ns > 0
    assert said.bytes_per_second > 0


async def test_an_agent_says_which_link_it_cannot_measure(bench):
    scheduler = await bench.scheduler()
    await bench.agent(scheduler.port)
    await scheduler.order_when_there(measure_link=order(6, "nobody"))
    [said] = await scheduler.wait_for("link_measured")
    assert (said.number, said.outcome) == (6, Measured.OUTCOME_FAILED)
    assert said.why == "nobody is in no directory"
