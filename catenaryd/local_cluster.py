"""A whole cluster on one machine: Redis, scheduler, gateway and agents as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from catenaryd.process_options import command_line_of
from catenaryd.supervisor import Child
from catenaryd.virtual_gpus import devices_for, share_settings
from services.embedded_redis import EmbeddedRedis
from services.errors import CatenaryError, InvalidInput, Unavailable
from services.log import get_logger

log = get_logger(__name__)

POLL_S = 0.1
REDIS_RESTART_S = 0.2
DRAIN_S = 20.0
HOPELESS_RESTARTS = 3
"""A child that ended this often before the cluster was ready will not do better."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What `catenaryd up` was asked for."""

    agents: int = 3
    device: str = "cpu"
    virtual_gpus: int = 1
    """So many agents share a device; `agents` counts all of them."""
    models: tuple[str, ...] = ()
    plan_file: Path | None = None
    grpc_port: int = 8001
    http_port: int = 8000
    data_dir: Path = Path(".catenary")
    redis_url: str | None = None
    config_file: Path | None = None
    ready_timeout_s: float = 180.0
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings per kind of process ("scheduler", "gateway", "agent") beyond the usual."""
    each_agent: tuple[dict[str, Any], ...] = ()
    """Settings of single agents, which count most; agent N is entry N."""


def free_port() -> int:
    """Returns a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def device_of(device: str, index: int) -> str:
    """Returns the device of agent `index`: "cuda" deals the machine's GPUs out in turn.

    Raises:
        InvalidInput: "cuda" on a machine without a GPU that PyTorch sees.
    """
    if device != "cuda":
        return device
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise InvalidInput("device", "PyTorch sees no CUDA device on this machine")
    return f"cuda:{index % gpus}"


class LocalCluster:
    """Starts and supervises the processes; restarts whatever dies; drains in order at the end."""

    def __init__(self, options: ClusterOptions) -> None:
        devices_for(options.agents, options.virtual_gpus)  # refuses what cannot be dealt out
        self.options = options
        self.scheduler_port = free_port()
        self.metrics_port = free_port()
        self.admin_port = free_port()
        self.grpc_port = options.grpc_port or free_port()
        self.http_port = options.http_port or free_port()
        self.redis: EmbeddedRedis | None = None
        self.redis_url = options.redis_url or ""
        self.children: dict[str, Child] = {}
        self._redis_task: asyncio.Task[None] | None = None

    @property
    def model_repository(self) -> Path:
        """Folder the scheduler, the gateway and every agent read models from."""
        return self.options.data_dir / "models"

    @property
    def admin_target(self) -> str:
        """Where the gateway serves `catenary.v1.Admin`."""
        return f"127.0.0.1:{self.admin_port}"

    def agent_ids(self) -> list[str]:
        """Returns the agents' ids, in order."""
        own = self.options.each_agent
        return [
            str(own[index].get("agent_id", usual)) if index < len(own) else usual
            for index, usual in enumerate(f"agent-{n}" for n in range(self.options.agents))
        ]

    def _settings(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Returns name -> (kind, settings) of every child, in the order of starting."""
        options = self.options
        # Everything listens on loopback only: that is what makes `insecure` acceptable here.
        common: dict[str, Any] = {"insecure": True}
        runtime_dir = options.data_dir / "run"
        addresses = [f"127.0.0.1:{self.scheduler_port}"]
        repository = self.model_repository
        children: dict[str, tuple[str, dict[str, Any]]] = {
            "scheduler": ("scheduler", {
                **common, "scheduler_id": "scheduler-0", "port": self.scheduler_port,
                "model_repository": repository,
                "models": list(options.models), "plan_file": options.plan_file,
                "expected_agents": options.agents,
            }),
            "gateway": ("gateway", {
                **common, "gateway_id": "gateway-0", "grpc_port": self.grpc_port,
                "http_port": self.http_port, "admin_port": self.admin_port,
                "metrics_port": self.metrics_port,
                "scheduler_addresses": addresses, "model_repository": repository,
                "runtime_dir": runtime_dir,
            }),
        }  # fmt: skip
        for index, agent_id in enumerate(self.agent_ids()):
            children[agent_id] = ("agent", {
                **common, "agent_id": agent_id,
                "device": device_of(options.device, index // options.virtual_gpus),
                "scheduler_addresses": addresses, "model_repository": repository,
                "runtime_dir": runtime_dir,
                **share_settings(index, options.agents, options.virtual_gpus, options.device),
            })  # fmt: skip
        for kind, settings in children.values():
            settings.update(options.extra.get(kind, {}))
        for agent_id, own in zip(self.agent_ids(), options.each_agent, strict=False):
            children[agent_id][1].update(own)
        return children

    async def start(self, progress: Callable[[str], None] = lambda _line: None) -> dict[str, Any]:
        """Starts everything and returns the facts once every model is ready.

        Raises:
            Unavailable: not ready within the timeout; the message holds the reason.
        """
        data_dir = self.options.data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        if not self.redis_url:
            self.redis = EmbeddedRedis(data_dir / "redis")
            self.redis_url = await self.redis.start()
            self._redis_task = asyncio.create_task(self._keep_redis(), name="keep-redis")
        for name, (kind, settings) in self._settings().items():
            config = ["--config", str(self.options.config_file)] if self.options.config_file else []
            child = Child(
                name,
                [*config, kind, *command_line_of(settings)],
                data_dir / "logs" / f"{name}.log",
                # The URL holds a password, and arguments are for all to see.
                {"CATENARY_REDIS_URL": self.redis_url} if kind == "scheduler" else {},
            )
            self.children[name] = child
            await child.start()
        await self._wait_until_ready(progress)
        return self.facts()

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
        url = f"http://127.0.0.1:{self.http_port}/readyz"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while True:
                status, text = await _get(session, url)
                if status == 200:
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

    def _raise_if_hopeless(self) -> None:
        for child in self.children.values():
            if child.restarts >= HOPELESS_RESTARTS:
                raise Unavailable(f"{child.name} cannot start: {child.last_line()}")

    def facts(self) -> dict[str, Any]:
        """Returns what `catenaryd up --json` prints."""
        return {
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
        if "gateway" in self.children:
            await self.children["gateway"].stop(DRAIN_S)
        others = [child for name, child in self.children.items() if name != "gateway"]
        await asyncio.gather(*(child.stop(DRAIN_S) for child in others))
        if self._redis_task is not None:
            self._redis_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._redis_task
        if self.redis is not None:
            await self.redis.stop()


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    try:
        async with session.get(url) as response:
            body = await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return 0, ""
    with contextlib.suppress(ValueError, AttributeError):
        return response.status, str(json.loads(body).get("error", body))
    return response.status, body.strip()
