"""Writes what the processes of a live run of server chains read: model, agents' times, placement.

The emulated agents keep the paper's service model. A pass of a session through an agent takes the
way there (tau_c per output token) and then the time of its blocks (tau_p), however many other
sessions are there: the first pass takes `overhead + F / f * inputs` per block, every later one
`s_m / b`. So a session that is alone takes exactly what the simulator says
(`catenary_simulator.chains.loop.SessionDurations`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from catenary_scheduler.planning.chain_placement import ChainPlacement, HopPlacement, HostPlacement
from catenary_scheduler.planning.chains import Composition
from catenary_scheduler.planning.placement import ModelPlacement, Placement, placement_document
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    AgentId,
    ModelKey,
)
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import NotSupported
from catenary_services.models.model_repository import ModelRepository, write_file
from catenary_simulator.chains.cluster import ChainsCluster, ClusterServer

KEY = ModelKey("emulated-decoder", "1")
VOCABULARY = 256
_HIDDEN_SIZE = 8
"""Size of hidden states, which really travel but are no part of the paper's times: as small as may
be."""
SLO_NS = 3_600 * NANOSECONDS_PER_SECOND
BYTES_PER_GB = 1e9
WHOLE_PROMPT = 1 << 20
"""Tokens of a chunk, so many that prompts are not cut: passes of chunks would overlap from agent to
agent."""


@dataclass(frozen=True, slots=True)
class Emulation:
    """The emulation of a cluster's servers by agents."""

    cluster: ChainsCluster
    dilation: float
    """Factor by which the emulation is slower than the cluster."""
    session_tokens: int
    """Largest number of tokens of a session; its cache takes what the cluster's model says in any
    case."""
    shared_device: bool = False
    """Whether sessions of an agent share it step by step, as on real devices, instead of each
    computing as if it were alone, as the paper assumes."""

    def write_model(self, repository: ModelRepository) -> None:
        """Writes all of a model but its weights; the tokenizer knows numbers only."""
        model = self.cluster.model
        write_decoder(
            repository,
            blocks=model.blocks,
            block_bytes=round(model.block_gb * BYTES_PER_GB),
            cache_bytes_per_token=int(model.cache_gb * BYTES_PER_GB / self.session_tokens),
            session_tokens=self.session_tokens,
        )

    def write_agents(self, folder: Path) -> tuple[dict[str, Any], ...]:
        """Writes the times of every agent; returns its settings, see `AgentSettings`.

        Raises:
            NotSupported: The cluster has times per session on the way to a server.
        """
        folder.mkdir(parents=True, exist_ok=True)
        settings = []
        for server in self.cluster.servers:
            file = folder / f"{server.name}.json"
            file.write_text(json.dumps({KEY.name: self.times_of(server)}))
            settings.append(
                {
                    "agent_id": server.name,
                    "device": f"emulated:{server.gpu.name}",
                    "device_class": server.gpu.name,
                    "memory_bytes": round(server.gpu.memory_gb * BYTES_PER_GB),
                    "emulated_profile": file,
                    **({} if self.shared_device else {"prefill_chunk_tokens": WHOLE_PROMPT}),
                }
            )
        return tuple(settings)

    def times_of(self, server: ClusterServer) -> dict[str, float | bool]:
        """Returns an agent's entry in its file of emulated times."""
        speed = server.speed
        if speed.fixed_ms:
            raise NotSupported("live runs need communication.per: token")
        scale = NANOSECONDS_PER_MILLISECOND * self.dilation
        return {
            # The first pass brings the first token; the simulator's times count its decoding.
            "prefill_ns": (speed.block_fixed_ms + speed.block_output_ms) * scale,
            "prefill_token_ns": speed.block_input_ms * scale,
            "decode_ns": speed.block_output_ms * scale,
            "way_ns": speed.per_output_ms * scale,
            "side_by_side": not self.shared_device,
        }


def plan_document(composition: Composition, session_tokens: int) -> dict[str, object]:
    """Returns a composition as a placement, for the scheduler's `plan_file`."""
    hosts = tuple(
        HostPlacement(AgentId(each.server), each.first_block, each.last_block, each.slots)
        for each in composition.hosted
    )
    hosted = {host.agent: host for host in hosts}
    chains = tuple(
        ChainPlacement(
            chain.capacity,
            tuple(
                HopPlacement(
                    AgentId(hop.server),
                    hosted[AgentId(hop.server)].first_block,
                    hop.last_block,
                    hop.first_block,
                )
                for hop in chain.hops
            ),
        )
        for chain in composition.chains
    )
    placed = ModelPlacement(
        KEY, SLO_NS, False, (), chains=chains, hosts=hosts, session_tokens=session_tokens
    )
    return placement_document(Placement((placed,)))


def write_decoder(
    repository: ModelRepository,
    *,
    blocks: int,
    block_bytes: int,
    cache_bytes_per_token: int,
    session_tokens: int,
) -> None:
    """Writes all of a model that generates text but its weights; its tokenizer knows numbers only.

    Args:
        repository: Where to.
        blocks: Number of blocks.
        block_bytes: Weights of each block.
        cache_bytes_per_token: Cache of a token in each block.
        session_tokens: Largest number of tokens of a session.
    """
    table = DecoderTable(
        model_hash="0" * 64,
        blocks=blocks,
        hidden_size=_HIDDEN_SIZE,
        attention_heads=1,
        key_value_heads=1,
        head_size=_HIDDEN_SIZE,
        vocabulary_size=VOCABULARY,
        context_tokens=session_tokens,
        end_token_ids=(0,),
        block_bytes=block_bytes,
        embedding_bytes=0,
        head_bytes=0,
        cache_bytes_per_token=cache_bytes_per_token,
    )
    manifest = ModelManifest(
        key=KEY,
        platform="decoder",
        file="model.safetensors",
        slo_ns=SLO_NS,
        max_batch=1,
        float16_boundaries=False,
        session_tokens=session_tokens,
    )
    repository.write_manifest(manifest)
    repository.write_decoder_table(KEY, table)
    repository.write_block_table(KEY, _blocks(blocks))
    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    write_file(repository.folder(KEY) / "tokenizer.json", tokenizer.to_str())


def _blocks(count: int) -> BlockTable:
    ends = {
        0: TensorSpec("tokens", "INT64", (ANY, 1)),
        count: TensorSpec("logits", "FP32", (ANY, VOCABULARY)),
    }
    between = TensorSpec("hidden", "FP32", (ANY, _HIDDEN_SIZE))
    boundaries = [Boundary((ends.get(cut, between),), 4 * _HIDDEN_SIZE) for cut in range(count + 1)]
    return BlockTable("0" * 64, True, tuple(boundaries), (1,) * count)
