"""PETALS and BPRR in the simulator: placed, routed and served as these systems would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from catenary_lab.chains.bprr import BprrMetric
from catenary_lab.chains.bprr_placement import BprrServer, BprrTask, bprr_placement
from catenary_lab.chains.expected_occupancy import ExpectedOccupancy
from catenary_lab.chains.path_dispatcher import PathDispatcher
from catenary_lab.chains.paths import PathServer
from catenary_lab.chains.petals import PetalsMetric
from catenary_lab.chains.petals_placement import PetalsModel, PetalsServer, petals_placement
from catenary_lab.chains.windows import Window, complete
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    AgentId,
    ModelKey,
    Nanoseconds,
)
from catenary_simulator.chains.cluster import ChainsCluster, DecoderModel
from catenary_simulator.chains.loop import SessionDurations, SessionLoop
from catenary_simulator.chains.result import ChainResult, result_of
from catenary_simulator.chains.workload import SessionWorkload

MODEL = ModelKey("simulated", "1")
KnownEnds = Literal["true", "expected"]
"""The ends of sessions by which requests are routed: the true ones, of which servers tell when they
have come, or those that sessions of mean size would have, which the papers' routers go by."""


@dataclass(frozen=True, slots=True)
class PlacedPaths:
    """A placement of blocks, and the dispatcher that routes over it."""

    windows: tuple[Window, ...]
    dispatcher: PathDispatcher | None
    """The dispatcher; None if some block has no host."""


def serve_petals(
    cluster: ChainsCluster, workload: SessionWorkload, seed: int, ends: KnownEnds = "true"
) -> ChainResult | None:
    """Returns how PETALS serves a workload; None if it leaves a block without host.

    Args:
        cluster: The servers.
        workload: The sessions to serve.
        seed: Decides the order in which servers join.
        ends: The ends of sessions by which requests are routed.
    """
    return _serve(cluster, workload, petals_paths(cluster, seed, ends))


def serve_bprr(
    cluster: ChainsCluster,
    workload: SessionWorkload,
    rate_per_s: float,
    ends: KnownEnds = "true",
) -> ChainResult | None:
    """Returns how BPRR serves a workload; None if it leaves a block without host.

    Args:
        cluster: The servers.
        workload: The sessions to serve.
        rate_per_s: Arrival rate that the blocks are placed for.
        ends: The ends of sessions by which requests are routed.
    """
    return _serve(cluster, workload, _bprr_paths(cluster, rate_per_s, ends))


def petals_paths(cluster: ChainsCluster, seed: int, ends: KnownEnds = "true") -> PlacedPaths:
    """Returns the placement and dispatcher of PETALS."""
    model = _petals_model(cluster.model)
    servers = [
        PetalsServer(
            round(server.gpu.memory_gb * 10**9),
            server.gpu.forward_rps,
            server.gpu.network_rps,
        )
        for server in cluster.servers
    ]
    order = np.random.default_rng((seed, 3)).permutation(len(servers)).tolist()
    windows = petals_placement(model, servers, order)
    cache_bytes = round(cluster.model.cache_gb * 10**9)
    slots = [model.slots(window.blocks, cache_bytes) for window in windows]
    numbers, paths = _path_servers(cluster, windows, slots)
    if not complete(windows, model.blocks):
        return PlacedPaths(tuple(windows), None)
    mean = cluster.model
    metric = PetalsMetric(
        lambda here, there: _rtt_ns(cluster, numbers, here, there),
        [
            cluster.servers[number].speed.block_s(mean.input_tokens, mean.output_tokens)
            * NANOSECONDS_PER_SECOND
            / mean.output_tokens
            for number in numbers
        ],
        model.sessions(cache_bytes),
    )
    beliefs = _beliefs(cluster, numbers, paths) if ends == "expected" else None
    return PlacedPaths(tuple(windows), PathDispatcher(MODEL, paths, model.blocks, metric, beliefs))


def _petals_model(model: DecoderModel) -> PetalsModel:
    return PetalsModel(
        model.blocks,
        model.hidden_size,
        model.parameters_per_block,
        model.attention_heads,
        model.kv_heads,
    )


def _bprr_paths(cluster: ChainsCluster, rate_per_s: float, ends: KnownEnds) -> PlacedPaths:
    """Returns the placement and dispatcher of BPRR."""
    model, task = cluster.model, cluster.task(rate_per_s)
    placed = bprr_placement(
        BprrTask(
            tuple(
                BprrServer(server.gpu.memory_gb, server.rtt_ms, float(planned.block_s) * 1000)
                for server, planned in zip(cluster.servers, task.servers, strict=True)
            ),
            model.blocks,
            model.block_gb,
            model.cache_gb,
            rate_per_s,
            model.output_tokens,
        )
    )
    numbers, paths = _path_servers(cluster, placed.windows, placed.slots)
    if not complete(placed.windows, model.blocks):
        return PlacedPaths(placed.windows, None)
    planned = [task.servers[number] for number in numbers]
    beliefs = _beliefs(cluster, numbers, paths) if ends == "expected" else None
    metric = BprrMetric(
        [round(float(each.communication_s) * NANOSECONDS_PER_SECOND) for each in planned],
        [round(float(each.block_s) * NANOSECONDS_PER_SECOND) for each in planned],
        [placed.windows[number].blocks for number in numbers],
        None if beliefs is None else beliefs.wait_ns,
    )
    dispatcher = PathDispatcher(MODEL, paths, model.blocks, metric, beliefs)
    return PlacedPaths(placed.windows, dispatcher)


def _beliefs(
    cluster: ChainsCluster, numbers: Sequence[int], paths: Sequence[PathServer]
) -> ExpectedOccupancy:
    """Returns the beliefs of a router that knows how long a session of mean size takes."""
    mean = cluster.model
    speeds = [cluster.servers[number].speed for number in numbers]
    travels_s = [speed.communication_s(mean.output_tokens) for speed in speeds]
    blocks_s = [speed.block_s(mean.input_tokens, mean.output_tokens) for speed in speeds]

    def service_ns(server: int, blocks: int) -> Nanoseconds:
        return round((travels_s[server] + blocks_s[server] * blocks) * NANOSECONDS_PER_SECOND)

    return ExpectedOccupancy([path.slots for path in paths], service_ns)


def _serve(
    cluster: ChainsCluster, workload: SessionWorkload, placed: PlacedPaths
) -> ChainResult | None:
    if placed.dispatcher is None:
        return None
    loop = SessionLoop(placed.dispatcher, MODEL, workload, SessionDurations(cluster, workload))
    loop.run()
    return result_of(workload, loop)


def _path_servers(
    cluster: ChainsCluster, windows: Sequence[Window], slots: Sequence[int]
) -> tuple[list[int], list[PathServer]]:
    """Returns the numbers of the servers that host blocks, and these servers for the graph."""
    numbers = [number for number, window in enumerate(windows) if window.blocks]
    return numbers, [
        PathServer(
            AgentId(cluster.servers[number].name),
            windows[number].first_block,
            windows[number].last_block,
            slots[number],
        )
        for number in numbers
    ]


def _rtt_ns(cluster: ChainsCluster, numbers: Sequence[int], here: int, there: int) -> Nanoseconds:
    """Returns the round trip between two servers of the graph; -1 is the orchestrator."""
    if here < 0 or there < 0:
        milliseconds = cluster.servers[numbers[max(here, there)]].rtt_ms
    else:
        milliseconds = cluster.rtts_ms[numbers[here]][numbers[there]]
    return round(milliseconds * NANOSECONDS_PER_MILLISECOND)
