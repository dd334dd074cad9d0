"""Links between two agents are measured over real connections, also slow and distant ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from catenary_agent.engine.reporting import OutgoingMessage
from catenary_agent.links.link_echoes import ANSWER, LinkEchoes
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2
from catenary_services.transport.frames import read_header
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.interface import EndpointAddress, ReceivedFrame
from catenary_services.transport.settings import TransportSettings

Measured = scheduler_pb2.LinkMeasured
MIB = 1 << 20
STEP_BYTES = 64 << 10


class SlowWire:
    """A relay in front of an agent, which carries so many bytes a second after a delay.

    Every piece leaves at the earliest when all pieces before it could have been carried, so a busy
    machine makes it slower and never faster.
    """

    def __init__(self, port: int, bytes_per_second: float, delay_s: float) -> None:
        self._port = port
        self._rate = bytes_per_second
        self._delay_s = delay_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=STEP_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port, limit=STEP_BYTES)
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.get_running_loop().create_task(self._carry(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(4096)

        async def deliver() -> None:
            while True:
                moment_s, piece = await under_way.get()
                await asyncio.sleep(max(0.0, moment_s - loop.time()))
                target.write(piece)
                await target.drain()

        delivering = loop.create_task(deliver())
        free_s = loop.time()
        try:
            while piece := await source.read(STEP_BYTES):
                free_s = max(free_s, loop.time()) + len(piece) / self._rate
                await under_way.put((free_s + self._delay_s, piece))
                await asyncio.sleep(max(0.0, free_s - loop.time()))
        finally:
            delivering.cancel()
            target.close()


@dataclass
class Agents:
    """Two agents whose frames take TCP, and what they told the scheduler."""

    hubs: dict[str, TransportHub] = field(default_factory=dict)
    echoes: dict[str, LinkEchoes] = field(default_factory=dict)
    told: asyncio.Queue[Measured] = field(default_factory=asyncio.Queue)
    busy: set[str] = field(default_factory=set)
    answers: int = 0

    async def measured(self, **changes: object) -> Measured:
        """Has the first agent measure the link to the second one."""
        order = scheduler_pb2.MeasureLinkTo(
            number=7, peer_id="second", most_bytes=16 * MIB, deadline_ns=50 * 10**9
        )
        for name, value in changes.items():
            setattr(order, name, value)
        self.echoes["first"].measure(order)
        return await asyncio.wait_for(self.told.get(), 60)


async def repeated(made: Agents) -> AsyncIterator[Measured]:
    """Yields measurements until one is good: what else this machine does makes them worse."""
    async with asyncio.timeout(200):
        while True:
            yield await made.measured()


Connected = Callable[..., object]


@pytest.fixture
async def connect(tmp_path: Path) -> AsyncIterator[Connected]:
    """Returns a function that starts two agents, over a slow wire if a rate is given."""
    async with AsyncExitStack() as stack:

        async def start(
            bytes_per_second: float = 0.0,
            delay_s: float = 0.0,
            transports: tuple[str, ...] = ("tcp",),
        ) -> Agents:
            made = Agents()
            settings = TransportSettings(enabled=transports, runtime_dir=tmp_path)
            for name in ("first", "second"):
                hub = made.hubs[name] = TransportHub(name, replace(settings))
                echoes = LinkEchoes(hub, _telling(made), lambda name=name: name in made.busy)
                made.echoes[name] = echoes
                await hub.start(_handing(made, echoes))
                stack.push_async_callback(hub.close)
                stack.push_async_callback(echoes.close)
            peers = []
            for name, hub in made.hubs.items():
                addresses = []
                for each in hub.addresses:
                    address = each
                    if bytes_per_second and each.transport == "tcp":
                        port = int(each.address.rpartition(":")[2])
                        wire = SlowWire(port, bytes_per_second, delay_s)
                        await wire.start()
                        stack.push_async_callback(wire.close)
                        address = EndpointAddress("tcp", f"127.0.0.1:{wire.port}", each.host_id)
                    addresses.append(
                        common_pb2.TransportAddress(
                            transport=address.transport,
                            address=address.address,
                            host_id=address.host_id,
                        )
                    )
                peers.append(common_pb2.Peer(peer_id=name, incarnation=1, addresses=addresses))
            for hub in made.hubs.values():
                hub.update_directory(peers)
            return made

        yield start


def _telling(made: Agents) -> Callable[[OutgoingMessage], None]:
    return lambda message: made.told.put_nowait(message.message().link_measured)


def _handing(made: Agents, echoes: LinkEchoes) -> Callable[[ReceivedFrame], None]:
    def hand(frame: ReceivedFrame) -> None:
        header = read_header(frame)
        made.answers += header.kind == ANSWER
        echoes.on_frame(header, frame)

    return hand


@pytest.mark.parametrize(
    ("bytes_per_second", "delay_s"), [(6_250_000, 0.0), (2_500_000, 0.02), (400_000, 0.0)]
)
async def test_a_slow_link_is_measured_as_slow_and_as_distant_as_it_is(
    connect: Connected, bytes_per_second: int, delay_s: float
) -> None:
    made = await connect(bytes_per_second, delay_s)
    async for said in repeated(made):
        assert (said.outcome, said.number) == (Measured.OUTCOME_MEASURED, 7)
        assert said.bytes_per_second <= bytes_per_second
        assert said.round_trip_ns >= 2 * delay_s * 1e9
        if said.bytes_per_second >= bytes_per_second * 0.4:
            break


async def test_a_fast_link_is_not_taken_for_a_slow_one(connect: Connected) -> None:
    made = await connect()
    async for said in repeated(made):
        assert said.outcome == Measured.OUTCOME_MEASURED
        assert said.round_trip_ns > 0
        if said.bytes_per_second > 125_000_000 and said.round_trip_ns < 20_000_000:
            break


async def test_between_processes_of_one_host_nothing_is_measured(connect: Connected) -> None:
    made = await connect(transports=("shm", "tcp"))
    said = await made.measured()
    assert said.outcome == Measured.OUTCOME_SAME_HOST
    assert (made.answers, said.bytes_per_second, said.round_trip_ns) == (0, 0, 0)


@pytest.mark.parametrize("at_work", ["first", "second"])
async def test_while_one_of_the_two_is_at_work_it_is_put_off_unless_the_scheduler_insists(
    connect: Connected, at_work: str
) -> None:
    made = await connect()
    made.busy.add(at_work)
    assert (await made.measured()).outcome == Measured.OUTCOME_BUSY
    assert made.answers <= 1
    assert (await made.measured(even_if_busy=True)).outcome == Measured.OUTCOME_MEASURED


async def test_a_peer_that_is_in_no_directory_or_silent_is_an_answer_too(
    connect: Connected,
) -> None:
    made = await connect()
    said = await made.measured(peer_id="nobody")
    assert (said.outcome, said.why) == (Measured.OUTCOME_FAILED, "nobody is in no directory")
    made.echoes["second"].on_frame = lambda header, frame: frame.release()  # type: ignore[method-assign]
    said = await made.measured(deadline_ns=300_000_000)
    assert (said.outcome, said.why) == (Measured.OUTCOME_FAILED, "no echo came in time")


async def test_a_newer_order_takes_the_place_of_the_one_under_way(connect: Connected) -> None:
    made = await connect(bytes_per_second=100_000)
    order = scheduler_pb2.MeasureLinkTo(
        number=1, peer_id="second", most_bytes=MIB, deadline_ns=60 * 10**9
    )
    made.echoes["first"].measure(order)
    await asyncio.sleep(0.1)
    said = await made.measured(most_bytes=1000)
    assert (said.number, said.outcome) == (7, Measured.OUTCOME_MEASURED)
    assert made.told.empty()


async def test_echoes_nobody_waits_for_and_floods_of_requests_are_harmless(
    connect: Connected,
) -> None:
    made = await connect()
    link = await made.hubs["second"].link_to("first", 10.0)
    stray = frame_pb2.FrameHeader(kind=ANSWER, echo_answer=frame_pb2.EchoAnswer(number=3))
    request = frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_ECHO_REQUEST, echo_request=frame_pb2.EchoRequest(number=1)
    )
    for header in (stray, *[request] * 300):
        slot = await link.export(0, 10.0)
        await link.push(slot, header.SerializeToString(), 10.0)
    assert len(made.echoes["first"]._answering) <= 1
    assert (await made.measured()).outcome == Measured.OUTCOME_MEASURED
