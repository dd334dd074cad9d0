"""Cost of a request through real processes, and the rate that the control path carries.

* CPU over ONNX Runtime: gateway, scheduler and one agent serve one request at a time. The figure is
  the CPU time all three spend on it, less that of the same model called in process. It is read per
  request from the kernel's run-time accounting of every thread, so that idle time does not count.
  Work that follows the answer (reports, Redis) falls into the window of the next request.
* Control path: client, gateway, scheduler and two agents (five processes). The agents emulate a
  device that takes no time, tensors are tiny, and 64 requests are in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import catenary
from catenary_lab.limits import Figure, at_least, at_most
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.models import ensure_model
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster, free_port

CPU_LIMIT_MS = 2.5
CONTROL_PATH_LIMIT_RPS = 600.0
IN_FLIGHT = 64
FEATURES = 64


def dense_model(repository: ModelRepository, name: str, hidden: int, layers: int) -> ModelKey:
    """Writes a real ONNX model of dense layers and its block table; returns its key."""
    generator = np.random.default_rng(1)
    widths = [FEATURES, *[hidden] * (layers - 1), FEATURES]
    nodes, weights, value = [], [], "x"
    for layer, (width, following) in enumerate(itertools.pairwise(widths)):
        matrix = generator.normal(0, width**-0.5, (width, following)).astype(np.float32)
        weights.append(numpy_helper.from_array(matrix, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"]))
        value = f"r{layer}"
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", FEATURES])],
        weights,
    )
    key = save_graph(repository, name, graph, float16_boundaries=True)
    ensure_model(repository.root, name)
    return key


def save_graph(
    repository: ModelRepository, name: str, graph: onnx.GraphProto, *, float16_boundaries: bool
) -> ModelKey:
    """Writes the model of a graph, with an objective of a second; returns its key."""
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    key = ModelKey(name, "1")
    repository.write_manifest(
        ModelManifest(
            key=key,
            platform="onnxruntime_onnx",
            file="model.onnx",
            slo_ns=1_000_000_000,
            max_batch=8,
            float16_boundaries=float16_boundaries,
        )
    )
    onnx.save(model, repository.model_file(key))
    return key


def cpu_ns(pid: int) -> int:
    """Returns the CPU time that a process has used, in nanoseconds, with threads that ended."""
    return time.clock_gettime_ns(~pid << 3 | 2)  # Linux's clock of another process's CPU time


async def bare_grpc_server_ms(requests: int) -> float:
    """Returns the median CPU milliseconds of a bare grpc.aio server for one unary call."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    process = context.Process(target=_bare_server_process, args=(port,), daemon=True)
    process.start()
    spent = []
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), 30)
            call: Any = channel.unary_unary("/bare/Echo")
            for _ in range(requests):
                before = cpu_ns(process.pid or 0)
                await call(b"x" * 300)
                spent.append(cpu_ns(process.pid or 0) - before)
    finally:
        process.kill()
        process.join()
    return statistics.median(spent) / 1e6


def _bare_server_process(port: int) -> None:
    async def echo(request: bytes, _context: object) -> bytes:
        return request

    async def serve() -> None:
        server = grpc.aio.server()
        methods: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    import uvloop

    uvloop.run(serve())


def cpu_by_process(pids: Mapping[str, int]) -> dict[str, int]:
    """Returns the CPU time of each process in nanoseconds, by name."""
    return {name: cpu_ns(pid) for name, pid in pids.items()}


def pipeline_of(stages: list[list[int]], batch: int) -> dict[str, Any]:
    """Returns a pipeline of a placement with one agent per stage."""
    partitions = [
        {"blocks": blocks, "agents": [f"agent-{index}"]} for index, blocks in enumerate(stages)
    ]
    return {"batch": batch, "partitions": partitions}


@asynccontextmanager
async def cluster_of(
    folder: Path, pipelines: Mapping[str, dict[str, Any]], device: str, **agent: Any
) -> AsyncIterator[LocalCluster]:
    """Runs a local cluster that serves models, each with one pipeline from `pipeline_of`."""
    models = [{"name": name, "pipelines": [each]} for name, each in pipelines.items()]
    plan = folder / f"plan-{'-'.join(pipelines)}.json"
    plan.write_text(json.dumps({"models": models}))
    cluster = LocalCluster(
        ClusterOptions(
            agents=max(len(each["partitions"]) for each in pipelines.values()),
            device=device,
            models=tuple(pipelines),
            plan_file=plan,
            grpc_port=0,
            http_port=0,
            data_dir=folder,
            extra={"agent": agent},
        )
    )
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


