"""The simulated cluster: a model, GPU slices, and servers at some distance from an orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from catenary_scheduler.planning.chains.problem import ChainTask, Server, StopRule
from catenary_services.errors import InvalidInput
from catenary_simulator.chains.anchors import NetworkAnchor, rtt_ms

_SECONDS_PER_MS = 1e-3


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """A decoder model, described by the memory and the work that its blocks need."""

    name: str
    blocks: int
    block_gb: float
    cache_gb: float
    """Cache of one session in one block."""
    hidden_size: int
    parameters_per_block: int
    attention_heads: int = 1
    kv_heads: int = 1
    gflop_per_token: float = 0.0
    """Work of one block per token, for computation times that depend on the tokens of a request."""
    overhead_ms: float = 1.0
    """Overhead of one block per session."""
    input_tokens: float = 2000.0
    """Mean number of input tokens per session."""
    output_tokens: float = 20.0
    """Mean number of output tokens per session."""


@dataclass(frozen=True, slots=True)
class GpuSlice:
    """A kind of GPU, or of a slice of one."""

    name: str
    memory_gb: float
    tflops: float
    bandwidth_gb_per_ms: float
    block_ms: float | None = None
    """The paper's tau_p: time of a session of mean size in one block; None: by the paper's
    formula."""
    forward_rps: float = 1.0
    """Forward passes of a block per second, as PETALS measures them."""
    network_rps: float = 1.0
    """Requests per second its network carries, as PETALS measures them."""

    def block_token_ms(self, model: DecoderModel, factor: float) -> tuple[float, float, float]:
        """Returns milliseconds per block as a triple: per session, per input and per output token.

        tau_p = overhead + F / f * inputs + s_m / b * (outputs - 1): prefill is bound by
        computing, decoding by memory (footnote 11 of the paper).
        """
        prefill = model.gflop_per_token / self.tflops
        decode = model.block_gb / self.bandwidth_gb_per_ms
        if self.block_ms is None:
            return (model.overhead_ms - decode) * factor, prefill * factor, decode * factor
        mean = model.overhead_ms + prefill * model.input_tokens
        mean += decode * (model.output_tokens - 1)
        scale = factor * self.block_ms / mean
        return (model.overhead_ms - decode) * scale, prefill * scale, decode * scale


@dataclass(frozen=True, slots=True)
class CommunicationCost:
    """The paper's tau_c: round trip and overhead, once per session or for every output token."""

    per: Literal["session", "token"] = "token"
    overhead_ms: float = 18.0


@dataclass(frozen=True, slots=True)
class ServerSpeed:
    """Times of a session at one server in milliseconds, by its tokens."""

    fixed_ms: float
    per_output_ms: float
    """Communication time per output token; `fixed_ms` is that per session."""
    block_fixed_ms: float
    block_input_ms: float
    block_output_ms: float

    def communication_s(self, outputs: float) -> float:
        """Returns tau_c in seconds of a session with `outputs` output tokens."""
        return (self.fixed_ms + self.per_output_ms * outputs) * _SECONDS_PER_MS

    def block_s(self, inputs: float, outputs: float) -> float:
        """Returns tau_p in seconds of one block, for a session with so many tokens."""
        per_block = self.block_fixed_ms + self.block_input_ms * inputs
        return (per_block + self.block_output_ms * outputs) * _SECONDS_PER_MS


@dataclass(frozen=True, slots=True)
class ClusterServer:
    """A server of the cluster: a GPU at some distance from the orchestrator."""

    name: str
    gpu: GpuSlice
    rtt_ms: float
    """Round-trip time to the orchestrator."""
    speed: ServerSpeed


@dataclass(frozen=True, slots=True)
class ChainsCluster:
    """A model and all servers that can serve it."""

    model: DecoderModel
    servers: tuple[ClusterServer, ...]
    rtts_ms: tuple[tuple[float, ...], ...]
    """Round-trip times between servers: a row and a column per server, in their order."""

    def task(self, rate_per_s: float, load: float = 0.7, stop: StopRule = "all") -> ChainTask:
        """Returns the planning task, in which times are those of a session of mean size."""
        model = self.model
        servers = tuple(
            Server(
                server.name,
                server.gpu.memory_gb,
                server.speed.communication_s(model.output_tokens),
                server.speed.block_s(model.input_tokens, model.output_tokens),
            )
            for server in self.servers
        )
        return ChainTask(
            servers, model.blocks, model.block_gb, model.cache_gb, rate_per_s, load, stop
        )


@dataclass(frozen=True, slots=True)
class ServerSite:
    """A server to be built: its kind of GPU and its round-trip time to the orchestrator."""

    name: str
    gpu: GpuSlice
    rtt_ms: float


def cluster_of(
    model: DecoderModel,
    places: Sequence[ServerSite],
    communication: CommunicationCost,
    *,
    compute_factor: float = 1.0,
    rtts_ms: Sequence[Sequence[float]] | None = None,
) -> ChainsCluster:
    """Returns a cluster with a server at each place.

    Args:
        model: The model they serve.
        places: The servers.
        communication: The parts of tau_c.
        compute_factor: Factor of all computation times (kappa).
        rtts_ms: Round-trip times between servers; None: the mean of both ways to the orchestrator.
    """
    servers = tuple(
        ClusterServer(
            place.name,
            place.gpu,
            place.rtt_ms,
            _speed(model, place, communication, compute_factor),
        )
        for place in places
    )
    if rtts_ms is None:
        rtts_ms = [[(here.rtt_ms + there.rtt_ms) / 2 for there in places] for here in places]
    return ChainsCluster(model, servers, tuple(tuple(row) for row in rtts_ms))


def random_places(
    anchors: Sequence[NetworkAnchor],
    gpus: tuple[GpuSlice, GpuSlice],
    count: int,
    big_share: float,
    random: np.random.Generator,
) -> tuple[list[ServerSite], list[list[float]]]:
    """Returns servers at random anchors around a random orchestrator, and their round-trip times.

    Args:
        anchors: The places to choose from.
        gpus: The big kind and the small kind.
        count: Number of servers, J.
        big_share: Share of the servers with the big kind, eta; which ones is random.
        random: Generator of all random choices.

    Raises:
        InvalidInput: There are not enough anchors.
    """
    if count + 1 > len(anchors):
        raise InvalidInput("servers", f"{count} and an orchestrator at {len(anchors)} anchors")
    orchestrator, *chosen = (
        anchors[each] for each in random.permutation(len(anchors))[: count + 1]
    )
    big = set(random.permutation(count)[: round(big_share * count)].tolist())
    places = [
        ServerSite(f"server-{index}", gpus[0 if index in big else 1], rtt_ms(orchestrator, anchor))
        for index, anchor in enumerate(chosen)
    ]
    return places, [[rtt_ms(here, there) for there in chosen] for here in chosen]


def _speed(
    model: DecoderModel, place: ServerSite, communication: CommunicationCost, factor: float
) -> ServerSpeed:
    way = place.rtt_ms + communication.overhead_ms
    per_token = communication.per == "token"
    compute = place.gpu.block_token_ms(model, factor)
    return ServerSpeed(0.0 if per_token else way, way if per_token else 0.0, *compute)
