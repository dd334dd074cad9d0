"""What may not be left of a run: reservations, sessions, descriptors, threads, processes, files."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass

import psutil

import catenary
from catenary_agent.partitioning.parts import CACHE_FOLDER
from fault_cluster import Member, status_or_none
from faults.world import World

_EMPTY = {
    "gateway": ("requests_in_flight", "in_flight_bytes", "sessions_running", "sessions_waiting"),
    "agent": ("generation_sessions", "block_slots_used", "queued_batches"),
    "scheduler": (
        "live_reservations",
        "batches_in_flight",
        "redis_pending_changes",
        "queued_requests",
    ),
}
"""Metrics that are 0 at every process that has nothing to do."""
_MORE_FDS, _MORE_THREADS = 12, 6
"""Pools that grow with use; a leak of one a fault is more."""
_FOREIGN = {".ses"}
"""ONNX Runtime keeps the number of its telemetry session there."""
_TRACEBACK = "Traceback (most recent call last)"
_IDLE_S = 30.0
_AUDITS = 2


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process has open."""

    rss: int
    fds: int
    threads: int


def usage(world: World) -> dict[str, Usage]:
    """Returns what every running process has open, Redis too."""
    pids = {name: each.pid for name, each in world.members.items() if each.is_running}
    if world.redis.process is not None and world.redis.process.poll() is None:
        pids["redis"] = world.redis.process.pid
    found = {}
    for name, pid in pids.items():
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                found[name] = Usage(
                    process.memory_info().rss, process.num_fds(), process.num_threads()
                )
        except psutil.NoSuchProcess:
            continue
    return found


def files_left(world: World) -> set[str]:
    """Returns temporary files, unfinished parts and sockets of processes that have ended."""
    found = set(world.temporary.iterdir()) if world.temporary.is_dir() else set()
    found |= {each for each in (world.folder / "run").rglob("*") if each.is_socket()}
    hidden = (world.folder / "models").glob(f"*/*/*/{CACHE_FOLDER}/.*")
    found |= {each for each in hidden if each.suffix != ".lock"}  # they stay, one for each part
    return {str(each.relative_to(world.folder)) for each in found if each.name not in _FOREIGN}


async def what_is_held(world: World) -> list[str]:
    """Waits until nothing is booked, queued or held anywhere, over two audits; returns what is."""
    deadline = asyncio.get_running_loop().time() + _IDLE_S
    left: list[str] = []
    audits_then: int | None = None
    while asyncio.get_running_loop().time() < deadline:
        status = await status_or_none(world.admin)
        left = ["no scheduler leads"] if status is None else _left(status)
        left += await _metrics_left(world)
        if left:
            audits_then = None
        elif audits_then is None:
            audits_then = status.audits if status is not None else 0
        elif status is not None and status.audits >= audits_then + _AUDITS:
            return []
        await asyncio.sleep(0.3)
    return left or ["the book was not audited"]


def _left(status: catenary.ClusterStatus) -> list[str]:
    counts = {
        "reservations": status.live_reservations,
        "batches in flight": status.batches_in_flight,
        "sessions": status.sessions_in_flight,
        "queued requests": status.queued_requests,
        "block slots": sum(agent.used_block_slots for agent in status.agents),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


async def _metrics_left(world: World) -> list[str]:
    left = []
    for name, member in world.members.items():
        try:
            text = await world.cluster.metrics(name)
        except OSError as error:
            left.append(f"{name} has no metrics: {error}")
            continue
        for metric in _EMPTY[member.kind]:
            found = re.findall(rf"^catenary_{metric}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
            if total := sum(map(float, found)):
                left.append(f"{name}: {metric} {total:g}")
    return left


def what_grew(before: dict[str, Usage], after: dict[str, Usage]) -> list[str]:
    """Returns processes with more descriptors or threads than any of their kind had before."""
    grown = []
    for name, now in after.items():
        kin = [each for other, each in before.items() if _kind(other) == _kind(name)]
        if not kin:
            continue
        fds, threads = max(each.fds for each in kin), max(each.threads for each in kin)
        if now.fds > fds + _MORE_FDS:
            grown.append(f"{name} has {now.fds} descriptors open, {fds} before")
        if now.threads > threads + _MORE_THREADS:
            grown.append(f"{name} has {now.threads} threads, {threads} before")
    return grown


def _kind(name: str) -> str:
    return name.partition("-")[0]


def orphans(world: World) -> list[str]:
    """Returns processes that still run although everything was stopped."""
    mark = str(world.folder)
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if mark in command and "catenaryd" in command:
            found.append(f"process {process.info['pid']} still runs: {command[:120]}")
    return found


def tracebacks(member: Member) -> Counter[str]:
    """Returns the exceptions in a process's log, by event and last line."""
    found: Counter[str] = Counter()
    if not member.log.exists():
        return found
    bare: list[str] | None = None
    for line in member.log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            if _TRACEBACK in line:
                found[_of_event(line)] += 1
        elif _TRACEBACK in line:
            bare = [line]
        elif bare is not None:
            bare.append(line)
            if line and not line[0].isspace():
                found[f"stderr: {line[:200]}"] += 1
                bare = None
    return found


def _of_event(line: str) -> str:
    try:
        event = json.loads(line)
    except ValueError:
        return line[:200]
    told = next(str(each) for each in event.values() if _TRACEBACK in str(each))
    text = told.strip().splitlines()
    return f"{event.get('event')}: {text[-1][:200]}"