async def cpu_over_onnxruntime(folder: Path, requests: int) -> list[Figure]:
    """Measures CPU time per request, one at a time, interleaved with calls in process."""
    row = np.random.default_rng(2).normal(size=(1, FEATURES)).astype(np.float32)
    repository = ModelRepository(folder / "models")
    key = dense_model(repository, "small", 256, 4)
    blocks = repository.block_table(key).blocks
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(repository.model_file(key)),
        options,
        providers=["CPUExecutionProvider"],
    )
    direct, served, latency, parts = [], [], [], []
    async with cluster_of(folder, {"small": pipeline_of([[0, blocks]], 1)}, "cpu") as cluster:
        pids = {name: child.pid for name, child in cluster.children.items() if child.pid}
        async with catenary.AsyncClient(f"127.0.0.1:{cluster.grpc_port}") as client:
            for number in range(requests + 50):
                before = time.thread_time_ns()
                session.run(None, {"x": row})
                direct.append(time.thread_time_ns() - before)
                spent, start = cpu_by_process(pids), time.perf_counter_ns()
                await client.infer("small", {"x": row})
                took = time.perf_counter_ns() - start
                if number >= 50:
                    after = cpu_by_process(pids)
                    parts.append({name: after[name] - spent[name] for name in pids})
                    served.append(sum(parts[-1].values()))
                    latency.append(took)
    over = (statistics.median(served) - statistics.median(direct)) / 1e6
    floor = await bare_grpc_server_ms(requests)
    shares = {name: statistics.median(part[name] for part in parts) / 1e6 for name in parts[0]}
    return [
        at_most("gateway + scheduler + agent, CPU over ORT, p50", over, "ms", CPU_LIMIT_MS),
        at_most("  wall time of it at the client, p50", statistics.median(latency) / 1e6, "ms"),
        *(at_most(f"  CPU of it in {name}, p50", share, "ms") for name, share in shares.items()),
        at_most("  beside it: one call to a bare grpc.aio server, CPU, p50", floor, "ms"),
    ]


async def _load(target: str, seconds: float) -> tuple[int, Counter[str], list[float]]:
    row = np.zeros((1, FEATURES), np.float32)
    done, failed, latencies = 0, Counter[str](), []
    async with catenary.AsyncClient(target) as client:
        await client.infer("deep", {"x": row})
        end = time.perf_counter() + seconds

        async def worker() -> None:
            nonlocal done
            while (start := time.perf_counter()) < end:
                try:
                    await client.infer("deep", {"x": row})
                except catenary.CatenaryError as error:
                    failed[type(error).__name__] += 1
                else:
                    done += 1
                    latencies.append(time.perf_counter() - start)

        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return done, failed, latencies


def _load_process(target: str, seconds: float, results: Any) -> None:
    import uvloop

    results.put(uvloop.run(_load(target, seconds)))


async def control_path(folder: Path, batch: int, seconds: float) -> list[Figure]:
    """Measures requests per second through five processes."""
    repository = ModelRepository(folder / "models")
    blocks = repository.block_table(dense_model(repository, "deep", 1024, 8)).blocks
    stages = [[0, blocks // 2], [blocks // 2, blocks]]
    pipelines = {"deep": pipeline_of(stages, batch)}
    async with cluster_of(folder, pipelines, "emulated:null", emulated_slowdown=0.0) as cluster:
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        target = f"127.0.0.1:{cluster.grpc_port}"
        process = context.Process(target=_load_process, args=(target, seconds, results))
        process.start()
        pids = {name: child.pid for name, child in cluster.children.items() if child.pid}
        before = cpu_by_process(pids)
        done, failed, latencies = await asyncio.to_thread(results.get, timeout=seconds + 60)
        process.join()
        cpu = {name: (cpu_ns(pid) - before[name]) / 1e3 / done for name, pid in pids.items()}
    rate = done / seconds
    name = f"control path, five processes, 64 in flight, batch {batch}"
    figures = [
        at_least(name, rate, "requests/s", CONTROL_PATH_LIMIT_RPS),
        at_most(f"  failed {dict(failed) or ''}", float(failed.total()), "requests", 0.0),
        at_most("  p50 latency", statistics.median(latencies) * 1e3, "ms"),
    ]
    figures += [
        at_most(f"  CPU per request, {process_name}", value, "us")
        for process_name, value in cpu.items()
    ]
    return figures


async def _run(quick: bool) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        figures += await cpu_over_onnxruntime(Path(scratch, "one"), 200 if quick else 1_000)
        for batch in (1, 8):
            figures += await control_path(
                Path(scratch, f"many-{batch}"), batch, 3.0 if quick else 10.0
            )
    return figures


def run(quick: bool = False) -> list[Figure]:
    """Returns the figures of this bench."""
    return asyncio.run(_run(quick))
