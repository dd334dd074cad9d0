"""The cluster that faults happen to: every process real, each in a network namespace of its own.

Two schedulers, two gateways, four agents and a Redis. Photographs go through two parts, each on
two agents, texts over either of two chains of two agents, so that the loss of any one agent leaves
a way for both. Chains take two sessions each, so that both are used. Frames between agents take a few milliseconds more than they must, which makes
tokens as slow as those of a model of some size. Every agent has a copy of the models of its own to be damaged, and
every process a wall clock of its own to be stepped.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis.asyncio

import catenary
from catenary_agent.settings import AgentSettings
from catenary_scheduler.storage.keys import RedisKeys
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenary_services.redis.redis_client import connect
from catenaryd.local.local_cluster import free_port
from cluster_harness import environment
from deployed.redis_servers import STATE, RedisServer
from fault_cluster import (
    IMAGES,
    LEASE_S,
    TEXTS,
    FaultCluster,
    Member,
    ready,
    status_or_none,
)
from faults.base import (
    AGENTS,
    CLOCKS,
    FAULTS_FILE,
    GATEWAYS,
    LEADER,
    MOUNTS,
    NETWORK,
    REDIS,
    STANDBY,
)
from machine_faults.clock_step import SteppedClock
from machine_faults.namespaces import VirtualNetwork, why_impossible

if TYPE_CHECKING:
    from faults.mixed_load import MixedLoad

SCHEDULERS = ("scheduler-0", "scheduler-1")
EVERYBODY = (*SCHEDULERS, *GATEWAYS, *AGENTS)
CLUSTER = "main"
_RESTART_S = 0.5
_WAY_S = 0.006
_LISTENING = "0A"
_START_S = 120.0


class World:
    """Everything a fault can lay hands on.

    Attributes:
        cluster: All but Redis, by name.
        redis: The server.
        network: Between the namespaces; None: all processes are on the loopback interface.
        clocks: The wall clock of each process, and of "redis"; empty if they cannot be stepped.
        plan: The placement that is in force unless a fault replaces it.
        held: Who is down, or about to be, on purpose.
        mortal: Who may end by itself as part of a fault.
        missing: What faults may need and this machine, or this software, does not have; and why.
        note: Called with what happened and to whom.
        load: What is asked meanwhile.
    """

    load: MixedLoad

    def __init__(self, folder: Path, *, network: bool = True) -> None:
        self.folder = folder
        self.missing = _missing(network)
        self.network = None if NETWORK in self.missing else VirtualNetwork([*EVERYBODY, REDIS])
        self.clocks: dict[str, SteppedClock] = {}
        if CLOCKS not in self.missing:
            self.clocks = {n: SteppedClock(folder / "clocks", n) for n in (*EVERYBODY, REDIS)}
        self.held: set[str] = set()
        self.mortal: set[str] = set()
        self.note: Callable[..., None] = lambda *_, **__: None
        self.ends_unbidden: list[str] = []
        self._last_leader = SCHEDULERS[0]
        self._running = False
        self._supervisor: asyncio.Task[None] | None = None

    # ---- start and end ----

    async def __aenter__(self) -> World:
        if self.network is not None:
            self.network.start()
            self.network.lengthen(AGENTS, _WAY_S)
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self) -> None:
        places = self.network.places if self.network is not None else {}
        clock = self.clocks.get(REDIS)
        lines = [*STATE, "protected-mode no"]
        self.redis = RedisServer(
            self.folder / "redis" / "data",
            lines,
            place=places.get(REDIS),
            variables=clock.environment if clock else None,
        )
        await self.redis.start()
        self.cluster = FaultCluster(self.folder, {"redis_url": self.redis.url}, places)
        self.plan = placement(self.cluster.repository)
        (self.folder / "plan.json").write_text(json.dumps(self.plan))
        for name in SCHEDULERS:
            self._add_scheduler(name)
        for name in GATEWAYS:
            self._add_gateway(name)
        for name in AGENTS:
            self._add_agent(name)
        for member in self.members.values():
            self.faults_file(member.name).unlink(missing_ok=True)
            member.start()
        await ready(self.cluster, _START_S)
        self.admin = self.client(GATEWAYS)
        self._running = True
        self._supervisor = asyncio.create_task(self._supervise())

    async def end(self) -> dict[str, int | None]:
        """Tells every process to stop, and returns what each ended with; None: it had to be killed."""
        await self._stop_supervising()
        await self.admin.close()
        return dict(
            zip(
                self.members,
                await asyncio.gather(*(_ended(member) for member in self.members.values())),
                strict=True,
            )
        )

    async def close(self) -> None:
        """Ends whatever still runs."""
        await self._stop_supervising()
        if hasattr(self, "cluster"):
            for member in self.members.values():
                if member.process is not None:
                    with suppress(ProcessLookupError, AssertionError):
                        member.signal(signal.SIGCONT)
                    member.kill()
        if hasattr(self, "redis"):
            self.redis.end()
        for mounted in sorted(self.folder.rglob(".mounted")):
            unmount(mounted.parent)
        if self.network is not None:
            self.network.stop()

    async def _stop_supervising(self) -> None:
        self._running = False
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None

    def _add_scheduler(self, name: str) -> None:
        self._environ(name)
        self.cluster.add(
            "scheduler",
            name,
            {
                "scheduler_id": name,
                "host": self.cluster.place(name).host,
                "control_port": 0,
                "port": int(
                    self.cluster.scheduler_addresses[SCHEDULERS.index(name)].rpartition(":")[2]
                ),
                "models": [IMAGES, TEXTS],
                "plan_file": self.folder / "plan.json",
                "expected_agents": len(AGENTS),
                "lease_s": LEASE_S,
                "overdue_grace_ms": 300.0,
                "redis_url": self.redis.url,
                "cluster": CLUSTER,
                "log_json": True,
            },
        )

    def _add_gateway(self, name: str) -> None:
        self._environ(name)
        host = self.cluster.place(name).host
        self.cluster.add(
            "gateway",
            name,
            {
                "gateway_id": name,
                "host": host,
                "transport_host": host,
                "grpc_port": free_port(),
                "http_port": free_port(),
                "admin_port": free_port(),
                "scheduler_addresses": self.cluster.scheduler_addresses,
                "log_json": True,
                "runtime_dir": self.folder / "run",
                **self._transports(),
            },
        )

    def _add_agent(self, name: str) -> None:
        own = self.repository(name)
        shutil.copytree(self.cluster.repository, own, dirs_exist_ok=True)
        self._environ(name)
        faulty = {"faults_file": self.faults_file(name), "allow_faults": True}
        self.cluster.add(
            "agent",
            name,
            {
                "agent_id": name,
                "transport_host": self.cluster.place(name).host,
                "threads": 1,
                "scheduler_addresses": self.cluster.scheduler_addresses,
                "host_devices": len(AGENTS),
                "model_repository": own,
                "runtime_dir": self.folder / "run",
                "log_json": True,
                **self._transports(),
                **({} if FAULTS_FILE in self.missing else faulty),
            },
        )

    def _environ(self, name: str) -> None:
        self.temporary.mkdir(parents=True, exist_ok=True)
        clock = self.clocks[name].environment if name in self.clocks else {}
        self.cluster.environ(name, TMPDIR=str(self.temporary), **clock)

    def _transports(self) -> dict[str, Any]:
        # Shared memory would get through any cut.
        return {"transports": ["tcp"]} if self.network is not None else {}

    async def _supervise(self) -> None:
        """Starts again what ends by itself, as every orchestrator does."""
        while self._running:
            for name, member in self.members.items():
                if name in self.held or member.is_running or member.process is None:
                    continue
                code = member.process.returncode
                self.note("ended by itself", name, code=code)
                if name not in self.mortal:
                    self.ends_unbidden.append(f"{name} ended by itself with {code}")
                await asyncio.sleep(_RESTART_S)
                if name not in self.held and self._running:
                    member.start()
            await asyncio.sleep(0.1)

    # ---- who is where ----

    @property
    def members(self) -> dict[str, Member]:
        return self.cluster.members

    def __getitem__(self, name: str) -> Member:
        return self.cluster[name]

    async def resolve(self, role: str) -> str:
        """Returns the process that has a role now, or had it when somebody last did."""
        if role not in (LEADER, STANDBY):
            return role
        status = await status_or_none(self.admin)
        if status is not None and status.scheduler_id in SCHEDULERS:
            self._last_leader = status.scheduler_id
        other = next(name for name in SCHEDULERS if name != self._last_leader)
        return self._last_leader if role == LEADER else other

    @property
    def temporary(self) -> Path:
        """Returns the folder for temporary files of all processes."""
        return self.folder / "tmp"

    def repository(self, agent: str) -> Path:
        """Returns an agent's own copy of the models."""
        return self.folder / "models" / agent

    def faults_file(self, agent: str) -> Path:
        """Returns the file that tells an agent to compute badly."""
        return self.folder / f"{agent}.faults"

    def client(self, gateways: tuple[str, ...], **options: Any) -> catenary.AsyncClient:
        return catenary.AsyncClient(
            [self.cluster.target(name) for name in gateways],
            admin_target=[self.cluster.admin(name) for name in gateways],
            insecure=True,
            **options,
        )

    def database(self) -> redis.asyncio.Redis:
        """Returns a client of Redis; close it."""
        return connect(self.redis.url, timeout_s=2.0, retries=1)

    @property
    def python_path(self) -> str:
        """Returns where processes of the cluster find their modules."""
        return environment()["PYTHONPATH"]

    def frame_port(self, name: str) -> int:
        """Returns the port an agent or a gateway takes frames at over TCP."""
        member = self[name]
        others = {int(value) for key, value in member.settings.items() if key.endswith("_port")}
        return min(_listening(member.pid) - others)

    @property
    def keys(self) -> RedisKeys:
        return RedisKeys(CLUSTER)

    # ---- what faults do ----

    def start(self, name: str) -> None:
        """Starts a process that is down, unless it runs."""
        self.held.discard(name)
        if not self[name].is_running:
            self[name].start()

    async def kill(self, name: str) -> None:
        """Kills a process that stays down until `start`."""
        self.held.add(name)
        await asyncio.to_thread(self[name].kill)

    async def ended(self, name: str, timeout_s: float) -> None:
        """Waits until a process that was told to stop has ended; what is wrong with it is noted."""
        process = self[name].process
        if process is None:
            return
        try:
            code = await asyncio.to_thread(process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            self.ends_unbidden.append(f"{name} did not end within {timeout_s:g} s of SIGTERM")
            return
        if code:
            self.ends_unbidden.append(f"{name} ended with {code} after SIGTERM")

    async def whole(self, timeout_s: float) -> bool:
        """Waits until every process serves: all agents, all models, both gateways, Redis, a leader."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if await self.what_is_missing() == "":
                return True
            await asyncio.sleep(0.1)
        return False

    async def what_is_missing(self) -> str:
        """Returns who does not serve; empty if all do."""
        for name, member in self.members.items():
            if not member.is_running:
                return f"{name} does not run"
        for name in GATEWAYS:
            async with self.client((name,), timeout_s=1.0) as client:
                status = await status_or_none(client)
            if status is None:
                return f"{name} has no status"
            if missing := _missing_in(status):
                return f"{missing} ({name})"
        return ""

    async def reset(self) -> None:
        """Ends everything, empties Redis, and starts anew: the last resort after a finding."""
        self.held.update(self.members)
        for member in self.members.values():
            await asyncio.to_thread(member.kill)
        self.redis.end()
        unmount(self.redis.folder)
        shutil.rmtree(self.redis.folder, ignore_errors=True)
        if self.network is not None:
            self.network.heal()
        for clock in self.clocks.values():
            clock.step(0)
        await self.redis.start()
        for name in AGENTS:
            self.faults_file(name).unlink(missing_ok=True)
            self.restore_models(name)
        for name in self.members:
            self.start(name)
        await ready(self.cluster, _START_S)

    def restore_models(self, agent: str) -> None:
        """Gives an agent a whole copy of the models again."""
        folder = self.repository(agent)
        for mounted in sorted(folder.rglob(".mounted")):
            unmount(mounted.parent)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.cluster.repository, folder)


def placement(repository: Path) -> dict[str, Any]:
    """Photographs on agents 0 and 1, each of both parts; texts over agents 2 and 3, or 1 and 0."""
    blocks = ModelRepository(repository).block_table(ModelKey(IMAGES, "1")).blocks
    layers = ModelRepository(repository).decoder_table(ModelKey(TEXTS, "1")).blocks
    both = list(AGENTS[:2])
    images = {
        "name": IMAGES,
        "slo_ms": 4000,
        "pipelines": [
            {
                "batch": 2,
                "partitions": [
                    {"blocks": [0, blocks // 2], "agents": both},
                    {"blocks": [blocks // 2, blocks], "agents": both},
                ],
            }
        ],
    }
    texts = {
        "name": TEXTS,
        "chains": [
            {
                "capacity": 2,
                "hops": [
                    {"agent": first, "blocks": [0, layers // 2]},
                    {"agent": second, "blocks": [layers // 2, layers]},
                ],
            }
            for first, second in (AGENTS[2:], AGENTS[1::-1])
        ],
    }
    return {"models": [images, texts]}


def mount(folder: Path, size: str) -> None:
    """Puts a small file system over a folder; what is in the folder is gone until `unmount`."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", folder], check=True)
    (folder / ".mounted").touch()


