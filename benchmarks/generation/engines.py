"""The gateway in front of an engine, beside the engine's own server.

Both are asked for the same streams of tokens over HTTP, in turns, and of the same process: the
engine that an agent runs also answers on its Unix socket whoever may open it. The best round of
each counts. Engines are those that `make engines` has installed.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from benchmarks.generation.generation import DATA, FP32, data_dir_of, prompt_of
from catenary_agent.decoders.importing.engine_models import import_engine_model
from catenary_agent.decoders.importing.importing import ImportOptions
from catenary_lab.limits import Figure, at_least, at_most
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.demo_language_model import weights_file
from catenaryd.demo.models import ensure_model
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster

STREAMS = (1, 8, 32)
PROMPT_TOKENS = 32
ENVIRONMENTS = Path(".venv-engines")
ARGUMENTS = {"llama_server": (), "vllm": ("--enforce-eager", "--dtype", "float32")}
RATE_LIMIT, FIRST_TOKEN_LIMIT_MS = 0.95, 5.0
_START_S = 900.0
_TIMEOUT = aiohttp.ClientTimeout(total=600.0)
_PATIENT = {"x-deadline-ms": "600000"}
"""An engine alone has no deadlines, so the gateway shall keep none that a busy machine misses."""


@dataclass(frozen=True)
class Round:
    """Streams that began at the same time."""

    tokens_per_s: float
    first_token_s: float
    """The median over the streams."""


@dataclass
class Server:
    """One of the two that are compared."""

    session: aiohttp.ClientSession
    url: str
    model: str

    async def round(self, streams: int, tokens: int, number: int) -> Round:
        """Returns the times of streams whose prompts no other round has."""
        began_s = time.perf_counter()
        asked = (self._first_token_s(number * 100 + each, tokens) for each in range(streams))
        firsts = await asyncio.gather(*asked)
        rate = streams * tokens / (time.perf_counter() - began_s)
        return Round(rate, statistics.median(firsts))

    async def _first_token_s(self, number: int, tokens: int) -> float:
        """Reads a whole answer, and returns the seconds to the first piece of it."""
        body = {
            "model": self.model,
            "prompt": prompt_of(PROMPT_TOKENS, number),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s, first_s, last = time.perf_counter(), 0.0, b""
        url = f"{self.url}/v1/completions"
        async with self.session.post(url, json=body, headers=_PATIENT) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first_s, last = first_s or time.perf_counter() - began_s, line
        if f'"completion_tokens":{tokens}' not in last.decode().replace(" ", ""):
            raise RuntimeError(f"{self.url} did not generate {tokens} tokens: {last[:200]!r}")
        return first_s


def install(engine: str) -> ModelKey:
    """Puts SmolLM2 into the repository of benches, for one engine alone."""
    repository, key = ModelRepository(DATA / "models"), ModelKey(f"smollm2-{engine}", "1")
    source = weights_file()
    if engine == "vllm":
        ensure_model(repository.root, FP32)
        source = repository.folder(repository.resolve(FP32))
    options = ImportOptions(session_tokens=256, max_sessions=max(STREAMS))
    import_engine_model(repository, source, key, engine, options)
    manifest = replace(repository.manifest(key), engine_arguments=ARGUMENTS[engine])
    repository.write_manifest(manifest)
    repository.record_content(key)
    return key


@asynccontextmanager
async def servers(engine: str, key: ModelKey) -> AsyncIterator[tuple[Server, Server]]:
    """Runs a cluster of one engine; yields its gateway, and the engine's own server."""
    folder = data_dir_of(engine)
    python = (ENVIRONMENTS / engine / "bin" / "python").absolute()
    agent = {"threads": 1, "decoder": engine, "engine_python": str(python)}
    cluster = LocalCluster(
        ClusterOptions(
            agents=1,
            models=(key.name,),
            grpc_port=0,
            http_port=0,
            data_dir=folder,
            ready_timeout_s=_START_S,
            extra={"agent": agent, "scheduler": {"load_timeout_s": _START_S}},
        )
    )
    try:
        facts = await cluster.start()
        sockets = (folder / "run").glob("engine-*/engine.sock")
        socket = max(
            sockets, key=lambda each: each.stat().st_mtime
        )  # a killed bench leaves its own
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as ours,
            aiohttp.ClientSession(  # engines close connections that wait for the gateway's turn
                connector=aiohttp.UnixConnector(path=str(socket), force_close=True),
                timeout=_TIMEOUT,
            ) as own,
        ):
            yield Server(ours, str(facts["http"]), key.name), Server(own, "http://engine", "model")
    finally:
        await cluster.stop()


async def compared(engine: str, quick: bool) -> list[Figure]:
    """Returns the figures of one engine."""
    rounds, tokens, number = (1, 16, 0) if quick else (3, 64, 0)
    figures: list[Figure] = []
    async with servers(engine, install(engine)) as pair:
        for streams in STREAMS:
            seen: tuple[list[Round], list[Round]] = ([], [])
            for _ in range(rounds):
                for server, its in zip(pair, seen, strict=True):
                    number += 1
                    its.append(await server.round(streams, tokens, number))
            ours, own = (max(each.tokens_per_s for each in its) for its in seen)
            first, first_own = (min(each.first_token_s for each in its) for its in seen)
            name = f"{engine}, {streams} streams"
            more_ms = (first - first_own) * 1e3
            figures += [
                at_least(f"{name}: gateway / engine alone", ours / own, "x", RATE_LIMIT),
                at_most("  engine alone", own, "tokens/s"),
                at_most("  first token later", more_ms, "ms", FIRST_TOKEN_LIMIT_MS),
                at_most("  first token of the engine alone", first_own * 1e3, "ms"),
            ]
    return figures


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    installed = [each for each in ARGUMENTS if (ENVIRONMENTS / each / "bin" / "python").exists()]
    if not installed:
        raise RuntimeError("no engine is installed: make engines")
    return [figure for each in installed for figure in asyncio.run(compared(each, quick))]
