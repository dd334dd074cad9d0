"""Live migration with real decoders: a moved session says what it says where it stays."""

from __future__ import annotations

import time

import pytest

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.executors.device import Device
from catenary_agent.generation.context import CacheLimits
from catenary_services.domain.ids import PartitionKey
from catenary_services.telemetry.metrics import Metrics
from tests.support.ring_harness import opening
from tiny_language_models import imported_llama

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

WAYS = {
    1: {},
    2: {"temperature": 0.9, "seed": 7},
    3: {"temperature": 0.8, "seed": 8, "top_k": 20, "repetition_penalty": 1.4},
    4: {"frequency_penalty": 1.5, "presence_penalty": 0.7, "min_tokens": 30},
}
PROMPTS = {n: [(7 * n + 3 * i * i) % 150 + 3 for i in range(4 + 11 * n)] for n in WAYS}
RINGS = {
    "a": [("a-0", 0, 2), ("a-1", 2, 6)],
    "b": [("b-0", 0, 6)],
    "c": [("c-0", 0, 1), ("c-1", 1, 5), ("c-2", 5, 6)],
}
TOKENS = 70
LONGER_S = {"a-0": 0.06, "b-0": 0.03}
"""By how much a step is longer where sessions leave: no answer ends before its move, however busy
the machine."""


def load(library: str, first: int, last: int):
    repository, key, _ = imported_llama()
    layout = CacheLayout(12 * (last - first), 128, (first,))
    partition = PartitionKey(key, first, last)
    return load_decoder(repository, partition, Device("cpu"), layout, library=library)


def longer(decoder, pause_s: float):
    """Returns a decoder after making each of its steps longer."""
    step = decoder.step

    def paused(items):
        time.sleep(pause_s)
        return step(items)

    decoder.step = paused
    return decoder


@pytest.mark.system
async def test_caches_that_pass_in_lent_memory_are_those_of_frames(rings):
    """Both agents are in this process, which opens the memory as another one would."""
    caller, model, metrics = await rings.caller(), imported_llama()[1], Metrics()
    caches = CacheLimits(
        frame_bytes=4000, step_bytes=16_000, lent_bytes=1 << 16, least_lent_bytes=1
    )
    ways = {"a": [("a-0", 0, 6)], "b": [("b-0", 0, 6)]}
    for ((agent, first, last),) in ways.values():
        loaded = longer(load("torch", first, last), 0.03)
        await rings.agent(agent, loaded, chunk=16, caches=caches, metrics=metrics)
    expected = {}
    for n, prompt in PROMPTS.items():
        made = opening(ways["b"], prompt, max_tokens=TOKENS, model=model, **WAYS[n])
        await caller.open(n, made)
    for n in PROMPTS:
        expected[n] = await caller.finished(n, 30)
    for n, prompt in PROMPTS.items():
        made = opening(ways["a"], prompt, max_tokens=TOKENS, model=model, **WAYS[n])
        await caller.open(10 + n, made)
    for n in PROMPTS:
        await caller.wait_for(10 + n, 2)
        await caller.move(10 + n, 20 + n, ways["b"])
    for n in PROMPTS:
        assert await caller.ended(20 + n, 30) == expected[n]
    labels = {"model": model.name, "way": "host"}
    assert metrics.registry.get_sample_value("catenary_cache_bytes_total", labels) > 0
    failed = metrics.registry.get_sample_value
    assert failed("catenary_cache_loans_failed_total", {"way": "host"}) is None
    for node in rings.nodes.values():
        node.generation.close_sessions(list(range(40)))
    await rings.all_free()


@pytest.mark.system
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize(
    "libraries",
    [
        {"a": "onnx", "b": "torch", "c": "onnx"},
        {"a": "torch", "b": "torch", "c": "torch"},
        {"a": "onnx", "b": "onnx", "c": "onnx"},
    ],
)
async def test_sessions_that_move_twice_say_what_they_say_undisturbed(rings, libraries, by_tokens):
    caller = await rings.caller()
    model = imported_llama()[1]
    caches = CacheLimits(frame_bytes=4000, step_bytes=16_000)
    for name, ring in RINGS.items():
        for agent, first, last in ring:
            loaded = longer(load(libraries[name], first, last), LONGER_S.get(agent, 0.0))
            await rings.agent(agent, loaded, chunk=16, caches=caches)
    for n, prompt in PROMPTS.items():
        made = opening(RINGS["c"], prompt, max_tokens=TOKENS, model=model, **WAYS[n])
        await caller.open(n, made)
    expected = {n: await caller.finished(n, 30) for n in PROMPTS}
    assert len({tuple(each) for each in expected.values()}) == len(PROMPTS)
    for n, prompt in PROMPTS.items():
        made = opening(RINGS["a"], prompt, max_tokens=TOKENS, model=model, **WAYS[n])
        await caller.open(10 + n, made)
    for before, after, ring in ((10, 20, "b"), (20, 30, "c")):
        for n in PROMPTS:
            await caller.wait_for(before + n, 2)
            await caller.move(before + n, after + n, RINGS[ring], by_tokens=by_tokens)
    for n in PROMPTS:
        assert await caller.ended(30 + n, 30) == expected[n]
    moved = [each for node in rings.nodes.values() for each in node.told.of("session_moved")]
    assert len(moved) > len(PROMPTS)
    for node in rings.nodes.values():
        node.generation.close_sessions(list(range(40)))  # as the scheduler orders at the end
    await rings.all_free()
