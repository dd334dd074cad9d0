"""Attacks of an agent or a gateway that has a certificate of the cluster, on its scheduler."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import grpc_code
from catenary_services.security.identity import Role
from catenary_services.security.tls import ClientSecurity
from faults.liar import Nonsense
from shared_helpers.control_streams import talking

LIAR = "liar"
"""What the name of every one of them begins with; who lied again and again is held off by name."""
CLUSTER = "main"
_ANSWER_S = 2.0
_PAUSE_S = 0.05
_FAILURE = common_pb2.Failure(reason="UNAVAILABLE", message="no", agent_id=LIAR, retryable=True)
_UP = scheduler_pb2.AgentMessage
_DOWN = scheduler_pb2.GatewayMessage


class Liar:
    """A peer that comes back whenever it is thrown out, until its time is up."""

    def __init__(self, scheduler: str, certs: str, role: str, name: str, seconds: float) -> None:
        self._target = scheduler
        self._name = name
        self._certs = Path(certs)
        self._role = role
        self._end_s = time.monotonic() + seconds
        self.answers: Counter[str] = Counter()

    async def lie(
        self, hello: Callable[[str, int], Any], lies: Callable[[int], Iterable[Any]]
    ) -> None:
        """Says hello, then everything else, on one stream after the other."""
        number = 0
        while time.monotonic() < self._end_s:
            number += 1
            self.answers[await self._stream(hello(self._name, number), lies(number))] += 1
            await asyncio.sleep(_PAUSE_S)

    async def _stream(self, first: Any, lies: Iterable[Any]) -> str:
        """Returns the status with which the scheduler ended a stream, "OK" if it did not."""
        is_agent = self._role == "agent"
        pack = scheduler_pb2.AgentMessages if is_agent else scheduler_pb2.GatewayMessages
        try:
            async with (
                asyncio.timeout(_ANSWER_S),
                talking(self._target, Role(self._role), security=self._security) as end,
            ):
                await end.write(pack(messages=[first]))
                for lie in lies:
                    await end.write(pack(messages=[lie]))
                while await end.read() is not None:
                    pass
        except CatenaryError as refused:
            return grpc_code(refused).name
        except TimeoutError:
            return "DEADLINE_EXCEEDED"
        assert end.error is not None
        return grpc_code(end.error).name

    @property
    def _security(self) -> ClientSecurity:
        stem = self._certs / f"{self._role}-{self._name}"
        return ClientSecurity(
            ca_file=self._certs / "ca.pem",
            cert_file=stem.with_suffix(".pem"),
            key_file=stem.with_name(stem.name + "-key.pem"),
            cluster=CLUSTER,
        )


def _agent(name: str, number: int, **changes: Any) -> scheduler_pb2.AgentMessage:
    known = {
        "agent_id": name,
        "incarnation": number,
        "device": "cpu",
        "device_class": "cpu",
        "peer": common_pb2.Peer(peer_id=name, incarnation=number),
        "memory_bytes": 1,
        "server_id": name,
        "link_bytes_per_second": 10**9,
    }
    return _UP(hello=scheduler_pb2.AgentHello(**{**known, **changes}))


def _gateway(name: str, number: int) -> scheduler_pb2.GatewayMessage:
    peer = common_pb2.Peer(peer_id=name, incarnation=number)
    return _DOWN(hello=scheduler_pb2.GatewayHello(gateway_id=name, incarnation=number, peer=peer))


def _report(batch: int, compute_ns: int) -> scheduler_pb2.AgentMessage:
    return _UP(
        stage_report=scheduler_pb2.StageReport(
            batch_id=batch, compute_ended_ago_ns=1, compute_ns=compute_ns, rows=1
        )
    )


def _of_others(_: int) -> list[Any]:
    failed = [
        _UP(batch_failed=scheduler_pb2.BatchFailed(batch_id=n, failure=_FAILURE))
        for n in range(1, 400)
    ]
    return [*failed, *(_report(n, 1) for n in range(1, 400))]


def _gateways_lies(_: int) -> list[Any]:
    undelivered = [
        _DOWN(delivery_failed=scheduler_pb2.DeliveryFailed(batch_id=n, failure=_FAILURE))
        for n in range(1, 400)
    ]
    ask = scheduler_pb2.SubmitRequest(request_id=1, model="m", rows=2**32 - 1, budget_ns=2**63)
    return [*undelivered, _DOWN(submit=ask)]


def _huge(_: int) -> list[Any]:
    loaded = [scheduler_pb2.PartitionLoaded()] * 1_000_000
    return [_agent(LIAR, 1, partitions=loaded)]


def _nonsense(number: int) -> list[Any]:
    draw, made = Nonsense(random.Random(number)), []
    kinds = [each for each in _UP.DESCRIPTOR.oneofs_by_name["kind"].fields if each.name != "hello"]
    for _ in range(20):
        message = _UP()
        draw.fill(message, draw.draw.choice(kinds))
        made.append(message)
    return made


def _nothing(_: int) -> list[Any]:
    return []


def _times(_: int) -> list[Any]:
    return [_report(1, 1 << 60), _report(1, 2**64 - 1)]


LIES: dict[str, tuple[str, Callable[[str, int], Any], Callable[[int], list[Any]]]] = {
    "an epoch of 2^64-1": ("agent", lambda name, n: _agent(name, n, epoch=2**64 - 1), _nothing),
    "an epoch of 2^53+1": ("agent", lambda name, n: _agent(name, n, epoch=2**53 + 1), _nothing),
    "an epoch that is to come": ("agent", lambda name, n: _agent(name, n, epoch=1 << 24), _nothing),
    "times that cannot be": ("agent", _agent, _times),
    "batches of others": ("agent", _agent, _of_others),
    "a million partitions": ("agent", _agent, _huge),
    "another agent's name": (
        "agent",
        lambda _, n: _agent("agent-0", n),
        _nothing,
    ),
    "nonsense": ("agent", _agent, _nonsense),
    "a gateway that lies": ("gateway", _gateway, _gateways_lies),
}


def identities() -> list[tuple[str, str]]:
    """Returns role and name of everybody who needs a certificate."""
    liars = [(role, _name_of(name)) for name, (role, _, _) in LIES.items()]
    return [*liars, ("agent", f"{LIAR}-storm")]


def _name_of(lie: str) -> str:
    return f"{LIAR}-{list(LIES).index(lie)}"


def lied(scheduler: str, certs: str, name: str, seconds: float) -> Counter[str]:
    """Returns how the scheduler answered so many seconds of one lie."""
    role, hello, lies = LIES[name]
    liar = Liar(scheduler, certs, role, _name_of(name), seconds)
    asyncio.run(liar.lie(hello, lies))
    return liar.answers


def stormed(scheduler: str, certs: str, seconds: float) -> Counter[str]:
    """Returns how the scheduler answered very many hellos of one agent at a time."""
    liars = [Liar(scheduler, certs, "agent", f"{LIAR}-storm", seconds) for _ in range(20)]

    async def all_of_them() -> None:
        storm: list[Awaitable[None]] = [
            each.lie(lambda name, n, at=at: _agent(name, 1_000 * n + at), _nothing)  # type: ignore[misc]
            for at, each in enumerate(liars)
        ]
        await asyncio.gather(*storm)

    asyncio.run(all_of_them())
    return sum((each.answers for each in liars), Counter())
