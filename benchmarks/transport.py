"""Cost of a feature map from one process to another, per transport, in memcpys of it.

`python benchmarks/transport.py [--quick] [--strict] [--json]`

There are two real processes. The sender copies 10 MB from a NumPy array into a slot and pushes it;
the receiver makes an array of the payload, releases it and sends an empty frame back. All
transports and the memcpy they are compared with take turns within one run, so that a busy machine
slows all of them alike; figures are medians. Small frames are a 200-byte header there, and one
back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import numpy as np

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from source_roots import SOURCE_ROOTS  # noqa: E402

sys.path[:0] = SOURCE_ROOTS

from catenary_protos.catenary.v1.common_pb2 import Peer, TransportAddress  # noqa: E402
from catenary_services.log import configure_logging  # noqa: E402
from catenary_services.transport.hub import TransportHub, TransportSettings  # noqa: E402
from catenary_services.transport.interface import EndpointAddress, ReceivedFrame  # noqa: E402

TRANSPORTS = ("shm", "tcp", "grpc")
LIMITS = {"shm": 1.5, "tcp": 3.5, "grpc": 12.0}
BULK_BYTES = 10_000_000
HEADER = bytes(200)
_TIMEOUT_S = 20.0
_RUN_TIMEOUT_S = 120.0


class Figure(TypedDict):
    """One measured figure, and the limit it must keep."""

    name: str
    value: float
    unit: str
    limit: float | None
    ok: bool


def _hub(side: str, transport: str, folder: Path) -> TransportHub:
    settings = TransportSettings(enabled=(transport,), runtime_dir=folder)
    return TransportHub(f"{side}-{transport}", settings)


def _peer(peer_id: str, addresses: Sequence[EndpointAddress]) -> Peer:
    listed = [
        TransportAddress(transport=a.transport, address=a.address, host_id=a.host_id)
        for a in addresses
    ]
    return Peer(peer_id=peer_id, incarnation=1, addresses=listed)


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
    print(
        json.dumps(
            {
                n: _peer(f"receiver-{n}", h.addresses).SerializeToString().hex()
                for n, h in hubs.items()
            }
        ),
        flush=True,
    )
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
        __file__,
        "--receive",
        str(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        peers = json.loads(await asyncio.wait_for(child.stdout.readline(), _TIMEOUT_S))
        mine = {
            s.name: _peer(f"sender-{s.name}", s.hub.addresses).SerializeToString().hex()
            for s in senders
        }
        child.stdin.write(json.dumps(mine).encode() + b"\n")
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
    """Measures every transport.

    Args:
        quick: Whether to repeat less, for a smoke test of the benchmark itself.

    Returns:
        The figures; those without a limit are for information.
    """
    rounds, count = (15, 200) if quick else (60, 1500)
    with tempfile.TemporaryDirectory(prefix="catenary-bench-") as folder, _loop_runner() as runner:
        memcpy_s, senders = runner.run(_measure(Path(folder), rounds, count))
    base = statistics.median(memcpy_s)
    figures = [_figure("memcpy of 10 MB", base * 1e3, "ms")]
    for sender in senders:
        bulk = statistics.median(sender.bulk_s)
        small = statistics.median(sender.small_s)
        figures += [
            _figure(f"{sender.name} 10 MB", bulk / base, "x memcpy", LIMITS[sender.name]),
            _figure(f"{sender.name} 10 MB time", bulk * 1e3, "ms"),
            _figure(f"{sender.name} small round trip", small * 1e6, "us"),
            _figure(f"{sender.name} small CPU, both sides", sender.small_cpu_s * 1e6, "us"),
        ]
    return figures


def _figure(name: str, value: float, unit: str, limit: float | None = None) -> Figure:
    ok = limit is None or value <= limit
    return Figure(name=name, value=round(value, 3), unit=unit, limit=limit, ok=ok)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a limit is missed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--receive", metavar="FOLDER", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    # Standard output carries the figures (and, in the receiver, its addresses); nothing else may.
    configure_logging("benchmark", "transport", "warning", as_json=False)
    if chosen.receive:
        with _loop_runner() as runner:
            runner.run(_receive(Path(chosen.receive)))
        return 0
    figures = run(chosen.quick)
    if chosen.json:
        print(json.dumps(figures, indent=2))
    else:
        for figure in figures:
            limit = "" if figure["limit"] is None else f"limit {figure['limit']:g}"
            mark = "" if figure["ok"] else "MISSED"
            print(f"{figure['name']:34}{figure['value']:10.2f} {figure['unit']:10}{limit:12}{mark}")
    return 1 if chosen.strict and not all(figure["ok"] for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
