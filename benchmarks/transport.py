"""Cost of a feature map from one process to another, per transport, in memcpys of it.

There are two real processes. The sender copies 10 MB from a NumPy array into a slot and pushes it;
the receiver makes an array of the payload, releases it and sends an empty frame back. All
transports and the memcpy they are compared with take turns within one run, so that a busy machine
slows all of them alike; figures are medians. Small frames are a 200-byte header there, and one
back.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from catenary_lab.limits import Figure, at_most
from catenary_protos.catenary.v1.common_pb2 import Peer, TransportAddress
from catenary_services.log import configure_logging
from catenary_services.transport.hub import TransportHub, TransportSettings
from catenary_services.transport.interface import ReceivedFrame

TRANSPORTS = ("shm", "tcp", "grpc")
LIMITS = {"shm": 1.5, "tcp": 3.5, "grpc": 12.0}
BULK_BYTES = 10_000_000
HEADER = bytes(200)
_TIMEOUT_S = 20.0
_RUN_TIMEOUT_S = 120.0


def _hub(side: str, transport: str, folder: Path) -> TransportHub:
    settings = TransportSettings(enabled=(transport,), runtime_dir=folder)
    return TransportHub(f"{side}-{transport}", settings)


def peer_of(name: str, hub: TransportHub) -> Peer:
    """Returns the entry of a process in the directory of its peers."""
    listed = [
        TransportAddress(transport=a.transport, address=a.address, host_id=a.host_id)
        for a in hub.addresses
    ]
    return Peer(peer_id=name, incarnation=1, addresses=listed)


def _written(side: str, hubs: Iterable[tuple[str, TransportHub]]) -> str:
    """Returns the peers of one side by transport, on a line."""
    peers = {name: peer_of(f"{side}-{name}", hub) for name, hub in hubs}
    return json.dumps({name: peer.SerializeToString().hex() for name, peer in peers.items()})


def _loop_runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


# ---- the receiving process ----


async def _receive(folder: Path) -> None:
    """Answers every frame with an empty one that says how much CPU time this process has used."""
    hubs = {name: _hub("receiver", name, folder) for name in TRANSPORTS}
    answers: asyncio.Queue[str] = asyncio.Queue()

    def handler_of(name: str) -> object:
        def handler(frame: ReceivedFrame) -> None:
            array = np.frombuffer(frame.payload, np.uint8)
            if len(array) and array[-1] != array[0]:
                raise ValueError("the payload is torn")
            del array
            frame.release()
            answers.put_nowait(name)

        return handler

    for name, hub in hubs.items():
        await hub.start(handler_of(name))  # type: ignore[arg-type]
    print(_written("receiver", hubs.items()), flush=True)
    loop = asyncio.get_running_loop()
    senders = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    for name, hub in hubs.items():
        hub.update_directory([Peer.FromString(bytes.fromhex(senders[name]))])
    ended = loop.run_in_executor(None, sys.stdin.readline)
    ended.add_done_callback(lambda _: answers.put_nowait(""))
    while name := await answers.get():
        link = await hubs[name].link_to(f"sender-{name}", _TIMEOUT_S)
        slot = await link.export(0, _TIMEOUT_S)
        await link.push(slot, str(time.process_time_ns()).encode(), _TIMEOUT_S)
    for hub in hubs.values():
        await hub.close()


# ---- the sending process ----


@dataclass
class _Sender:
    name: str
    hub: TransportHub
    answers: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    bulk_s: list[float] = field(default_factory=list)
    small_s: list[float] = field(default_factory=list)
    small_cpu_s: float = 0.0

    def on_frame(self, frame: ReceivedFrame) -> None:
        self.answers.put_nowait(int(frame.header))
        frame.release()

    async def send(self, data: np.ndarray | None) -> int:
        """Sends `data` and waits for the answer; returns the receiver's CPU time."""
        link = await self.hub.link_to(f"receiver-{self.name}", _TIMEOUT_S)
        slot = await link.export(0 if data is None else data.nbytes, _TIMEOUT_S)
        if data is not None:
            np.frombuffer(slot.view, np.uint8)[:] = data
        await link.push(slot, HEADER, _TIMEOUT_S)
        return await self.answers.get()


