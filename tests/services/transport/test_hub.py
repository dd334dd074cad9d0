"""Choosing a transport per peer, falling back, and reconnecting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from catenary_protos.catenary.v1.common_pb2 import Peer, TransportAddress
from catenary_services.errors import InvalidInput, PartitionLost
from catenary_services.transport.hub import TransportHub, TransportSettings
from tests.services.transport.peers import Inbox, Spawn

OpenHub = Callable[..., Awaitable[TransportHub]]


@pytest.fixture
async def open_hub(tmp_path: Path) -> AsyncIterator[OpenHub]:
    hubs: list[TransportHub] = []

    async def make(
        peer_id: str, *transports: str, handler: Inbox | None = None, folder: str = "run"
    ) -> TransportHub:
        enabled = transports or ("shm", "tcp", "grpc")
        hub = TransportHub(peer_id, TransportSettings(enabled, runtime_dir=tmp_path / folder))
        await hub.start(handler or Inbox())
        hubs.append(hub)
        return hub

    yield make
    for hub in hubs:
        await hub.close()


def listed(peer_id: str, hub: TransportHub, incarnation: int = 1, host_id: str = "") -> Peer:
    addresses = [
        TransportAddress(transport=a.transport, address=a.address, host_id=host_id or a.host_id)
        for a in hub.addresses
    ]
    return Peer(peer_id=peer_id, incarnation=incarnation, addresses=addresses)


async def deliver(hub: TransportHub, peer_id: str, header: bytes) -> None:
    link = await hub.link_to(peer_id, 5)
    await link.push(await link.export(0, 1), header, 5)


async def test_every_enabled_transport_has_an_address(open_hub: OpenHub) -> None:
    hub = await open_hub("a")
    assert [address.transport for address in hub.addresses] == ["shm", "tcp", "grpc"]


@pytest.mark.parametrize("enabled", [(), ("carrier-pigeon",)])
def test_unknown_or_no_transports_are_refused(enabled: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match="transports"):
        TransportHub("a", TransportSettings(enabled))


@pytest.mark.parametrize(
    ("theirs", "chosen"),
    [
        (("shm", "tcp", "grpc"), "shm"),
        (("grpc", "tcp"), "tcp"),
        (("grpc",), "grpc"),
    ],
)
async def test_the_best_common_transport_is_chosen(
    open_hub: OpenHub, theirs: tuple[str, ...], chosen: str
) -> None:
    inbox = Inbox()
    a, b = await open_hub("a"), await open_hub("b", *theirs, handler=inbox)
    a.update_directory([listed("b", b)])
    link = await a.link_to("b", 5)
    assert link.capabilities.transport == chosen
    assert await a.link_to("b", 5) is link
    await deliver(a, "b", b"hello")
    assert (await inbox.next()).header == b"hello"


async def test_a_peer_on_another_host_is_not_reached_through_memory(open_hub: OpenHub) -> None:
    a, b = await open_hub("a"), await open_hub("b")
    a.update_directory([listed("b", b, host_id="elsewhere")])
    assert (await a.link_to("b", 5)).capabilities.transport == "tcp"


async def test_peers_of_this_host_are_those_that_listen_on_it(open_hub: OpenHub) -> None:
    a, b = await open_hub("a"), await open_hub("b")
    a.update_directory([listed("b", b), listed("c", b, host_id="elsewhere")])
    assert [each for each in ("b", "c", "unknown") if a.is_local(each)] == ["b"]


async def test_an_unreachable_socket_falls_back_to_tcp(open_hub: OpenHub, tmp_path: Path) -> None:
    a, b = await open_hub("a"), await open_hub("b")
    next((tmp_path / "run").glob("b.*")).unlink()  # another container, say
    a.update_directory([listed("b", b)])
    assert (await a.link_to("b", 5)).capabilities.transport == "tcp"


async def test_somebody_else_at_a_reused_address_is_not_sent_to(open_hub: OpenHub) -> None:
    a, other = await open_hub("a"), await open_hub("other")
    a.update_directory([listed("b", other)])
    with pytest.raises(PartitionLost, match="somebody else"):
        await a.link_to("b", 5)


async def test_unknown_and_unreachable_peers_are_lost(open_hub: OpenHub) -> None:
    a, b = await open_hub("a"), await open_hub("b")
    with pytest.raises(PartitionLost, match="directory"):
        await a.link_to("b", 5)
    a.update_directory([listed("b", b)])
    await b.close()
    with pytest.raises(PartitionLost, match="cannot be reached"):
        await a.link_to("b", 5)


async def test_many_callers_share_one_connection(open_hub: OpenHub) -> None:
    a, b = await open_hub("a"), await open_hub("b")
    a.update_directory([listed("b", b)])
    links = await asyncio.gather(*(a.link_to("b", 5) for _ in range(20)))
    assert len(set(map(id, links))) == 1


async def test_a_restarted_peer_is_reached_at_its_new_address(open_hub: OpenHub) -> None:
    inbox = Inbox()
    a, first = await open_hub("a"), await open_hub("b", folder="first")
    a.update_directory([listed("b", first)])
    old = await a.link_to("b", 5)
    second = await open_hub("b", handler=inbox, folder="second")
    a.update_directory([listed("b", second, incarnation=2)])
    new = await a.link_to("b", 5)
    assert new is not old
    assert old.closed
    await deliver(a, "b", b"to the second")
    assert (await inbox.next()).header == b"to the second"


async def test_a_broken_link_is_made_again(open_hub: OpenHub) -> None:
    a, b = await open_hub("a"), await open_hub("b", "tcp")
    a.update_directory([listed("b", b)])
    link = await a.link_to("b", 5)
    await link.close()
    again = await a.link_to("b", 5)
    assert not again.closed
    assert again is not link


async def test_a_peer_missing_from_the_directory_keeps_its_link_but_gets_no_new_one(
    open_hub: OpenHub,
) -> None:
    a, b = await open_hub("a"), await open_hub("b")
    a.update_directory([listed("b", b)])
    link = await a.link_to("b", 5)
    a.update_directory([])
    assert await a.link_to("b", 5) is link
    await link.close()
    with pytest.raises(PartitionLost):
        await a.link_to("b", 5)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_a_killed_peer_is_lost_and_its_successor_is_found(
    open_hub: OpenHub, spawn: Spawn, tmp_path: Path, transport: str
) -> None:
    a = await open_hub("a", transport)

    async def started(incarnation: int) -> None:
        foreign = await spawn(transport, tmp_path / "run")
        address = TransportAddress(
            transport=transport, address=foreign.address.address, host_id=foreign.address.host_id
        )
        a.update_directory([Peer(peer_id="foreign", incarnation=incarnation, addresses=[address])])
        await deliver(a, "foreign", b"frame")
        assert await foreign.received() == b"0\n"
        await foreign.kill()

    await started(1)

    async def deliver_without_end() -> None:
        while True:  # until the kernel has told this process
            await deliver(a, "foreign", b"too late")
            await asyncio.sleep(0.05)

    with pytest.raises(PartitionLost):
        await asyncio.wait_for(deliver_without_end(), 30)
    await started(2)
