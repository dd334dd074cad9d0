"""A cluster whose processes are started one by one, so that each can be killed, paused or moved.

Nothing restarts what dies: a test says what comes back. Photographs are classified by a real model
on two CPU agents, each of which hosts both its parts, so that paths go over one or both; texts come
from emulated agents, which take 25 ms a token at next to no load of the CPU and whose every token
is known beforehand. All processes are real, as are their streams, frames and Redis.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import catenary
from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenary_services.redis.embedded_redis import EmbeddedRedis
from catenaryd.demo.models import ensure_model
from catenaryd.local.local_cluster import free_port
from catenaryd.process_options import command_line_of
from cluster_harness import ROOT, environment
from tiny_language_models import write_folder

IMAGES = "efficientnet-lite0"
TEXTS = "tiny"
SESSION_TOKENS = 128
BLOCK_DECODE_NS = 4_000_000
LEASE_S = 2.0
_READY_S = 120.0
_STOP_S = 30.0
_TURN_S, _SHARE_RUNNING = 0.06, 0.2
"""A slow process runs for a fifth of the time, in turns too short to be noticed as silence."""
_KEPT_S = 6 * 3600.0
_CACHED = ROOT / ".catenary"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: an address, and what goes before its command to get there."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


@dataclass
class Member:
    """One process of the cluster."""

    name: str
    kind: str
    settings: dict[str, Any]
    place: Place
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        arguments = [
            *self.place.prefix,
            sys.executable,
            "-m",
            "catenaryd",
            "--supervised",
            self.kind,
            *command_line_of(self.settings),
        ]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**environment(), "OMP_NUM_THREADS": "1", **self.environment},
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and the end of it is awaited."""
        if self.is_running:
            self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(10)

    def end(self) -> None:
        """SIGTERM, then SIGKILL."""
        if not self.is_running:
            return
        assert self.process is not None
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)

    def tail(self, lines: int = 30) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"== {self.name}\n" + "\n".join(text.splitlines()[-lines:])


@contextmanager
def slowed(member: Member) -> Iterator[None]:
    """Lets a process run for a fifth of the time only."""
    over = threading.Event()

    def alternate() -> None:
        with suppress(ProcessLookupError):
            while not over.wait(_TURN_S * _SHARE_RUNNING):
                member.signal(signal.SIGSTOP)
                over.wait(_TURN_S * (1 - _SHARE_RUNNING))
                member.signal(signal.SIGCONT)

    thread = threading.Thread(target=alternate, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)
        if member.is_running:
            member.signal(signal.SIGCONT)


