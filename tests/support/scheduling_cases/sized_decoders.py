"""Decoders of 6 blocks in sizes only, as planners see them: tables by hand, without weights."""

from __future__ import annotations

from dataclasses import replace

from catenary_scheduler.planning import ModelPlacement
from catenary_scheduler.planning.live import ChainCluster, chain_jobs, placed, solve_job
from catenary_scheduler.replanning.chain_builder import compose
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.model import BlockTable, Boundary
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


def served(there: ChainCluster) -> ModelPlacement:
    """Returns the chains that are planned for the one model of a cluster."""
    (job,) = chain_jobs(there)
    return placed(job, solve_job(job, compose))
