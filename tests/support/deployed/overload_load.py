"""Load for the overload tests, a process of its own: phases of open or closed loops, by API key.

`python overload_load.py ORDER ANSWER` reads one JSON file and writes the other. A phase is
`{"name", "seconds", "rates": {key name: requests per s}}`, Poisson and open loop, or
`{"name", "seconds", "workers": {key name: count}}`, each of which asks again as soon as it is
answered. Nothing is repeated. An answer counts from the moment its request was due, a refusal from
the moment it was sent.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import catenary

TIMEOUT_S = 20.0
LEAD_S = 0.2


@dataclass(slots=True)
class Sent:
    """One request and what came of it."""

    phase: str
    key: str
    due_s: float
    """From the start of the phase."""
    lag_s: float
    took_s: float
    """Until the answer since it was due, or until the refusal since it was sent."""
    error: str = ""
    retry_after_s: float | None = None
    tokens: int = 0


@dataclass(slots=True)
class Probe:
    """A call that costs a server next to nothing: how slow the machine itself is."""

    phase: str
    took_s: float


class Generator:
    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._clients = {
            name: catenary.AsyncClient(order["target"], api_key=key, timeout_s=TIMEOUT_S)
            for name, key in order["keys"].items()
        }
        self._random = random.Random(order.get("seed", 1))
        self.sent: list[Sent] = []
        self.probes: list[Probe] = []
        self._phase = ""
        self.started: dict[str, float] = {}
        self._ask: Callable[[catenary.AsyncClient], Awaitable[int]] = (
            self._generate if order["kind"] == "generation" else self._infer
        )
        self._row = np.zeros((1, order.get("features", 1)), np.float32)

    async def run(self) -> None:
        await asyncio.gather(*(client.ready() for client in self._clients.values()))
        calls: list[asyncio.Task[Sent]] = []
        probing = asyncio.create_task(self._probe())
        for phase in self._order["phases"]:
            self.started[phase["name"]] = time.time()
            self._phase = phase["name"]
            start = time.monotonic() + LEAD_S
            if "workers" in phase:
                end = start + phase["seconds"]
                workers = [
                    self._worker(phase["name"], key, start, end)
                    for key, count in phase["workers"].items()
                    for _ in range(count)
                ]
                await asyncio.gather(*workers)
                continue
            for due_s, key in self._arrivals(phase):
                if (delay := start + due_s - time.monotonic()) > 0:
                    await asyncio.sleep(delay)
                calls.append(
                    asyncio.create_task(self._call(phase["name"], key, start + due_s, start))
                )
        await asyncio.gather(*calls)
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    async def _probe(self) -> None:
        client = next(iter(self._clients.values()))
        while True:
            began = time.monotonic()
            await client.live()
            self.probes.append(Probe(self._phase, time.monotonic() - began))
            await asyncio.sleep(0.05)

    def _arrivals(self, phase: dict[str, Any]) -> list[tuple[float, str]]:
        found = []
        for key, rate in phase["rates"].items():
            moment = self._random.expovariate(rate)
            while moment < phase["seconds"]:
                found.append((moment, key))
                moment += self._random.expovariate(rate)
        return sorted(found)

    async def _worker(self, phase: str, key: str, start: float, end: float) -> None:
        await asyncio.sleep(start - time.monotonic())
        while (now := time.monotonic()) < end:
            last = await self._call(phase, key, now, start)
            if last.error:
                await asyncio.sleep(0.02)

    async def _call(self, phase: str, key: str, due: float, start: float) -> Sent:
        began = time.monotonic()
        sent = Sent(phase, key, due - start, began - due, 0.0)
        self.sent.append(sent)
        try:
            sent.tokens = await self._ask(self._clients[key])
            sent.took_s = time.monotonic() - due
        except catenary.CatenaryError as error:
            sent.error, sent.retry_after_s = error.reason, error.retry_after_s
            sent.took_s = time.monotonic() - began
        return sent

    async def _infer(self, client: catenary.AsyncClient) -> int:
        order = self._order
        request = catenary.InferRequest(
            order["model"], {order["input"]: self._row}, slo_ms=order["deadline_ms"]
        )
        await client.send(request, timeout_s=TIMEOUT_S)
        return 1

    async def _generate(self, client: catenary.AsyncClient) -> int:
        order = self._order
        result = await client.generate(
            order["model"],
            [1 + n % 200 for n in range(order["prompt_tokens"])],
            max_tokens=order["answer_tokens"],
            ignore_eos=True,
            time_to_first_token_slo_ms=order["first_token_ms"],
            timeout_s=order["deadline_ms"] / 1e3,
        )
        return len(result.token_ids)


async def _main(order: dict[str, Any]) -> dict[str, Any]:
    generator = Generator(order)
    await generator.run()
    return {
        "sent": [asdict(each) for each in generator.sent],
        "probes": [asdict(each) for each in generator.probes],
        "started": generator.started,
    }


if __name__ == "__main__":
    import uvloop

    answer = uvloop.run(_main(json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(json.dumps(answer))
