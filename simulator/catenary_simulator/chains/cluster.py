"""What is simulated: a model, GPU slices, and servers at some distance of an orchestrator."""

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
    """A decoder model, by what its blocks need."""

    name: str
    blocks: int
    block_gb: float
    cache_gb: float
    """Of one session in one block."""
    hidden_size: int
    parameters_per_block: int
    attention_heads: int = 1
    kv_heads: int = 1
    gflop_per_token: float = 0.0
    """Of one block; for computation times that depend on the tokens of a request."""
    overhead_ms: float = 1.0
    """Of one block, per session."""
    input_tokens: float = 2000.0
    """Mean per session."""
    output_tokens: float = 20.0
    """Mean per session."""


@dataclass(frozen=True, slots=True)
class GpuSlice:
    """A kind of GPU."""

    name: str
    memory_gb: float
    tflops: float
    bandwidth_gb_per_ms: float
    block_ms: float | None = None
    """tau_p: time of a session of mean size in one block; None: by the formula of the paper."""
    forward_rps: float = 1.0
    """Forward passes of a block per second, as PETALS measures them."""
    network_rps: float = 1.0
    """Requests per second its network carries, as PETALS measures them."""
    petals_most_blocks: int | None = None
    """Cap of PETALS on what it hosts."""

    def block_token_ms(self, model: DecoderModel, factor: float) -> tuple[float, float, float]:
        """Returns milliseconds per block: per session, per input and per output token.

        tau_p = overhead + F / f * inputs + s_m / b * (outputs - 1): prefill is bound by computing,
        decoding by memory (footnote 11 of the paper).
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
    """tau_c: round trip and overhead, once per session or for every output token."""

    per: Literal["session", "token"] = "token"
    overhead_ms: float = 18.0


@dataclass(frozen=True, slots=True)
class ServerSpeed:
    """How long a session takes at a server, by its tokens; milliseconds."""

    fixed_ms: float
    per_output_ms: float
    """Communication."""
    block_fixed_ms: float
    block_input_ms: float
    block_output_ms: float

    def communication_s(self, outputs: float) -> float:
        """Returns tau_c of a session with so many output tokens."""
        return (self.fixed_ms + self.per_output_ms * outputs) * _SECONDS_PER_MS

    def block_s(self, inputs: float, outputs: float) -> float:
        """Returns tau_p of a session with so many tokens."""
        per_block = self.block_fixed_ms + self.block_input_ms * inputs
        return (per_block + self.block_output_ms * outputs) * _SECONDS_PER_MS


@dataclass(frozen=True, slots=True)
class ClusterServer:
    """A GPU at some distance."""

    name: str
    gpu: GpuSlice
    rtt_ms: float
    """To the orchestrator."""
    speed: ServerSpeed


@dataclass(frozen=True, slots=True)
class ChainsCluster:
    """Everything that serves a model."""

    model: DecoderModel
    servers: tuple[ClusterServer, ...]
    rtts_ms: tuple[tuple[float, ...], ...]
    """Between servers."""

    def task(self, rate_per_s: float, load: float = 0.7, stop: StopRule = "all") -> ChainTask:
        """Returns the planning task, with times of a session of mean size."""
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
    """A server to be: what and where."""

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
    """Returns a cluster of servers in these places.

    Args:
        model: What they serve.
        places: The servers.
        communication: What tau_c is made of.
        compute_factor: Multiplies all computation times (kappa).
        rtts_ms: Between servers; None: the mean of both ways to the orchestrator.
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
    """Returns servers at random anchors around a random orchestrator, and times between them.

    Args:
        anchors: Where they may be.
        gpus: The big kind and the small kind.
        count: Servers, J.
        big_share: Share of them with the big kind, eta; which ones is random.
        random: Decides everything.

    Raises:
        InvalidInput: If there are not enough anchors.
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