class FaultCluster:
    """Schedulers, gateways and agents by name; `places` says where those run that are not here."""

    def __init__(
        self, folder: Path, redis: dict[str, Any], places: dict[str, Place] | None = None
    ) -> None:
        """`redis` are the schedulers' settings of Redis."""
        self.folder = folder
        self._redis = redis
        self._places = places or {}
        self.members: dict[str, Member] = {}
        self.repository = shared_models()
        self._ports = {name: free_port() for name in ("scheduler-0", "scheduler-1")}
        self._overrides: dict[str, dict[str, Any]] = {}
        self._environments: dict[str, dict[str, str]] = {}

    def place(self, name: str) -> Place:
        return self._places.get(name, Place())

    def override(self, name: str, **settings: Any) -> None:
        """Settings of one process, or of all of a kind, beyond the usual."""
        self._overrides.setdefault(name, {}).update(settings)

    def environ(self, name: str, **variables: str) -> None:
        """Environment of one process beyond the usual."""
        self._environments.setdefault(name, {}).update(variables)

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    @property
    def scheduler_addresses(self) -> list[str]:
        return [f"{self.place(name).host}:{port}" for name, port in self._ports.items()]

    def add(self, kind: str, name: str, settings: dict[str, Any]) -> Member:
        settings = {
            "insecure": True,
            "model_repository": self.repository,
            "metrics_port": free_port(),
            "metrics_host": self.place(name).host,
            **settings,
            **self._overrides.get(kind, {}),
            **self._overrides.get(name, {}),
        }
        extra = self._environments.get(name, {})
        member = Member(
            name, kind, settings, self.place(name), self.folder / "logs" / f"{name}.log", extra
        )
        self.members[name] = member
        return member

    def add_all(self, *, gateways: int = 1, texts: bool = True, placement: Any = None) -> None:
        """Two schedulers, gateways, two agents for images and three for texts."""
        plan = self.folder / "plan.json"
        plan.parent.mkdir(parents=True, exist_ok=True)
        plan.write_text(json.dumps(placement or usual_placement(self.repository, texts=texts)))
        agents = 5 if texts else 2
        models = [IMAGES, TEXTS] if texts else [IMAGES]
        for name, port in self._ports.items():
            self.add(
                "scheduler",
                name,
                {
                    "scheduler_id": name,
                    "host": self.place(name).host,
                    "port": port,
                    "control_port": 0,
                    "models": models,
                    "plan_file": plan,
                    "expected_agents": agents,
                    "lease_s": LEASE_S,
                    "overdue_grace_ms": 300.0,
                    **self._redis,
                },
            )
        for number in range(gateways):
            name, host = f"gateway-{number}", self.place(f"gateway-{number}").host
            self.add(
                "gateway",
                name,
                {
                    "gateway_id": name,
                    "host": host,
                    "transport_host": host,
                    "grpc_port": free_port(),
                    "http_port": free_port(),
                    "admin_port": free_port(),
                    "scheduler_addresses": self.scheduler_addresses,
                    "runtime_dir": self.folder / "run",
                },
            )
        for number in range(agents):
            self._add_agent(number)

    def _add_agent(self, number: int) -> None:
        name = f"agent-{number}"
        settings: dict[str, Any] = {
            "agent_id": name,
            "transport_host": self.place(name).host,
            "threads": 1,
            "scheduler_addresses": self.scheduler_addresses,
            "runtime_dir": self.folder / "run",
            "host_devices": 5,
        }
        if number >= 2:
            settings |= {"device": "emulated:text", "emulated_profile": self._profile()}
        self.add("agent", name, settings)

    def _profile(self) -> Path:
        file = self.folder / "times.json"
        times = {
            "prefill_ns": 1_000_000,
            "prefill_token_ns": 20_000,
            "decode_ns": BLOCK_DECODE_NS,
            "decode_session_ns": 10_000,
        }
        file.write_text(json.dumps({TEXTS: times}))
        return file

    def target(self, gateway: str = "gateway-0") -> str:
        settings = self[gateway].settings
        return f"{settings['host']}:{settings['grpc_port']}"

    def admin(self, gateway: str = "gateway-0") -> str:
        settings = self[gateway].settings
        return f"{settings['host']}:{settings['admin_port']}"

    async def metrics(self, name: str, timeout_s: float = 5.0) -> str:
        """Returns the page of metrics of a process; raises OSError while it does not answer."""
        settings = self[name].settings
        url = f"http://{settings['metrics_host']}:{settings['metrics_port']}/metrics"

        def read() -> str:
            with urllib.request.urlopen(url, timeout=timeout_s) as page:
                return str(page.read(), "utf-8")

        return await asyncio.to_thread(read)

    def client(self, gateway: str = "gateway-0", **options: Any) -> catenary.AsyncClient:
        return catenary.AsyncClient(
            self.target(gateway), admin_target=self.admin(gateway), insecure=True, **options
        )

    def logs(self) -> str:
        return "\n".join(member.tail() for member in self.members.values())


@asynccontextmanager
async def fault_cluster(
    folder: Path, redis: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[FaultCluster]:
    """Runs the usual cluster, ready to serve; with a Redis of its own unless one is given."""
    own = EmbeddedRedis(folder / "redis") if redis is None else None
    settings = redis or {"redis_url": await own.start()} if own is not None else redis
    cluster = FaultCluster(folder, dict(settings or {}), options.pop("places", None))
    for name, values in options.pop("overrides", {}).items():
        cluster.override(name, **values)
    wait = options.pop("wait", ())
    for name, variables in options.pop("environments", {}).items():
        cluster.environ(name, **variables)
    cluster.add_all(**options)
    try:
        async with running(cluster, wait):
            yield cluster
    finally:
        if own is not None:
            await own.stop()


@asynccontextmanager
async def running(cluster: FaultCluster, wait: Sequence[str] = ()) -> AsyncIterator[None]:
    """Starts every member, waits until all serve (or the agents of `wait`), ends them all."""
    try:
        for member in cluster.members.values():
            member.start()
        await ready(cluster, agents=wait)
        yield
    except BaseException:
        print(cluster.logs(), file=sys.stderr)
        raise
    finally:
        for member in cluster.members.values():
            if member.is_running:
                with suppress(ProcessLookupError):
                    member.signal(signal.SIGCONT)
        await asyncio.gather(
            *(asyncio.to_thread(member.end) for member in cluster.members.values())
        )


async def ready(
    cluster: FaultCluster, timeout_s: float = _READY_S, agents: Sequence[str] = ()
) -> catenary.ClusterStatus:
    """Waits until the agents (empty: all that run) are ready and all models are served."""
    agents = agents or [
        name for name, each in cluster.members.items() if each.kind == "agent" and each.is_running
    ]

    def complete(status: catenary.ClusterStatus) -> bool:
        states = {a.agent_id: a.state for a in status.agents}
        return all(states.get(agent) == "ready" for agent in agents) and all(
            model.ready for model in status.models
        )

    async with cluster.client() as client:
        return await until_status(client, complete, timeout_s)


async def status_or_none(client: catenary.AsyncClient) -> catenary.ClusterStatus | None:
    """Returns the status, or None while no scheduler leads."""
    try:
        async with asyncio.timeout(1.0):
            return await client.status()
    except (catenary.CatenaryError, TimeoutError):
        return None


async def until_status(
    client: catenary.AsyncClient,
    condition: Callable[[catenary.ClusterStatus], bool],
    timeout_s: float,
) -> catenary.ClusterStatus:
    """Returns the first status that meets a condition."""
    last: catenary.ClusterStatus | None = None
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        status = await status_or_none(client)
        last = status or last
        if status is not None and condition(status):
            return status
        await asyncio.sleep(0.02)
    raise AssertionError(f"no such status within {timeout_s:g} s; last: {last}")


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float, what: str) -> float:
    """Returns how long it takes until a condition holds."""
    began_s = time.monotonic()
    while not await condition():
        if time.monotonic() - began_s > timeout_s:
            raise AssertionError(f"{what} did not happen within {timeout_s:g} s")
        await asyncio.sleep(0.02)
    return time.monotonic() - began_s


