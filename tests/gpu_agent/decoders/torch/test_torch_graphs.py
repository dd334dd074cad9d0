"""Padded steps with fixed addresses say what eager steps say, whatever they are made of.

No graph is captured on a CPU: the steps that would be replayed run, with attention computed from
exactly the tensors that the kernel would get.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.models.plain_flash import emulated_graphs
from catenary_agent.decoders.base import CacheLayout, StepItem, Want
from catenary_agent.decoders.sampling.sampling import SessionSampler
from catenary_agent.decoders.torch import torch_attention
from catenary_agent.decoders.torch.torch_attention import (
    AttentionKernel,
    AttentionMetadata,
    LayerCall,
)
from catenary_agent.decoders.torch.torch_cache import SlotPool, TokenCacheShape
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.decoders.torch.torch_graphs import (
    DECODE_ROWS,
    MIXED_ROWS,
    GraphLimits,
    StepGraphs,
)
from catenary_agent.decoders.torch.torch_static import StaticStep, StepBucket, StepBuffers
from catenary_agent.devices.cuda_graphs import GraphRecorder
from catenary_agent.executors.device import Device
from catenary_services.domain.decoder import LargestStep
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.models.model_repository import ModelRepository
from small_models.allocations import torch_peak_bytes
from small_models.tiny_decoders import LAYERS, make_tiny_decoder

SESSIONS = 6
TOKENS = 64
HIDDEN = 64
PARTS = ((0, LAYERS), (0, 2), (2, LAYERS), (1, 3))
MIDDLE = {(0, LAYERS): 2, (0, 2): 1, (2, LAYERS): 3, (1, 3): 2}
"""The other block at which sessions of a part may enter."""


@dataclass
class Pair:
    """An executor that runs eagerly, and one that replays what it can."""

    repository: ModelRepository
    plain: TorchDecoder
    replaying: TorchDecoder

    def step(self, items: list[StepItem]) -> bool:
        """Runs a step on both and compares what they say; returns whether it was replayed."""
        expected = self.plain.step(items)
        with mock.patch.object(
            self.replaying, "_run_eagerly", wraps=self.replaying._run_eagerly
        ) as eagerly:
            found = self.replaying.step(items)
        for ours, eager in zip(found, expected, strict=True):
            assert (ours is None) == (eager is None)
            if ours is not None and eager is not None:
                np.testing.assert_allclose(ours, eager, rtol=2e-3, atol=2e-3)
        return not eagerly.called


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Pair]:
    made = {}
    repository, model = make_tiny_decoder(tmp_path_factory.mktemp("models"), "llama")
    for part in PARTS:
        layout = CacheLayout(SESSIONS * (part[1] - part[0]), TOKENS, (part[0], MIDDLE[part]))
        executors = [
            TorchDecoder(repository, PartitionKey(model, *part), Device("cpu"), layout, 1)
            for _ in range(2)
        ]
        made[part] = Pair(repository, *executors)
    return made


def replaying(executor: TorchDecoder, chunk_tokens: int = 40) -> StepGraphs:
    """Gives an executor the steps that a CUDA device would capture."""
    executor._kernel = AttentionKernel.FLASH
    limits = GraphLimits(SESSIONS, chunk_tokens)
    executor._graphs = StepGraphs(executor._model, executor._pool, HIDDEN, limits)
    return executor._graphs


SIZES = st.one_of(st.just(1), st.integers(1, 12))
STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, SESSIONS - 1), SIZES), min_size=1, unique_by=lambda t: t[0]),
    min_size=1,
    max_size=5,
)


@given(
    part=st.sampled_from(PARTS),
    entries=st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=SESSIONS, max_size=SESSIONS),
    steps=STEPS,
    renewed=st.sets(st.integers(0, SESSIONS - 1)),
    seed=st.integers(0, 99),
)
def test_padded_steps_say_what_eager_steps_say(
    pairs: dict[tuple[int, int], Pair],
    part: tuple[int, int],
    entries: list[int],
    steps: list[list[tuple[int, int]]],
    renewed: set[int],
    seed: int,
) -> None:
    pair, rng = pairs[part], np.random.default_rng(seed)
    places = {s: (part[0], MIDDLE[part])[late] for s, late in enumerate(entries)}
    is_last = part[1] == LAYERS
    cached: dict[int, int] = {}
    for session in range(SESSIONS):  # of an example that failed
        pair.plain.close_session(session)
        pair.replaying.close_session(session)
    graphs = replaying(pair.replaying)
    with emulated_graphs(), torch.inference_mode():
        graphs.capture()
        for executor in (pair.plain, pair.replaying):
            executor._pool.keys.fill_(float("nan"))  # nobody may look at rows never written
            executor._pool.values.fill_(float("nan"))
        for number, step in enumerate(steps):
            for session in sorted(renewed) if number == 1 else ():
                # The same number again, with other slots.
                if cached.pop(session, None) is not None:
                    pair.plain.close_session(session)
                    pair.replaying.close_session(session)
            items = []
            for session, wanted in step:
                if session not in cached:
                    for executor in (pair.plain, pair.replaying):
                        executor.open_session(session, places[session])
                    cached[session] = 0
                count = min(wanted, TOKENS - cached[session])
                if places[session] == 0:
                    inputs = rng.integers(3, 200, count)
                else:
                    inputs = rng.standard_normal((count, HIDDEN)).astype(np.float32)
                # Where tokens are chosen, some prompts are not at their end.
                want: Want = "hidden"
                if is_last:
                    want = "nothing" if count > 1 and seed % 2 else "logits"
                items.append(StepItem(session, cached[session], inputs, want))
                cached[session] += count
            enter_first = all(places[session] == part[0] for session, _ in step)
            fits = sum(len(item.inputs) for item in items) <= SESSIONS + 40
            assert pair.step(items) == (enter_first and fits)
    for session in cached:
        pair.plain.close_session(session)
        pair.replaying.close_session(session)


@pytest.fixture
def decoder(pairs: dict[tuple[int, int], Pair]) -> Iterator[TorchDecoder]:
    executor = pairs[0, LAYERS].replaying
    yield executor
    for session in range(SESSIONS):
        executor.close_session(session)
    executor._graphs, executor._kernel = None, AttentionKernel.EACH


def decode(executor: TorchDecoder, sessions: int, want: Want = "logits") -> list[StepItem]:
    cached = executor._book.cached
    sampler = SessionSampler(SamplingParameters(), (), 0, ())
    return [StepItem(s, cached[s], np.array([7 + s]), want, sampler) for s in range(sessions)]


def test_a_bucket_met_often_is_captured_with_the_numbers_of_its_own_step(
    pairs: dict[tuple[int, int], Pair], decoder: TorchDecoder
) -> None:
    pair = pairs[0, LAYERS]
    graphs = replaying(decoder)
    with emulated_graphs():
        for s in range(3):
            pair.plain.open_session(s, 0)
            decoder.open_session(s, 0)
        pair.step([StepItem(s, 0, np.arange(5, 9 + s), "logits") for s in range(3)])
        captured = []
        for sessions in (3, 3, 1, 3, 1, 3, 1, 1, 3):
            # A capture begins with a run: nothing of the step before may be written again.
            pair.step(decode(decoder, sessions))
            captured.append(sum(each.replay is not None for each in graphs._graphs.values()))
    assert captured == [0, 0, 0, 0, 0, 1, 1, 2, 2]
    for s in range(3):
        pair.plain.close_session(s)


def test_what_cannot_be_captured_runs_eagerly_from_then_on(decoder: TorchDecoder) -> None:
    graphs = replaying(decoder)
    decoder.open_session(0, 0)
    failing = mock.Mock(
        side_effect=RuntimeError("operation not permitted when stream is capturing")
    )
    with emulated_graphs(), mock.patch.object(GraphRecorder, "record", failing):
        for _ in range(8):
            assert decoder.step(decode(decoder, 1))[0] is not None
    assert failing.call_count == 1
    assert graphs.run(AttentionMetadata([decoder._caches[0]], [1], [8]), [], []) is None


@pytest.mark.parametrize(("part", "copies"), [((0, LAYERS), 1), ((1, 3), 2)])
def test_a_step_begins_with_one_copy_and_slots_travel_only_when_sessions_change(
    pairs: dict[tuple[int, int], Pair], part: tuple[int, int], copies: int
) -> None:
    executor = pairs[part].replaying
    graphs = replaying(executor)
    sent: list[int] = []

    def send(_: StepBuffers, to: torch.Tensor, source: torch.Tensor, first: int | None) -> None:
        to[:first].copy_(source[:first])
        sent.append(len(to[:first]))

    def step(sessions: int) -> list[int]:
        sent.clear()
        items = decode(executor, sessions, "nothing")
        if part[0]:
            for item in items:
                item.inputs = np.ones((1, HIDDEN), np.float32)
        executor.step(items)
        return list(sent)

    with emulated_graphs(), mock.patch.object(StepBuffers, "_send", send), torch.inference_mode():
        graphs.capture()
        for s in range(SESSIONS):
            executor.open_session(s, part[0])
        whole = graphs.buffers._device.numel()
        first, second, fewer, fewer_again = step(6), step(6), step(5), step(5)
    slots = graphs.buffers.starts.numel()
    assert first == [whole, 6][:copies]
    assert second == [whole - slots, 6][:copies]
    assert fewer == [whole, 5][:copies]
    assert fewer_again == [whole - slots, 5][:copies]
    for s in range(SESSIONS):
        executor.close_session(s)


def test_a_decode_step_touches_numpy_and_torch_a_fixed_number_of_times(
    decoder: TorchDecoder,
) -> None:
    """Sessions cost a step no calls of libraries, so its time on the host hardly grows with them."""
    graphs = replaying(decoder)
    calls = {}
    with emulated_graphs(), torch.inference_mode():
        graphs.capture()
        for graph in graphs._graphs.values():
            graph.replay = mock.Mock()
        for s in range(SESSIONS):
            decoder.open_session(s, 0)
        for sessions in (2, 6):
            decoder.step(decode(decoder, sessions, "nothing"))
            with (
                mock.patch.object(np, "concatenate", wraps=np.concatenate) as joined,
                mock.patch.object(np, "stack", wraps=np.stack) as stacked,
                mock.patch.object(np, "arange", wraps=np.arange) as counted,
                mock.patch.object(torch, "from_numpy", wraps=torch.from_numpy) as wrapped,
            ):
                decoder.step(decode(decoder, sessions, "nothing"))
            counts = [each.call_count for each in (joined, stacked, counted, wrapped)]
            calls[sessions] = counts
    assert calls[2] == calls[6]
    assert calls[6][1] == calls[6][3] == 0


@pytest.mark.parametrize("part", PARTS)
def test_captured_steps_take_no_more_than_the_table_says(
    pairs: dict[tuple[int, int], Pair], part: tuple[int, int]
) -> None:
    key, layout = pairs[part].plain.key, CacheLayout(20 * LAYERS, 200, (part[0],))
    executor = TorchDecoder(pairs[part].repository, key, Device("cpu"), layout, 1, "float16")
    executor._kernel = AttentionKernel.FLASH
    limits = GraphLimits(20, 180)

    def no_attention(_: LayerCall, query: torch.Tensor, *__: object) -> torch.Tensor:
        return torch.zeros_like(query)

    with mock.patch.object(torch_attention, "_flash", no_attention), torch.inference_mode():
        graphs = StepGraphs(executor._model, executor._pool, HIDDEN, limits)
        buffers = graphs.buffers
        storages = [each.untyped_storage() for each in buffers.on_device]
        kept = {each.data_ptr(): each.nbytes() for each in storages}
        largest = graphs.buckets[-1]
        assert largest.rows == 200
        took = torch_peak_bytes(StaticStep(buffers, largest).run)
    sizes, asked = executor.sizes, LargestStep(20, 180, 200)
    said = sizes.step_bytes(asked) - replace(sizes, has_graphs=False).step_bytes(asked)
    assert sum(kept.values()) + took <= said + sizes.step.base_bytes
    executor.close()


def metadata(counts: list[int], entries: list[int] | None = None) -> AttentionMetadata:
    shape = TokenCacheShape(1, 8, torch.float32, torch.device("cpu"))
    pool = SlotPool(2 * len(counts), 1, 2, shape)
    caches = [pool.open(entry) for entry in entries or [0] * len(counts)]
    return AttentionMetadata(caches, counts, [1] * len(counts))


def test_a_step_takes_the_smallest_bucket_of_its_kind(decoder: TorchDecoder) -> None:
    def bucket(plan: AttentionMetadata) -> StepBucket | None:
        return graphs.bucket_of(plan)

    limits = GraphLimits(100, 512)
    buffers = mock.patch("catenary_agent.decoders.torch.torch_graphs.StepBuffers")
    with buffers as made:
        graphs = StepGraphs(decoder._model, decoder._pool, HIDDEN, limits)
    assert made.call_args.args[2] == StepBucket(612, 100, 32)
    assert bucket(metadata([1])) == StepBucket(1, 1)
    assert bucket(metadata([1] * 33)) == StepBucket(48, 48)
    assert bucket(metadata([1] * 100)) == StepBucket(100, 100)
    assert bucket(metadata([1] * 101)) is None
    assert bucket(metadata([9])) == StepBucket(16, 16, 8)
    assert bucket(metadata([1] * 40 + [25])) == StepBucket(96, 96, 32)
    assert bucket(metadata([1] * 100 + [512])) == StepBucket(612, 100, 32)
    assert bucket(metadata([1] * 100 + [513])) is None
    assert bucket(metadata([2] * 33)) is None
    assert bucket(metadata([2] * 9)) == StepBucket(32, 32, 16)
    assert bucket(metadata([1, 1], [0, 1])) is None


def test_buckets_are_as_large_as_the_largest_step_and_no_larger() -> None:
    for sessions, chunk in ((1, 512), (5, 16), (64, 512), (256, 512), (400, 4096)):
        buckets = GraphLimits(sessions, chunk).buckets()
        decoding = [each for each in buckets if not each.chunks]
        mixed = [each for each in buckets if each.chunks]
        assert decoding[-1].rows == min(sessions, DECODE_ROWS[-1])
        assert mixed[-1].rows == min(decoding[-1].rows + chunk, MIXED_ROWS[-1])
        assert len(buckets) <= 36
        for kind in (decoding, mixed):
            assert [each.rows for each in kind] == sorted({each.rows for each in kind})
