"""Agents that compute badly, run short of something, or are not what the others are."""

from __future__ import annotations

import json
import os
import random
import resource
from abc import abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import psutil

from fault_cluster import slowed
from faults.base import AGENTS, FAULTS_FILE, GATEWAYS, Fault, Promise, fault
from faults.kinds.crowd_faults import connected
from faults.world import World

_CALLERS = 10
_SHIM = Path(__file__).with_name("other_version")


class OfAnAgent(Fault):
    """Befalls one agent."""

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        return (draw.choice(AGENTS),)

    @property
    def agent(self) -> str:
        return self.victims[0]


@fault
class Slow(OfAnAgent):
    name = "slow-agent"
    about = "an agent runs for a fifth of the time"
    promise = Promise(15.0)
    hold_s = (4.0, 8.0)

    async def apply(self, world: World) -> None:
        self._while = ExitStack()
        self._while.enter_context(slowed(world[self.agent]))

    async def undo(self, world: World) -> None:
        self._while.close()


class ComputesBadly(OfAnAgent):
    """Told so by the file of faults that the agent looks at."""

    needs = frozenset({FAULTS_FILE})
    document: ClassVar[dict[str, Any]]

    async def apply(self, world: World) -> None:
        file = world.faults_file(self.agent)
        scratch = file.with_suffix(".new")
        scratch.write_text(json.dumps(self.document))
        scratch.replace(file)

    async def undo(self, world: World) -> None:
        world.faults_file(self.agent).unlink(missing_ok=True)


@fault
class Hang(ComputesBadly):
    name = "hung-compute"
    about = "an agent's compute thread hangs; its heartbeats go on"
    promise = Promise(20.0)
    hold_s = (6.0, 10.0)
    ends = True
    document: ClassVar[dict[str, Any]] = {"hang": True}


@fault
class HangsForGood(ComputesBadly):
    name = "hung-for-good"
    about = "an agent's compute thread hangs until its process ends"
    promise = Promise(25.0)
    hold_s = (8.0, 12.0)
    ends = True
    document: ClassVar[dict[str, Any]] = {"hang": True, "once": True}


@fault
class FailingSteps(ComputesBadly):
    name = "failing-executor"
    about = "every step of an agent fails"
    promise = Promise(15.0, served_s=3.0)
    ends = True
    document: ClassVar[dict[str, Any]] = {"fail": "chaos: the executor failed"}
    excuses = ("chaos: the executor failed",)


@fault
class AFewFailingSteps(ComputesBadly):
    name = "failing-steps"
    about = "five steps of an agent fail"
    promise = Promise(15.0, served_s=3.0)
    document: ClassVar[dict[str, Any]] = {"fail": "chaos: the executor failed", "count": 5}
    excuses = ("chaos: the executor failed",)


@fault
class StickyDeviceError(ComputesBadly):
    name = "sticky-device-error"
    about = "an agent's device is lost to its process"
    promise = Promise(20.0, served_s=3.0)
    ends = True
    document: ClassVar[dict[str, Any]] = {
        "fail": "CUDA error: an illegal memory access was encountered",
        "once": True,
    }
    excuses = ("CUDA error",)


@fault
class OutOfDeviceMemory(ComputesBadly):
    name = "device-out-of-memory"
    about = "steps of an agent find no memory on the device"
    promise = Promise(15.0, served_s=3.0)
    ends = True
    document: ClassVar[dict[str, Any]] = {
        "fail": "CUDA out of memory. Tried to allocate 2 GiB",
        "count": 5,
    }
    excuses = ("CUDA out of memory",)


@fault
class SlowSteps(ComputesBadly):
    name = "slow-steps"
    about = "every step of an agent takes three times as long"
    promise = Promise(15.0, served_s=3.0)
    document: ClassVar[dict[str, Any]] = {"slow": 3.0}


class ShortOf(Fault):
    """A limit of a running process is lowered to what it uses now, and a bit."""

    ends = True

    async def apply(self, world: World) -> None:
        member = world[self.victims[0]]
        self.pid = member.pid
        world.mortal.add(member.name)
        self.before = resource.prlimit(self.pid, self.which())
        _, hard = self.before
        resource.prlimit(self.pid, self.which(), (self.limit(psutil.Process(self.pid)), hard))

    async def undo(self, world: World) -> None:
        try:
            resource.prlimit(self.pid, self.which(), self.before)
        except ProcessLookupError:
            world.note("had ended", self.victims[0])

    @abstractmethod
    def which(self) -> int: ...

    @abstractmethod
    def limit(self, process: psutil.Process) -> int: ...


class NoMoreFiles(ShortOf):
    """It can open nothing more, neither file nor connection, while connections come."""

    excuses = ("Too many open files", "[Errno 24]")

    async def apply(self, world: World) -> None:
        await super().apply(world)
        name = self.victims[0]
        ports = [int(v) for k, v in world[name].settings.items() if k in ("grpc_port", "http_port")]
        host = world.cluster.place(name).host
        self._open = [
            await connected(host, port)
            for port in (*ports, world.frame_port(name))
            for _ in range(_CALLERS)
        ]

    async def undo(self, world: World) -> None:
        await super().undo(world)
        for writer in self._open:
            if writer is not None:
                writer.close()

    def which(self) -> int:
        return resource.RLIMIT_NOFILE

    def limit(self, process: psutil.Process) -> int:
        return max(int(name) for name in os.listdir(f"/proc/{process.pid}/fd")) + 2


@fault
class AgentWithoutFiles(NoMoreFiles):
    name = "agent-no-files"
    about = "an agent has no file descriptors left"
    promise = Promise(10.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        return (draw.choice(AGENTS),)


@fault
class GatewayWithoutFiles(NoMoreFiles):
    name = "gateway-no-files"
    about = "a gateway has no file descriptors left"
    promise = Promise(10.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        return (draw.choice(GATEWAYS),)


@fault
class NoMemory(ShortOf):
    name = "agent-no-memory"
    about = "an agent gets no more memory from the kernel"
    promise = Promise(25.0)
    excuses = (
        "MemoryError",
        "bad_alloc",
        "Failed to allocate",
        "can't allocate",
        "Cannot allocate",
    )

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        return (draw.choice(AGENTS),)

    def which(self) -> int:
        return resource.RLIMIT_AS

    def limit(self, process: psutil.Process) -> int:
        return int(process.memory_info().vms) + 4 * 1024 * 1024


@fault
class OtherVersion(OfAnAgent):
    name = "other-version"
    about = "an agent runs another version: fields missing, fields nobody knows"
    promise = Promise(25.0, served_s=3.0)
    hold_s = (6.0, 10.0)

    async def apply(self, world: World) -> None:
        await world.kill(self.agent)
        member = world[self.agent]
        self.before = dict(member.environment)
        member.environment["PYTHONPATH"] = os.pathsep.join([str(_SHIM), world.python_path])
        world.start(self.agent)

    async def undo(self, world: World) -> None:
        await world.kill(self.agent)
        member = world[self.agent]
        member.environment.clear()
        member.environment.update(self.before)
        world.start(self.agent)
