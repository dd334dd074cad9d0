"""A whole cluster on one machine: Redis, scheduler, gateway and agents as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from catenary_agent.devices.device import count_gpus
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.addresses import host_port
from catenary_services.domain.packing import PackingGoal
from catenary_services.errors import CatenaryError, InvalidInput, Unavailable
from catenary_services.log import get_logger
from catenary_services.redis.embedded_redis import EmbeddedRedis
from catenary_services.settings import load_settings
from catenaryd.local.agent_scaling import AgentScaling, ended
from catenaryd.local.group_readiness import what_groups_wait_for
from catenaryd.local.local_certificates import LocalCertificates
from catenaryd.local.public_address import (
    SCHEDULER_PORT,
    AdvertisedAddress,
    check_free,
    scheduler_ports,
)
from catenaryd.local.supervisor import ChildProcess
from catenaryd.local.virtual_gpus import devices_for, share_settings
from catenaryd.process_options import command_line_of

log = get_logger(__name__)

POLL_S = 0.1
_PORTS = (12_000, 32_000)
_TRIES = 200
_reserved: list[socket.socket] = []
"""The names by which this process has reserved ports."""
REDIS_RESTART_S = 0.2
DRAIN_S = 20.0
HOPELESS_RESTARTS = 3
"""A child that ended this often before the cluster was ready is not started again."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options of `catenaryd up`."""

    agents: int = 3
    max_agents: int = 0
    """The most agents. As many are started as the load needs, at least `agents`; 0 for always
    `agents`."""
    packing: PackingGoal | None = None
    """Packing goal of models that name none; None for the scheduler's default."""
    device: str = "cpu"
    virtual_gpus: int = 1
    """The number of agents that share a device; `agents` counts all of them."""
    schedulers: int = 1
    groups: int = 1
    """Scheduler groups to which the agents are assigned in turn, device by device."""
    models: tuple[str, ...] = ()
    plan_file: Path | None = None
    grpc_port: int = 8001
    http_port: int = 8000
    admin_port: int = 0
    """Port of the Admin service; 0 for any free one."""
    metrics_port: int = 0
    """Port of the gateway's metrics; 0 for any free one."""
    data_dir: Path = Path(".catenary")
    redis_url: str | None = None
    tls: bool = False
    """Whether processes use mutual TLS with certificates of a local authority; the ports for
    clients remain unencrypted."""
    host: str | None = None
    """Address at which other machines reach the schedulers and the transports, with mutual TLS;
    None for a cluster of this machine alone."""
    advertise: str | None = None
    """Address that other machines are told; None for `host`, or that of the default route."""
    machine: str = ""
    """Name of this machine among those that join; empty: each device counts as one."""
    scheduler_port: int = SCHEDULER_PORT
    """Port of the first scheduler, where other machines reach it."""
    authority: Path | None = None
    """Folder of the user's own authority; None for one in the data folder."""
    config_file: Path | None = None
    ready_timeout_s: float = 180.0
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further settings by the kind of process: "scheduler", "gateway" or "agent"."""
    each_agent: tuple[dict[str, Any], ...] = ()
    """Settings of single agents, which override all others; entry N is for agent N."""


def free_port() -> int:
    """Returns a TCP port that was free a moment ago, and that no other call on this machine gets.

    It lies below the ports that systems give to outgoing connections, since one of those could take
    it before the process that it is meant for listens. For the same reason it is reserved while
    this process lives: of two clusters that start at the same time, one would talk to the other's
    scheduler.

    Raises:
        Unavailable: Every port that was tried is in use.
    """
    for _ in range(_TRIES):
        port = random.randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _reserve(port)
            return port
    raise Unavailable(f"found no free port in {_PORTS[0]}..{_PORTS[1] - 1}")


def _reserve(port: int) -> None:
    """Reserves a port by a name that, like ports, belongs to the network namespace.

    Raises:
        OSError: Another process has reserved it.
    """
    if sys.platform != "linux":
        return  # only there is a namespace of names that end with their process
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0catenary-port-{port}")
    except OSError:
        name.close()
        raise
    _reserved.append(name)


def device_of(device: str, index: int) -> str:
    """Returns the device of agent `index`; "cuda" assigns the machine's GPUs in turn.

    Raises:
        InvalidInput: "cuda" on a machine whose driver shows no GPU.
    """
    if device != "cuda":
        return device
    return f"cuda:{index % count_gpus()}"


class LocalCluster:
    """Starts and supervises the processes, restarts those that die, and drains them in order."""

    def __init__(self, options: ClusterOptions) -> None:
        devices_for(options.agents, options.virtual_gpus)  # raises if they cannot be divided
        _check_scaling(options)
        self.options = options
        if options.groups > 1 and options.plan_file is not None:
            raise InvalidInput("plan", "names agents, which several scheduler groups plan for")
        self.public = (
            AdvertisedAddress.of(options.host, options.advertise) if options.host else None
        )
        self.scheduler_ports = (
            [free_port() for _ in range(options.schedulers)]
            if self.public is None
            else scheduler_ports(options.scheduler_port, options.schedulers)
        )
        self.metrics_port = options.metrics_port or free_port()
        self.admin_port = options.admin_port or free_port()
        self.grpc_port = options.grpc_port or free_port()
        self.http_port = options.http_port or free_port()
        self.redis: EmbeddedRedis | None = None
        self.redis_url = options.redis_url or ""
        self.children: dict[str, ChildProcess] = {}
        self.certificates = (
            LocalCertificates(options.authority or options.data_dir / "certs")
            if options.tls or self.public is not None
            else None
        )
        self._renewing: asyncio.Task[None] | None = None
        self._redis_task: asyncio.Task[None] | None = None
        self._scaling_task: asyncio.Task[None] | None = None
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Agents that are being stopped for good, with the tasks that stop them."""

    @property
    def model_repository(self) -> Path:
        """Folder from which the scheduler, the gateway and every agent read models."""
        return self.options.data_dir / "models"

    @property
    def admin_target(self) -> str:
        """Address at which the gateway serves `catenary.v1.Admin`."""
        return f"127.0.0.1:{self.admin_port}"

    def agent_ids(self) -> list[str]:
        """Returns the agents' ids in order: those to start, or once started those that remain."""
        most = max(self.options.agents, self.options.max_agents)
        known = [self._agent_id(index) for index in range(most)]
        if not self.children:
            return known[: self.options.agents]
        return [agent for agent in known if agent in self.children and agent not in self._leaving]

    def devices(self) -> list[str]:
        """Returns the devices of the agents to start, each once.

        Raises:
            InvalidInput: "cuda" on a machine whose driver shows no GPU.
        """
        agents = range(self.options.agents)
        return sorted({str(self._agent_settings(index)["device"]) for index in agents})

    def _agent_id(self, index: int) -> str:
        own = self.options.each_agent
        usual = f"agent-{index}"
        return str(own[index].get("agent_id", usual)) if index < len(own) else usual

    def _settings(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Returns kind and settings of every child by its name, in the order of starting."""
        options = self.options
        # Without a public address all listen on loopback, which makes `insecure` acceptable.
        common: dict[str, Any] = {}
        if options.groups > 1:
            common["scheduler_groups"] = options.groups
        keys = self._operator_keys()
        children: dict[str, tuple[str, dict[str, Any]]] = {
            "scheduler" if index == 0 else f"scheduler-{index}": (
                "scheduler",
                {
                    **common,
                    **self._security("scheduler", f"scheduler-{index}"),
                    **keys,
                    "scheduler_id": f"scheduler-{index}",
                    "port": port,
                    # A firewall before other machines lets only ports through that are known.
                    **({"control_port": 0} if self.public is None else {"host": self.public.bind}),
                    "model_repository": self.model_repository,
                    "models": list(options.models),
                    "plan_file": options.plan_file,
                    "expected_agents": self._expected_agents(),
                    **self._scaling_settings(),
                },
            )
            for index, port in enumerate(self.scheduler_ports)
        }
        children |= {
            "gateway": (
                "gateway",
                {
                    **common,
                    **self._security("gateway", "gateway-0"),
                    "gateway_id": "gateway-0",
                    "grpc_port": self.grpc_port,
                    "http_port": self.http_port,
                    "admin_port": self.admin_port,
                    "metrics_port": self.metrics_port,
                    **self._meeting_place(),
                },
            ),
        }
        for kind, settings in children.values():
            settings.update(options.extra.get(kind, {}))
        for index in range(options.agents):
            agent = {**common, **self._agent_settings(index)}
            children[self._agent_id(index)] = ("agent", agent)
        return children

    def _agent_settings(self, index: int) -> dict[str, Any]:
        """Returns the settings of an agent, whether started with the cluster or later."""
        options = self.options
        most = max(options.agents, options.max_agents)
        own = options.each_agent[index] if index < len(options.each_agent) else {}
        return {
            **self._security("agent", self._agent_id(index)),
            "agent_id": self._agent_id(index),
            "device": device_of(options.device, index // options.virtual_gpus),
            **self._meeting_place(),
            **share_settings(index, most, options.virtual_gpus, options.device),
            **self._machine_settings(index),
            **self._group_settings(index),
            **options.extra.get("agent", {}),
            **own,
        }

    def _security(self, kind: str, name: str) -> dict[str, Any]:
        """Returns a process's security: its certificate, or `insecure` on loopback without TLS."""
        if self.certificates is None:
            return {"insecure": True}
        return self.certificates.settings(kind, name)

    def _operator_keys(self) -> dict[str, Any]:
        """Returns the scheduler's file of operators' keys, unless another one is configured."""
        if self.certificates is None:
            return {}
        file = self.options.config_file
        configured = load_settings(SchedulerSettings, file=file, section="scheduler", flags={})
        if configured.api_keys_file is not None:
            return {}
        return {"api_keys_file": self.certificates.operator_keys_file()}

    def _meeting_place(self) -> dict[str, Any]:
        """Returns settings by which gateways and agents find schedulers, models and each other."""
        own = "127.0.0.1" if self.public is None else self.public.own
        settings: dict[str, Any] = {
            "scheduler_addresses": [host_port(own, port) for port in self.scheduler_ports],
            "model_repository": self.model_repository,
            "runtime_dir": self.options.data_dir / "run",
        }
        if self.public is not None:
            settings["transport_host"] = self.public.bind
            settings["advertise_host"] = self.public.advertise
        return settings

    def _machine_settings(self, index: int) -> dict[str, Any]:
        """Returns the settings by which an agent counts to this machine, if others join."""
        name = self.options.machine
        if not name:
            return {}
        return {"server_id": name, "device_id": f"{name}/{index // self.options.virtual_gpus}"}

    def _scaling_settings(self) -> dict[str, Any]:
        options = self.options
        settings: dict[str, Any] = {}
        if options.max_agents:
            settings = {"min_agents": options.agents, "max_agents": options.max_agents}
        if options.packing is not None:
            settings["packing"] = options.packing
        return settings

    def _group_of(self, index: int) -> int:
        """Returns the scheduler group of agent `index`.

        Virtual GPUs of one device share a group.
        """
        return (index // self.options.virtual_gpus) % self.options.groups

    def _group_settings(self, index: int) -> dict[str, Any]:
        several = self.options.groups > 1
        return {"scheduler_group": str(self._group_of(index))} if several else {}

    def _expected_agents(self) -> int:
        """Returns a number of agents whose even division leaves no group waiting for agents."""
        groups = self.options.groups
        sizes = Counter(map(self._group_of, range(self.options.agents)))
        return groups * max(1, min(sizes[group] for group in range(groups)))

    async def start(self, progress: Callable[[str], None] = lambda _line: None) -> dict[str, Any]:
        """Starts everything and returns the facts once every model is ready.

        Raises:
            Unavailable: The cluster was not ready within the time-out; the message says why.
        """
        data_dir = self.options.data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        if not self.redis_url:
            self.redis = EmbeddedRedis(data_dir / "redis")
            self.redis_url = await self.redis.start()
            self._redis_task = asyncio.create_task(self._keep_redis(), name="keep-redis")
        for name, (kind, settings) in self._settings().items():
            await self._start_child(name, kind, settings)
        if self.certificates is not None:
            self._renewing = asyncio.create_task(self.certificates.renew(), name="renew")
        await self._wait_until_ready(progress)
        facts = self.facts()
        if self.options.max_agents:
            scaling = AgentScaling(self.admin_target, self, self.options.max_agents)
            self._scaling_task = asyncio.create_task(scaling.run(), name="scale-agents")
        return facts

    async def start_agent(self) -> str:
        """Starts one more agent under the first free id, and returns that id."""
        index = next(
            index
            for index in itertools.count()
            if (name := self._agent_id(index)) not in self.children and name not in self._leaving
        )
        name = self._agent_id(index)
        await self._start_child(name, "agent", self._agent_settings(index))
        return name

    async def stop_agent(self, agent_id: str) -> None:
        """Begins to stop an agent for good; its id is free again when it has ended."""
        child = self.children.pop(agent_id)

        async def leave() -> None:
            try:
                await child.stop(DRAIN_S)
            finally:
                del self._leaving[agent_id]

        self._leaving[agent_id] = asyncio.create_task(leave(), name=f"stop-{agent_id}")

    async def _start_child(self, name: str, kind: str, settings: dict[str, Any]) -> None:
        config = ["--config", str(self.options.config_file)] if self.options.config_file else []
        child = ChildProcess(
            name,
            [*config, kind, *command_line_of(settings)],
            self.options.data_dir / "logs" / f"{name}.log",
            # The URL holds a password, and the arguments of a process are public.
            {"CATENARY_REDIS_URL": self.redis_url} if kind == "scheduler" else {},
        )
        self.children[name] = child
        await child.start()

    async def _keep_redis(self) -> None:
        assert self.redis is not None
        while True:
            code = await self.redis.wait()
            log.warning("redis_ended", exit_code=code)
            await asyncio.sleep(REDIS_RESTART_S)
            with contextlib.suppress(CatenaryError, OSError):
                await self.redis.start()

    async def _wait_until_ready(self, progress: Callable[[str], None]) -> None:
        deadline = time.monotonic() + self.options.ready_timeout_s
        said = ""
        # A host without agents has nothing to serve until machines join.
        page = "readyz" if self.options.agents else "healthz"
        url = f"http://127.0.0.1:{self.http_port}/{page}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while True:
                status, text = await _get(session, url)
                if status == 200:
                    text = await self._what_groups_wait_for() if self.options.agents else ""
                    if not text:
                        return
                self._raise_if_hopeless()
                if text and text != said:
                    progress(text)
                    said = text
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"the cluster was not ready after {self.options.ready_timeout_s:.0f} s"
                        f" ({said or 'no answer'}); see {self.options.data_dir / 'logs'}"
                    )
                await asyncio.sleep(POLL_S)

    async def _what_groups_wait_for(self) -> str:
        groups = self.options.groups
        return await what_groups_wait_for(self.admin_target, groups) if groups > 1 else ""

    def _raise_if_hopeless(self) -> None:
        for child in self.children.values():
            if child.restarts >= HOPELESS_RESTARTS:
                raise Unavailable(f"{child.name} cannot start: {child.last_line()}")

    def check_ports(self) -> None:
        """Checks, before minutes of work, that the ports which somebody named can be listened on.

        Raises:
            Unavailable: One is in use.
        """
        for name in ("grpc_port", "http_port", "admin_port", "metrics_port"):
            if port := getattr(self.options, name):
                check_free("127.0.0.1", [port], f"--{name.replace('_', '-')}")

    def facts(self) -> dict[str, Any]:
        """Returns what `catenaryd up --json` prints."""
        tls = {} if self.certificates is None else {"tls": self.certificates.facts()}
        return {
            **tls,
            "grpc": f"127.0.0.1:{self.grpc_port}",
            "http": f"http://127.0.0.1:{self.http_port}",
            "metrics": f"http://127.0.0.1:{self.metrics_port}/metrics",
            "admin": self.admin_target,
            "models": list(self.options.models),
            "agents": self.agent_ids(),
            "pids": {name: child.pid for name, child in self.children.items()},
        }

    async def stop(self) -> None:
        """Drains the gateway, then agents and scheduler, then ends Redis."""
        await ended(self._scaling_task)
        await ended(self._renewing)
        if "gateway" in self.children:
            await self.children["gateway"].stop(DRAIN_S)
        others = [child for name, child in self.children.items() if name != "gateway"]
        await asyncio.gather(*(child.stop(DRAIN_S) for child in others), *self._leaving.values())
        if self._redis_task is not None:
            self._redis_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._redis_task
        if self.redis is not None:
            await self.redis.stop()


def _check_scaling(options: ClusterOptions) -> None:
    if not options.max_agents:
        return
    if options.host is not None:
        raise InvalidInput("max_agents", "a cluster that other machines join cannot be scaled")
    if options.max_agents < options.agents:
        raise InvalidInput("max_agents", f"must not be less than agents ({options.agents})")
    if options.virtual_gpus > 1:
        raise InvalidInput("max_agents", "agents that share devices cannot be scaled")
    if options.groups > 1:
        raise InvalidInput("max_agents", "agents of several scheduler groups cannot be scaled")
    if options.plan_file is not None:
        raise InvalidInput("max_agents", "agents of a given plan cannot be scaled")


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    try:
        async with session.get(url) as response:
            body = await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return 0, ""
    with contextlib.suppress(ValueError, AttributeError):
        return response.status, str(json.loads(body).get("error", body))
    return response.status, body.strip()
