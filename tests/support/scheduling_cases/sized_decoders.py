"""Decoders of 6 blocks in sizes only, as planners see them: tables by hand, without weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from catenary_scheduler.planning import DeployedModel, ModelPlacement
from catenary_scheduler.planning.live import (
    ChainCluster,
    ChainLoad,
    SessionShape,
    chain_jobs,
    placed,
    solve_job,
)
from catenary_scheduler.replanning.chain_builder import compose
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import AgentId, ModelKey, ServerId
from catenary_services.domain.model import BlockTable, Boundary
from catenary_services.domain.plan import Agent
from catenary_services.domain.tensors import ANY, TensorSpec

BLOCKS = 6
_DECODER = DecoderTable(
    model_hash="0" * 64,
    blocks=BLOCKS,
    hidden_size=8,
    attention_heads=2,
    key_value_heads=1,
    head_size=4,
    vocabulary_size=100,
    context_tokens=128,
    end_token_ids=(2,),
    block_bytes=100,
    embedding_bytes=50,
    head_bytes=50,
    cache_bytes_per_token=1,
)


def decoder_table(**changes: object) -> DecoderTable:
    """Returns a table of blocks of 100 bytes and a cache of 1 byte a token, but for `changes`."""
    return replace(_DECODER, **changes)  # type: ignore[arg-type]


def block_table(blocks: int = BLOCKS) -> BlockTable:
    """Returns the cuts of such a decoder, whose blocks take no time."""
    boundary = Boundary((TensorSpec("x", "FP32", (ANY, 8)),), 32)
    return BlockTable("0" * 64, True, (boundary,) * (blocks + 1), (0,) * blocks)


def sized_agent(name: str, memory_bytes: int, device_class: str = "cpu", **facts: Any) -> Agent:
    """Returns an agent on a server of its own."""
    return Agent(AgentId(name), device_class, ServerId(name), memory_bytes, 10**9, **facts)


def sized_model(
    key: ModelKey, max_batch: int = 4, partitions: int | None = None, **facts: Any
) -> DeployedModel:
    """Returns such a decoder as it is deployed, with sessions of 64 tokens."""
    known = {"decoder": _DECODER, "session_tokens": 64, **facts}
    return DeployedModel(key, block_table(), 10**9, max_batch, True, partitions, **known)


def sized_load(model: DeployedModel) -> ChainLoad:
    """Returns a tenth of a session a second, of ten tokens in and ten out."""
    return ChainLoad(model, 0.1, SessionShape(10, 10))


def served(there: ChainCluster) -> ModelPlacement:
    """Returns the chains that are planned for the one model of a cluster."""
    (job,) = chain_jobs(there)
    return placed(job, solve_job(job, compose))
