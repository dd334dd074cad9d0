"""Agents that hold a model in different numbers: a CPU agent in float32, one in bfloat16 beside it.

Both have just the memory that their part of the model takes as each of them holds it, so that a
plan, an order or an agent that counted in the other's numbers would find no room, or too much.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_agent.decoders.loading import DecoderOptions, load_decoder, runtime_of
from catenary_agent.executors.device import Device
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc, generation_pb2
from catenary_protos.catenary.v1.generation_pb2_grpc import GenerationStub
from catenary_services.domain.decoder import AllocatedSizes, LargestStep
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster
from small_models.decoder_ring import DecoderRing
from tiny_language_models import LAYERS, greedy, worker_in_this_process, write_folder

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NAME = "tiny-llama"
CUT = 2
"""Blocks on the first agent, of six."""
SESSIONS, SESSION_TOKENS, CHUNK = 3, 64, 16
TOKENS = 20
CPU = Device.parse("cpu")
FLOAT32 = DecoderOptions("onnx")
BFLOAT16 = DecoderOptions("torch", "bfloat16")
PROMPTS = [[5, 9, 77, 30, 4, 151, 8], [90, 3], [*range(20, 45)], [7, 7, 19, 120]]
PARTS = ((0, CUT), (CUT, LAYERS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRepository, ModelKey, Any]:
    root = tmp_path_factory.mktemp("mixed")
    whole = write_folder(root / "source", "llama3")
    repository, key = ModelRepository(root / "models"), ModelKey(NAME, "1")
    options = ImportOptions(session_tokens=SESSION_TOKENS, max_sessions=SESSIONS)
    with worker_in_this_process():
        import_decoder(repository, root / "source", key, options)
    return repository, key, whole


def sizes_of(
    model: tuple[ModelRepository, ModelKey, Any], choice: DecoderOptions
) -> AllocatedSizes:
    repository, key, _ = model
    runtime = runtime_of(CPU, choice)
    assert runtime is not None
    return repository.decoder_table(key).held_by(runtime, repository.manifest(key).precision)


def needed(held: AllocatedSizes, part: tuple[int, int]) -> int:
    """What a part of the model takes with the caches of all sessions, and their steps."""
    step = LargestStep(SESSIONS, CHUNK, SESSION_TOKENS)
    return held.partition_bytes(part, (part[1] - part[0]) * SESSIONS * SESSION_TOKENS, step)


def in_one_process(
    model: tuple[ModelRepository, ModelKey, Any], choices: list[DecoderOptions]
) -> list[list[int]]:
    """What executors of the same forms say without any cluster."""
    repository, key, _ = model
    ring = DecoderRing(
        [
            load_decoder(
                repository,
                PartitionKey(key, *part),
                CPU,
                CacheLayout(24, SESSION_TOKENS, (part[0],)),
                library=choice.library,
                numbers=choice.numbers,
            )
            for part, choice in zip(PARTS, choices, strict=True)
        ]
    )
    answers = [ring.generate({1: prompt}, TOKENS, chunk=CHUNK)[1] for prompt in PROMPTS]
    ring.close_all()
    return answers


@asynccontextmanager
async def cluster(
    tmp_path: Path, model: tuple[ModelRepository, ModelKey, Any], choices: list[DecoderOptions]
) -> AsyncIterator[LocalCluster]:
    """A ring of two agents, each with memory for its part of the model, and not for a byte more."""
    agents = tuple(
        {
            "decoder": choice.library,
            "decoder_numbers": choice.numbers,
            "memory_bytes": needed(sizes_of(model, choice), part),
            "prefill_chunk_tokens": CHUNK,
            "threads": 1,
        }
        for part, choice in zip(PARTS, choices, strict=True)
    )
    (tmp_path / "models").symlink_to(model[0].root)
    hops = [{"agent": f"agent-{number}", "blocks": list(part)} for number, part in enumerate(PARTS)]
    plan = tmp_path / "plan.json"
    chains = [{"capacity": SESSIONS, "hops": hops}]
    plan.write_text(json.dumps({"models": [{"name": NAME, "chains": chains}]}))
    running = LocalCluster(
        ClusterOptions(
            agents=2,
            models=(NAME,),
            grpc_port=0,
            http_port=0,
            data_dir=tmp_path,
            plan_file=plan,
            each_agent=agents,
        )
    )
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


async def ask(running: LocalCluster) -> list[list[int]]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        stub = GenerationStub(channel)

        async def one(prompt: list[int]) -> list[int]:
            sampling = generation_pb2.SamplingParameters(max_tokens=TOKENS, ignore_eos=True)
            request = generation_pb2.GenerateRequest(
                model=NAME, token_ids=prompt, sampling=sampling
            )
            return [
                token
                async for response in stub.Generate(request, timeout=300)
                for token in response.token_ids
            ]

        # One after the other: in bfloat16 a row may come out otherwise beside others.
        return [await one(prompt) for prompt in PROMPTS]


async def used_bytes(running: LocalCluster) -> list[int]:
    async with grpc.aio.insecure_channel(running.admin_target) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
        status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
    return [each.used_memory_bytes for each in sorted(status.agents, key=lambda a: a.agent_id)]


@pytest.mark.parametrize(
    "choices", [[FLOAT32, BFLOAT16], [BFLOAT16, FLOAT32]], ids=["float32-first", "bfloat16-first"]
)
async def test_a_ring_of_two_forms_answers_as_its_executors_do(
    tmp_path: Path,
    model: tuple[ModelRepository, ModelKey, Any],
    choices: list[DecoderOptions],
) -> None:
    booked = [
        needed(sizes_of(model, choice), part) for choice, part in zip(choices, PARTS, strict=True)
    ]
    async with cluster(tmp_path, model, choices) as running:
        assert await used_bytes(running) == booked
        answers = await ask(running)
    assert answers == in_one_process(model, choices)


async def test_a_ring_of_two_libraries_in_float32_answers_as_the_whole_model(
    tmp_path: Path, model: tuple[ModelRepository, ModelKey, Any]
) -> None:
    choices = [FLOAT32, DecoderOptions("torch")]
    async with cluster(tmp_path, model, choices) as running:
        answers = await ask(running)
    assert answers == [greedy(model[2], prompt, TOKENS) for prompt in PROMPTS]


def test_in_bfloat16_a_part_takes_half_but_for_what_steps_compute_in_float32(
    model: tuple[ModelRepository, ModelKey, Any],
) -> None:
    large, small = sizes_of(model, DecoderOptions("torch")), sizes_of(model, BFLOAT16)
    for name in ("embedding_bytes", "head_bytes", "cache_bytes_per_token", "largest_block_bytes"):
        assert getattr(large, name) == 2 * getattr(small, name)
    plain = dataclasses.replace(small, fixed_bytes=0)
    assert plain.weight_bytes(0, LAYERS) * 2 == dataclasses.replace(
        large, fixed_bytes=0
    ).weight_bytes(0, LAYERS)
