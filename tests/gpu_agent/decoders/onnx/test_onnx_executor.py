"""What ONNX Runtime decoders have beside what all decoders have."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from catenary_agent.decoders.base import CacheLayout, DecoderCost, StepItem
from catenary_agent.decoders.onnx.onnx_executor import OnnxDecoder
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from small_models.decoder_ring import DecoderRing
from tiny_language_models import (
    LAYERS,
    PROMPTS,
    TOKENS,
    VOCABULARY,
    copied_llama,
    imported_llama,
    llama_answers,
    worker_in_this_process,
)

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

KEY = ModelKey("tiny", "1")


@pytest.fixture
def repository() -> ModelRepository:
    return imported_llama()[0]


def ring(repository: ModelRepository, *cuts: int) -> DecoderRing:
    return DecoderRing(
        [
            OnnxDecoder(repository, PartitionKey(KEY, a, b), CacheLayout(8 * (b - a), 64, (a,)))
            for a, b in pairwise((0, *cuts, LAYERS))
        ]
    )


def test_memory_of_caches_is_committed_late_and_given_back(repository: ModelRepository) -> None:
    """Room for 4,000 sessions costs nothing; what one wrote goes when it leaves."""
    key, tokens = PartitionKey(KEY, 0, LAYERS), 128
    table = repository.decoder_table(KEY)
    executor = OnnxDecoder(repository, key, CacheLayout(4000 * LAYERS, tokens, (0,)))
    process = psutil.Process()
    whole_cache = 4000 * LAYERS * table.slot_bytes(tokens)
    before = process.memory_info().rss
    ids = np.arange(tokens) % VOCABULARY
    for session in range(400):
        executor.open_session(session, 0)
        executor.step([StepItem(session, 0, ids, "nothing")])
    used = process.memory_info().rss - before
    assert 0.08 * whole_cache < used < 0.2 * whole_cache
    for session in range(400):
        executor.close_session(session)
    gc.collect()
    assert process.memory_info().rss - before < 0.05 * whole_cache


@pytest.mark.parametrize(("precision", "likeness"), [("int8", 0.99), ("int4", 0.5)])
def test_another_precision_is_made_on_demand(
    precision: str, likeness: float, tmp_path: Path, repository: ModelRepository
) -> None:
    """Quantised weights give nearly the same logits, and the same tokens whatever the cut."""
    (whole,) = ring(repository).executors
    repository, _ = copied_llama(tmp_path / "models")
    table = repository.decoder_table(KEY)
    repository.write_manifest(replace(repository.manifest(KEY), precision=precision))
    with worker_in_this_process():
        one, three = ring(repository), ring(repository, 2, 4)
    assert (repository.folder(KEY) / f"onnx-{precision}").is_dir()
    assert repository.decoder_table(KEY).block_bytes < 0.6 * table.block_bytes
    assert three.generate(PROMPTS, 8, chunk=4) == one.generate(PROMPTS, 8)
    prompt = StepItem(1, 0, np.array(PROMPTS[6]), "logits")
    rows = []
    for executor in (whole, one.executors[0]):
        executor.open_session(1, 0)
        rows.append(executor.step([prompt])[0])
    assert np.corrcoef(rows)[0, 1] > likeness


def test_a_session_longer_than_the_graph_allows_is_refused(repository: ModelRepository) -> None:
    with pytest.raises(InvalidInput, match=r"cache\."):
        OnnxDecoder(repository, PartitionKey(KEY, 0, LAYERS), CacheLayout(6, 129, (0,)))


def test_holes_in_a_batch_are_filled_only_while_a_row_is_cheap(repository: ModelRepository) -> None:
    """Whatever a row costs, rows nobody asked for change nothing for their sessions."""
    for rows_per_read in (0.0, 1.0, 100.0):
        agents = ring(repository)
        (executor,) = agents.executors
        assert isinstance(executor, OnnxDecoder)
        executor.learn_cost(DecoderCost(0, 1, round(rows_per_read * 1000), 1000))
        assert executor.bridged_rows == rows_per_read
        for session, prompt in PROMPTS.items():
            agents.open(session, prompt)
        turn = 0
        while any(len(agents.tokens[s]) < len(p) + TOKENS for s, p in PROMPTS.items()):
            turn += 1  # every other session, then the rest: holes all over
            ready = [s for s in PROMPTS if s % 2 == turn % 2]
            left = {s: len(agents.tokens[s]) - agents.cached[s] for s in ready}
            agents.advance(left)
        got = {s: agents.tokens[s][len(p) : len(p) + TOKENS] for s, p in PROMPTS.items()}
        assert got == llama_answers()
