"""The processes of a live run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

import catenary
from catenary_services.errors import Unavailable
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster

AS_SIMULATED = {"fair_share": False}
"""Gateway settings as in simulations, which have no gateway that refuses requests that may be
late."""
EMULATED = {"heartbeat_s": 2.0, "silence_s": 20.0}
"""Timeouts of clusters with many emulated agents: a dozen processes and more on two cores must not
take each other for dead."""
REAL = {"heartbeat_s": 1.0, "silence_s": 15.0}
"""Timeouts of clusters whose agents have a real model, of which there are fewer."""
BUSY_SECONDS = "catenary_device_busy_seconds_total"
"""Metric of an agent: for how long its device has computed."""
Progress = Callable[[str], None]
_PAGE_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


class LiveCluster(LocalCluster):
    """A cluster that a live run measures.

    Args:
        options: Its agents and models.
        folder: Folder for models, logs and Redis data.
        timeouts: `EMULATED` or `REAL`.
        scheduler: Settings of the scheduler beyond the usual ones.
        plan: Document of the plan to serve; None if the scheduler makes one.
    """

    def __init__(
        self,
        options: ClusterOptions,
        folder: Path,
        timeouts: Mapping[str, float],
        scheduler: Mapping[str, Any],
        plan: Mapping[str, object] | None = None,
    ) -> None:
        plan_file = None
        if plan is not None:
            plan_file = folder / "plan.json"
            plan_file.write_text(json.dumps(plan))
        super().__init__(
            replace(
                options,
                plan_file=plan_file,
                grpc_port=0,
                http_port=0,
                data_dir=folder,
                extra={
                    "gateway": AS_SIMULATED,
                    "agent": {**timeouts},
                    "scheduler": {**timeouts, **scheduler},
                },
            )
        )

    @asynccontextmanager
    async def serving(self, progress: Progress) -> AsyncIterator[Self]:
        """Starts the processes and stops them at the end; `progress` hears what is awaited."""
        try:
            await self.start(progress)
            yield self
        finally:
            await self.stop()

    @property
    def target(self) -> str:
        """Address of the gateway."""
        return f"127.0.0.1:{self.grpc_port}"

    def client(self, timeout_s: float = 600.0) -> catenary.AsyncClient:
        """Returns a client of the gateway and of its Admin service."""
        return catenary.AsyncClient(
            self.target, admin_target=self.admin_target, timeout_s=timeout_s
        )

    @property
    def processes(self) -> int:
        """Number of processes, Redis included."""
        return len(self.children) + 1

    def cpu_seconds(self) -> float:
        """Returns the CPU time all processes have used so far, without Redis."""
        total = 0.0
        for child in self.children.values():
            with contextlib.suppress(psutil.Error):
                if child.pid is not None:
                    times = psutil.Process(child.pid).cpu_times()
                    total += times.user + times.system
        return total

    async def counted(self, metric: str) -> list[float]:
        """Returns a counter of each agent, over all its labels, in the order of the agents.

        Every agent's settings must have a `metrics_port`.

        Raises:
            Unavailable: An agent's page of metrics is not to be had.
        """
        ports = [each["metrics_port"] for each in self.options.each_agent]
        async with aiohttp.ClientSession(timeout=_PAGE_TIMEOUT) as session:
            return [await _counter_at(session, port, metric) for port in ports]


async def _counter_at(session: aiohttp.ClientSession, port: int, metric: str) -> float:
    try:
        async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
            page = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"an agent's metrics are not to be had: {error!r}") from None
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == metric
    )
