"""Emulated decoders need no weights, take the time they are told and count like real ones."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from catenary_agent.decoders.base import CacheLayout, DecoderCost, StepItem, set_layout
from catenary_agent.decoders.emulated import EmulatedDecoder, token_at
from catenary_agent.decoders.importing.importing import block_table
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.executors.device import Device
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.model import ModelManifest
from catenary_services.errors import InvalidInput, Overloaded
from catenary_services.models.model_repository import ModelRepository
from small_models.decoder_ring import DecoderRing

KEY = ModelKey("llama-2-7b", "1")
TABLE = DecoderTable(
    model_hash="0" * 64,
    blocks=8,
    hidden_size=16,
    attention_heads=4,
    key_value_heads=2,
    head_size=4,
    vocabulary_size=50,
    context_tokens=64,
    end_token_ids=(2, 11),
    block_bytes=1000,
    embedding_bytes=3200,
    head_bytes=3300,
    cache_bytes_per_token=64,
)
TIMES = {
    "prefill_ns": 1000,
    "prefill_token_ns": 200,
    "decode_ns": 5000,
    "decode_session_ns": 300,
    "head_blocks": 2,
}


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    made = ModelRepository(tmp_path / "models")
    made.write_manifest(
        ModelManifest(
            key=KEY,
            platform="decoder",
            file="model.safetensors",
            slo_ns=1,
            max_batch=4,
            float16_boundaries=False,
        )
    )
    made.write_decoder_table(KEY, TABLE)
    made.write_block_table(KEY, block_table(TABLE, (800,) * 7 + (1600,)))
    return made


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({KEY.name: TIMES}))
    return path


def decoder(
    repository: ModelRepository, first: int, last: int, device: Device, *entries: int
) -> EmulatedDecoder:
    layout = CacheLayout(4 * (last - first), 40, (first, *entries))
    made = load_decoder(repository, PartitionKey(KEY, first, last), device, layout)
    assert isinstance(made, EmulatedDecoder)
    return made


def test_tokens_follow_from_the_position_alone(repository: ModelRepository) -> None:
    device = Device.parse("emulated:mig", slowdown=0)
    prompts = {1: [5, 6, 7], 2: [9] * 8}
    rings = [
        DecoderRing([decoder(repository, a, b, device) for a, b in edges])
        for edges in ([(0, 8)], [(0, 3), (3, 8)])
    ]
    answers = [ring.generate(prompts, 10, chunk=4) for ring in rings]
    assert answers[0] == answers[1]
    assert answers[0][1] == [token_at(position, TABLE) for position in range(3, 13)]
    # A session that goes on elsewhere with its history goes on the same.
    moved = DecoderRing([decoder(repository, 0, 8, device)])
    history = {3: prompts[1] + answers[0][1][:4]}
    assert moved.generate(history, 6)[3] == answers[0][1][4:]


def test_no_made_up_token_ends_a_text() -> None:
    tokens = [token_at(position, TABLE) for position in range(500)]
    assert not set(tokens) & set(TABLE.end_token_ids)
    assert len(set(tokens)) == TABLE.vocabulary_size - 2


def test_times_come_from_the_file_times_the_slowdown(
    repository: ModelRepository, profile: Path
) -> None:
    device = Device.parse("emulated:mig", slowdown=2.0, profile=profile)
    assert decoder(repository, 2, 5, device).cost == DecoderCost(
        2 * 3 * 1000, 2 * 3 * 200, 2 * 3 * 5000, 2 * 3 * 300
    )
    last = decoder(repository, 6, 8, device, 7)
    assert last.cost.decode_ns == 2 * (1 + 3) * 5000
    for session, entry in ((1, 6), (2, 7), (3, 6)):
        last.open_session(session, entry)
    row, chunk = np.zeros((1, 16), np.float32), np.zeros((10, 16), np.float32)
    decode = [StepItem(1, 0, row, "logits"), StepItem(2, 0, row, "logits")]
    assert last.step_ns(decode) == 2 * (4 * 5000 + 4 * 300 + 3 * 300)
    assert last.step_ns(decode[1:]) == 2 * (3 * 5000 + 3 * 300)
    prefill = StepItem(3, 0, chunk, "nothing")
    assert last.step_ns([prefill]) == 2 * 4 * (1000 + 10 * 200)


def test_context_lone_steps_and_short_prompts_have_times_of_their_own(
    repository: ModelRepository, tmp_path: Path
) -> None:
    more = {"decode_context_token_ns": 2.5, "decode_lone_ns": 4000, "prefill_floor_ns": 2000}
    profile = tmp_path / "times.json"
    profile.write_text(json.dumps({"llama-2-7b": {**TIMES, **more, "way_ns": 10}}))
    device = Device.parse("emulated:mig", slowdown=2.0, profile=profile)
    made = decoder(repository, 2, 5, device)
    assert made.cost == DecoderCost(
        6 * 1000 + 20, 6 * 200, 6 * 5000 + 20, 6 * 300, 6 * 2.5, 6 * 4000 + 20, 6 * 2000 + 20
    )
    for session in (1, 2):
        made.open_session(session, 2)
    row, short, long = (np.zeros((rows, 16), np.float32) for rows in (1, 2, 10))
    both = [StepItem(1, 7, row, "hidden"), StepItem(2, 9, row, "hidden")]
    assert made.step_ns(both) == 6 * (5000 + 2 * 300) + 6 * 2.5 * 16
    assert made.step_ns(both[:1]) == 6 * 4000
    assert made.step_ns([StepItem(1, 0, short, "hidden")]) == 6 * 2000
    assert made.step_ns([StepItem(1, 0, long, "hidden")]) == 6 * (1000 + 10 * 200)


def test_without_a_file_the_block_table_says_the_time(repository: ModelRepository) -> None:
    cost = decoder(repository, 6, 8, Device.parse("emulated:mig", slowdown=10.0)).cost
    assert cost == DecoderCost(0, 10 * (800 + 1600) // 8, 10 * (800 + 1600), 0)


def test_a_step_takes_its_time(repository: ModelRepository) -> None:
    slow = decoder(repository, 0, 8, Device.parse("emulated:mig", slowdown=5000.0))
    slow.open_session(1, 0)
    started = time.perf_counter_ns()
    slow.step([StepItem(1, 0, np.array([3]), "logits")])
    assert time.perf_counter_ns() - started >= slow.cost.decode_ns == 36_000_000


def test_slots_are_counted_as_everywhere(repository: ModelRepository) -> None:
    made = decoder(repository, 2, 6, Device.parse("emulated:mig", slowdown=0), 4)
    for session in range(4):
        made.open_session(session, 2 if session else 4)
    assert made.free_block_slots == 2
    with pytest.raises(Overloaded):
        made.open_session(9, 2)
    set_layout(made, CacheLayout(18, 40, (2, 4)))
    made.open_session(9, 2)
    for session in (0, 1, 2, 3, 9):
        made.close_session(session)
    assert (made.sessions, made.free_block_slots) == (0, 18)


@pytest.mark.parametrize("text", ["{", '{"llama-2-7b": 3}', '{"llama-2-7b": {"decode_ns": -1}}'])
def test_a_malformed_file_of_times_is_refused(
    text: str, repository: ModelRepository, profile: Path
) -> None:
    profile.write_text(text)
    with pytest.raises(InvalidInput, match=r"emulated_profile times\.json"):
        decoder(repository, 0, 8, Device.parse("emulated:mig", profile=profile))
