"""An agent among epochs that cannot be: it obeys none, and comes free of one it obeyed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from catenary_agent.control import ControlTimeouts, SchedulerLink
from catenary_agent.outbox import Outbox
from catenary_protos.catenary.v1 import scheduler_pb2, scheduler_pb2_grpc
from catenary_services.domain.groups import EPOCH_FIELD, EPOCH_LIMIT
from catenary_services.errors import InvalidInput
from catenary_services.security.tls import ClientSecurity
from shared_helpers.control_streams import ScriptedEnd, ScriptedEndpoint

Message = scheduler_pb2.SchedulerToAgentMessage


class Obeys:
    """Has seen an epoch, and obeys nothing else."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.forgotten = 0

    def raise_epoch(self, epoch: int) -> None:
        self.epoch = max(self.epoch, epoch)

    def forget_epoch(self) -> None:
        self.epoch = 0
        self.forgotten += 1

    def hello(self) -> scheduler_pb2.AgentHello:
        return scheduler_pb2.AgentHello(agent_id="agent-0", epoch=self.epoch)

    def obey(self, message: Any) -> None:
        raise AssertionError(f"nothing is ordered here: {message}")

    def refused(self) -> None:
        """Of no interest."""


class Leader(ScriptedEndpoint):
    """Leads an epoch, and refuses who obeys one that is far away."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch
        self.claims: list[int] = []

    async def serve(self, end: ScriptedEnd) -> None:
        first = await end.read()
        claimed = first.messages[0].hello.epoch
        self.claims.append(claimed)
        if claimed > self.epoch + 2**32:
            raise InvalidInput(EPOCH_FIELD, f"{claimed} cannot be true here")
        welcome = scheduler_pb2.Welcome(epoch=self.epoch, leader="s/1")
        await end.write(scheduler_pb2.SchedulerToAgentMessages(messages=[Message(welcome=welcome)]))
        while await end.read() is not None:
            pass


@asynccontextmanager
async def led(leader: Leader, orders: Obeys) -> AsyncIterator[SchedulerLink]:
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(leader, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await leader.listen()
    control = SchedulerLink(
        [f"127.0.0.1:{port}"],
        ClientSecurity(insecure=True),
        orders,
        Outbox(),
        ControlTimeouts(silence_s=30.0),
    )
    task = asyncio.create_task(control.run())
    try:
        yield control
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await leader.hang_up()
        await server.stop(grace=0)


async def test_an_epoch_that_the_leader_calls_impossible_is_forgotten() -> None:
    leader, orders = Leader(3), Obeys(2**39)
    async with led(leader, orders) as control, asyncio.timeout(20):
        await control.connected.wait()
    assert leader.claims == [2**39, 0]
    assert (orders.epoch, orders.forgotten) == (3, 1)


@pytest.mark.parametrize("epoch", [EPOCH_LIMIT, 2**53 + 1, 2**64 - 1])
async def test_an_epoch_that_cannot_be_is_never_obeyed(epoch: int) -> None:
    leader, orders = Leader(epoch), Obeys(5)
    async with led(leader, orders) as control, asyncio.timeout(20):
        while len(leader.claims) < 3:
            await asyncio.sleep(0.01)
        assert not control.connected.is_set()
    assert orders.epoch == 5