def unmount(folder: Path) -> None:
    """Takes away every small file system over a folder."""
    while folder.is_mount():
        subprocess.run(["umount", "-l", folder], check=True, capture_output=True)


def _listening(pid: int) -> set[int]:
    """Returns the ports a process listens at; psutil knows only those of its own namespace."""
    sockets = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(file.readlink()))
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    rows = (line.split() for line in lines)
    return {
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == _LISTENING and f"socket:[{row[9]}]" in sockets
    }


def _missing(network: bool) -> dict[str, str]:
    found = {}
    if reason := why_impossible() if network else "it is switched off":
        found[NETWORK] = reason
    if shutil.which("cc") is None:
        found[CLOCKS] = "stepping a clock needs a C compiler (cc)"
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if probe.returncode or shutil.which("mount") is None:
        found[MOUNTS] = "mounting needs root"
    if not {"faults_file", "allow_faults"} <= set(AgentSettings.model_fields):
        found[FAULTS_FILE] = "agents have no setting allow_faults"
    return found


def _missing_in(status: catenary.ClusterStatus) -> str:
    states = {agent.agent_id: agent.state for agent in status.agents}
    for name in AGENTS:
        if states.get(name) != "ready":
            return f"{name} is {states.get(name, 'unknown')}"
    for model in status.models:
        if not model.ready:
            return f"{model.name} is not ready: {model.reason}"
    if not set(GATEWAYS) <= set(status.gateways):
        return f"of the gateways only {list(status.gateways)} are connected"
    if not status.redis_connected:
        return f"Redis is not connected: {status.redis_problem}"
    return ""


async def _ended(member: Member) -> int | None:
    if member.process is None:
        return 0
    if member.is_running:
        with suppress(ProcessLookupError):
            member.signal(signal.SIGCONT)
            member.signal(signal.SIGTERM)
    try:
        return await asyncio.to_thread(member.process.wait, 30)
    except subprocess.TimeoutExpired:
        await asyncio.to_thread(member.kill)
        return None