async def nothing_is_booked(client: catenary.AsyncClient, timeout_s: float = 15.0) -> None:
    """Waits until no reservation, batch or session is left; a leak fails the test here."""
    await until_status(
        client,
        lambda status: (
            not (status.live_reservations or status.batches_in_flight or status.sessions_in_flight)
        ),
        timeout_s,
    )


def usual_placement(repository: Path, *, texts: bool = True) -> dict[str, Any]:
    """Images: two parts, both on both agents. Texts: a chain of two agents, and one of one."""
    blocks = ModelRepository(repository).block_table(ModelKey(IMAGES, "1")).blocks
    both = ["agent-0", "agent-1"]
    images = {
        "name": IMAGES,
        "slo_ms": 2000,
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
    chains = {
        "name": TEXTS,
        "chains": [
            {
                "capacity": 12,
                "hops": [
                    {"agent": "agent-2", "blocks": [0, 3]},
                    {"agent": "agent-3", "blocks": [3, 6]},
                ],
            },
            {"capacity": 12, "hops": [{"agent": "agent-4", "blocks": [0, 6]}]},
        ],
    }
    return {"models": [images, chains] if texts else [images]}


def shared_models() -> Path:
    """Returns a repository with both models, made once for all runs of this checkout."""
    digest = hashlib.sha256()
    for package in ("torch", "onnx", "transformers"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for file in _sources():
        digest.update(file.read_bytes())
    _CACHED.mkdir(exist_ok=True)
    folder = _CACHED / f"fault-models-{digest.hexdigest()[:12]}"
    with (_CACHED / "fault-models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _forget_old_ones()
            _make_models(folder)
    return folder


def install_images(root: Path) -> ModelKey:
    """Puts the model for photographs, cut into blocks, into the repository at `root`.

    Exporting and cutting it would take a core for a quarter of a minute, in every test anew.
    """
    unused = shutil.ignore_patterns(".parts")  # those who serve from the original write there
    shutil.copytree(shared_models() / IMAGES, root / IMAGES, ignore=unused)
    return ModelKey(IMAGES, "1")


def _sources() -> Iterable[Path]:
    yield ROOT / "catenaryd" / "demo" / "demo_models.py"
    yield ROOT / "tests" / "support" / "tiny_language_models.py"
    for folder in ("preparing", "partitioning", "decoders/importing"):
        yield from sorted((ROOT / "gpu_agent" / "catenary_agent" / folder).glob("*.py"))


def _make_models(folder: Path) -> None:
    scratch = folder.with_suffix(f".{os.getpid()}")
    ensure_model(scratch, IMAGES)
    write_folder(scratch / "source", "llama3")
    import_decoder(
        ModelRepository(scratch),
        scratch / "source",
        ModelKey(TEXTS, "1"),
        ImportOptions(session_tokens=SESSION_TOKENS),
    )
    shutil.rmtree(scratch / "source")
    scratch.rename(folder)


def _forget_old_ones() -> None:
    for old in _CACHED.glob("fault-models-*"):
        if time.time() - old.stat().st_mtime > _KEPT_S:
            shutil.rmtree(old, ignore_errors=True)