async def _measure(folder: Path, rounds: int, small: int) -> tuple[list[float], list[_Sender]]:
    senders = [_Sender(name, _hub("sender", name, folder)) for name in TRANSPORTS]
    for sender in senders:
        await sender.hub.start(sender.on_frame)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.transport",
        str(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        peers = json.loads(await asyncio.wait_for(child.stdout.readline(), _TIMEOUT_S))
        mine = _written("sender", ((each.name, each.hub) for each in senders))
        child.stdin.write(mine.encode() + b"\n")
        for sender in senders:
            sender.hub.update_directory([Peer.FromString(bytes.fromhex(peers[sender.name]))])
        async with asyncio.timeout(_RUN_TIMEOUT_S):
            memcpy_s = await _take_turns(senders, rounds)
            for sender in senders:
                await _measure_small(sender, small)
    finally:
        child.stdin.close()
        for sender in senders:
            await sender.hub.close()
        try:
            await asyncio.wait_for(child.wait(), 5)
        except TimeoutError:
            child.kill()
            await child.wait()
    return memcpy_s, senders


async def _take_turns(senders: list[_Sender], rounds: int) -> list[float]:
    source = np.zeros(BULK_BYTES, np.uint8)
    source[:] = np.random.default_rng(0).integers(0, 255, BULK_BYTES, np.uint8)
    source[-1] = source[0]
    target = np.ones(BULK_BYTES, np.uint8)
    memcpy_s: list[float] = []
    for turn in range(-3, rounds):
        begin = time.perf_counter()
        target[:] = source
        if turn >= 0:  # the first ones open links and make memory
            memcpy_s.append(time.perf_counter() - begin)
        for sender in senders:
            begin = time.perf_counter()
            await sender.send(source)
            if turn >= 0:
                sender.bulk_s.append(time.perf_counter() - begin)
    return memcpy_s


async def _measure_small(sender: _Sender, count: int) -> None:
    for _ in range(20):
        theirs = await sender.send(None)
    mine = time.process_time_ns()
    for _ in range(count):
        begin = time.perf_counter()
        cpu = await sender.send(None)
        sender.small_s.append(time.perf_counter() - begin)
    sender.small_cpu_s = (cpu - theirs + time.process_time_ns() - mine) / count / 1e9


def run(quick: bool) -> list[Figure]:
    """Returns the figures of every transport."""
    rounds, count = (15, 200) if quick else (60, 1500)
    with tempfile.TemporaryDirectory(prefix="catenary-bench-") as folder, _loop_runner() as runner:
        memcpy_s, senders = runner.run(_measure(Path(folder), rounds, count))
    base = statistics.median(memcpy_s)
    figures = [at_most("memcpy of 10 MB", base * 1e3, "ms")]
    for sender in senders:
        bulk = statistics.median(sender.bulk_s)
        small = statistics.median(sender.small_s)
        figures += [
            at_most(f"{sender.name} 10 MB", bulk / base, "x memcpy", LIMITS[sender.name]),
            at_most(f"{sender.name} 10 MB time", bulk * 1e3, "ms"),
            at_most(f"{sender.name} small round trip", small * 1e6, "us"),
            at_most(f"{sender.name} small CPU, both sides", sender.small_cpu_s * 1e6, "us"),
        ]
    return figures


if __name__ == "__main__":
    # Standard output carries the receiver's addresses; nothing else may.
    configure_logging("benchmark", "transport", "warning", as_json=False)
    with _loop_runner() as receiver:
        receiver.run(_receive(Path(sys.argv[1])))
