"""The PyTorch decoder against `transformers.generate`, cut, batched and chunked in every way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import itertools
import weakref

import torch

from catenary_agent.decoders.base import CacheLayout, StepItem, set_layout
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.devices.device_errors import DeviceErrorKind, error_kind_of
from catenary_agent.executors.device import Device
from catenary_agent.generation.loop.measuring import measure_between_steps
from catenary_services.domain.decoder import DecoderForm
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import InternalError, InvalidInput, NotSupported, Overloaded
from catenary_services.models.model_repository import ModelRepository
from small_models.tiny_decoders import (
    FAMILIES,
    LAYERS,
    make_tiny_decoder,
    prompts,
    reference_model,
    reference_tokens,
)

TOKENS = 96

Tiny = tuple[ModelRepository, ModelKey]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny_decoder(tmp_path_factory.mktemp("models"), "llama")


def decoder(
    tiny: Tiny, first: int = 0, last: int = LAYERS, entries: tuple[int, ...] = (), slots: int = 40
) -> TorchDecoder:
    repository, model = tiny
    layout = CacheLayout(slots, TOKENS, entries or (first,))
    return TorchDecoder(repository, PartitionKey(model, first, last), Device("cpu"), layout, 1)


@dataclass
class Ring:
    """Agents of one chain, stepped one after the other: what the engine does over the network."""

    executors: list[TorchDecoder]
    entries: list[int] = field(default_factory=list)
    """Block at which sessions enter each of them; empty: its first."""

    def open(self, session: int) -> None:
        for i, executor in enumerate(self.executors):
            entry = self.entries[i] if self.entries else executor.key.first_block
            executor.open_session(session, entry)

    def step(self, chunks: dict[int, tuple[int, list[int]]], sample: set[int]) -> dict[int, int]:
        """Runs chunks {session: (position, tokens)} through all; returns the greedy tokens."""
        inputs = {s: np.array(tokens, np.int64) for s, (_, tokens) in chunks.items()}
        for executor in self.executors:
            at_end = executor is self.executors[-1]
            items = [
                StepItem(
                    s,
                    position,
                    inputs[s],
                    "hidden" if not at_end else "logits" if s in sample else "nothing",
                )
                for s, (position, _) in chunks.items()
            ]
            results = dict(zip(chunks, executor.step(items), strict=True))
            inputs = {s: r for s, r in results.items() if r is not None}
        assert set(inputs) == sample
        return {s: int(logits.argmax()) for s, logits in inputs.items()}

    def generate(
        self, texts: list[list[int]], count: int, chunk: int = 1000, stagger: int = 0
    ) -> list[list[int]]:
        """Generates for all prompts at a time; the i-th session joins at step i * stagger."""
        known = [list(text) for text in texts]
        cached = [0] * len(texts)
        step = 0
        while any(len(k) < len(t) + count for k, t in zip(known, texts, strict=True)):
            chunks, sample = {}, set()
            for s, text in enumerate(texts):
                if step < s * stagger or len(known[s]) == len(text) + count:
                    continue
                if cached[s] == 0:
                    self.open(s)
                part = known[s][cached[s] : cached[s] + chunk]
                chunks[s] = (cached[s], part)
                cached[s] += len(part)
                if cached[s] == len(known[s]):
                    sample.add(s)
            for s, token in self.step(chunks, sample).items() if chunks else ():
                known[s].append(token)
                if len(known[s]) == len(texts[s]) + count:
                    for executor in self.executors:
                        executor.close_session(s)
            step += 1
        assert all(e.free_block_slots == e.layout.block_slots for e in self.executors)
        assert all(e.sessions == 0 for e in self.executors)
        return [k[len(t) :] for k, t in zip(known, texts, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_transformers_says(family: str, tmp_path: Path) -> None:
    tiny = make_tiny_decoder(tmp_path, family)
    model = reference_model(*tiny)
    texts = prompts(3, 30)
    expected = [reference_tokens(model, text, 20) for text in texts]
    assert len({tuple(tokens) for tokens in expected}) == len(texts)  # not the same for any prompt
    ring = Ring([decoder(tiny, 0, 1), decoder(tiny, 1, LAYERS)])
    assert ring.generate(texts, 20, chunk=7, stagger=2) == expected


@pytest.mark.parametrize("cuts", [(0, 4), (0, 2, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize(("chunk", "stagger"), [(1000, 0), (5, 0), (1, 3), (8, 5)])
def test_cuts_chunks_and_batches_do_not_change_the_tokens(
    llama: Tiny, cuts: tuple[int, ...], chunk: int, stagger: int
) -> None:
    texts = prompts(4, 40, seed=3)
    model = reference_model(*llama)
    expected = [reference_tokens(model, text, 16) for text in texts]
    executors = [decoder(llama, a, b) for a, b in itertools.pairwise(cuts)]
    assert Ring(executors).generate(texts, 16, chunk, stagger) == expected


def test_sessions_that_enter_at_different_blocks_share_a_step(llama: Tiny) -> None:
    texts = prompts(4, 20, seed=5)
    expected = [reference_tokens(reference_model(*llama), text, 1) for text in texts]
    whole, half = decoder(llama, 0, 2), decoder(llama, 0, 3)
    shared = decoder(llama, 1, LAYERS, entries=(1, 2, 3))
    first = decoder(llama, 0, 1)
    before = {0: first, 1: whole, 2: half, 3: first}
    items = []
    for s, executor in before.items():
        executor.open_session(s, 0)
        ids = np.array(texts[s], np.int64)
        (hidden,) = executor.step([StepItem(s, 0, ids, "hidden")])
        assert hidden is not None
        assert hidden.dtype == np.float32
        shared.open_session(s, executor.key.last_block)
        items.append(StepItem(s, 0, hidden, "logits"))
    assert shared.free_block_slots == 40 - (3 + 2 + 1 + 3)
    results = shared.step([items[i] for i in (2, 0, 3, 1)])
    tokens = [int(logits.argmax()) for logits in results if logits is not None]
    assert tokens == [expected[i][0] for i in (2, 0, 3, 1)]


def test_a_row_does_not_depend_on_its_batch_by_more_than_rounding(llama: Tiny) -> None:
    executor = decoder(llama)
    texts = [np.array(text, np.int64) for text in prompts(6, 30, seed=9)]
    alone = []
    for s, text in enumerate(texts):
        executor.open_session(s, 0)
        alone.append(executor.step([StepItem(s, 0, text, "logits")])[0])
        executor.close_session(s)
    for s in range(6):
        executor.open_session(s, 0)
    together = executor.step([StepItem(s, 0, t, "logits") for s, t in enumerate(texts)])
    for one, all_of_them in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, all_of_them, rtol=1e-4, atol=1e-4)


def test_results_are_the_callers(llama: Tiny) -> None:
    executor = decoder(llama)
    executor.open_session(1, 0)
    (first,) = executor.step([StepItem(1, 0, np.array([5, 6]), "logits")])
    assert first is not None
    kept = first.copy()
    executor.step([StepItem(1, 2, np.array([7]), "logits")])
    np.testing.assert_array_equal(first, kept)


def test_slots_are_counted_and_refused_exactly(llama: Tiny) -> None:
    executor = decoder(llama, 0, LAYERS, entries=(0, 3), slots=10)
    executor.open_session(1, 0)
    executor.open_session(2, 0)
    assert executor.free_block_slots == 2
    with pytest.raises(Overloaded):
        executor.open_session(3, 0)
    executor.open_session(3, 3)
    executor.open_session(4, 3)
    assert executor.free_block_slots == 0
    executor.close_session(1)
    executor.close_session(1)
    executor.open_session(5, 0)
    with pytest.raises(InvalidInput):
        executor.open_session(6, 1)
    assert executor.sessions == 4


def test_a_refused_step_changes_nothing(llama: Tiny) -> None:
    executor = decoder(llama)
    executor.open_session(1, 0)
    good = StepItem(1, 0, np.array([3, 4]), "logits")
    for bad in (
        StepItem(2, 0, np.array([3]), "logits"),
        StepItem(1, 1, np.array([3]), "logits"),
        StepItem(1, 0, np.array([300]), "logits"),
        StepItem(1, 0, np.zeros(TOKENS + 1, np.int64), "logits"),
    ):
        with pytest.raises(InvalidInput):
            executor.step([bad])
    with pytest.raises(InvalidInput):
        executor.step([good, good])
    assert executor.step([good])[0] is not None


@pytest.mark.parametrize(
    ("slots", "tokens"), [(80, TOKENS), (12, TOKENS), (40, 60), (4, 2), (40, 300)]
)
def test_a_new_layout_leaves_running_sessions_unharmed(
    llama: Tiny, slots: int, tokens: int
) -> None:
    texts = prompts(3, 20, seed=11)
    model = reference_model(*llama)
    expected = [reference_tokens(model, text, 10) for text in texts]
    executor = decoder(llama)
    ring = Ring([executor])
    known = [list(text) for text in texts]
    for s, text in enumerate(texts):
        ring.open(s)
        known[s].append(ring.step({s: (0, text)}, {s})[s])
    for _ in range(4):
        _decode(ring, known)
    set_layout(executor, CacheLayout(slots, tokens, (0,)))
    assert executor.layout.block_slots == slots
    assert executor.free_block_slots == slots - 3 * LAYERS
    for _ in range(5):
        _decode(ring, known)
    assert [k[len(t) :] for k, t in zip(known, texts, strict=True)] == expected
    for s in range(3):
        executor.close_session(s)
    assert executor.free_block_slots == slots
    assert (executor._pool.slots, executor._pool.tokens) == (slots, tokens)


def _decode(ring: Ring, known: list[list[int]]) -> None:
    chunks = {s: (len(tokens) - 1, tokens[-1:]) for s, tokens in enumerate(known)}
    for s, token in ring.step(chunks, set(chunks)).items():
        known[s].append(token)


def test_only_the_weights_of_its_blocks_are_held(llama: Tiny) -> None:
    repository, key = llama
    held = repository.decoder_table(key).held(DecoderForm.TORCH_FLOAT32)
    for first, last in ((0, 1), (1, 3), (3, 4), (0, 4)):
        assert decoder(llama, first, last).memory_bytes == held.weight_bytes(first, last)


def test_weights_in_several_files_are_found(tmp_path: Path) -> None:
    tiny = make_tiny_decoder(tmp_path, "llama", shards=3)
    files = list(tiny[0].folder(tiny[1]).glob("*.safetensors"))
    assert len(files) >= 3
    texts = prompts(1, 10)
    expected = [reference_tokens(reference_model(*tiny), texts[0], 5)]
    ring = Ring([decoder(tiny, 0, 2), decoder(tiny, 2, LAYERS)])
    assert ring.generate(texts, 5) == expected


def test_a_family_nobody_knows_is_refused(tmp_path: Path) -> None:
    tiny = make_tiny_decoder(tmp_path, "llama")
    config = tiny[0].folder(tiny[1]) / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"gpt2"'))
    with pytest.raises(NotSupported, match="gpt2"):
        decoder(tiny)


def test_a_missing_tensor_is_named(llama: Tiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny = make_tiny_decoder(tmp_path, "llama")
    file = tiny[0].model_file(tiny[1])
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(InvalidInput, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        decoder(tiny, 2, 3)
    assert decoder(tiny, 0, 2).sessions == 0


def test_a_device_that_is_not_there_is_refused(llama: Tiny) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    repository, model = llama
    layout = CacheLayout(4, 16, (0,))
    with pytest.raises(NotSupported, match="0 CUDA devices"):
        TorchDecoder(repository, PartitionKey(model, 0, 4), Device("cuda"), layout, 1)


def test_caches_that_do_not_fit_into_memory_are_refused_and_the_old_ones_stay(llama: Tiny) -> None:
    executor = decoder(llama)
    executor.open_session(1, 0)
    executor.step([StepItem(1, 0, np.array([5, 6]), "nothing")])
    before = executor.layout
    with pytest.raises(Overloaded, match="block slots"):
        set_layout(executor, CacheLayout(10**12, TOKENS, (0,)))
    assert executor.layout == before
    assert executor.step([StepItem(1, 2, np.array([7]), "logits")])[0] is not None
    with pytest.raises(Overloaded):
        decoder(llama, slots=10**12)


def test_a_layout_that_is_not_possible_is_refused_when_prepared(llama: Tiny) -> None:
    executor = decoder(llama, 1, 3)
    with pytest.raises(InvalidInput):
        executor.prepare_layout(CacheLayout(8, TOKENS, (0,)))


def test_a_library_that_fails_is_our_error_and_the_session_can_go_on(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = decoder(llama)
    executor.open_session(1, 0)
    item = StepItem(1, 0, np.array([5, 6]), "logits")

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(executor._model, "forward", broken)
        with pytest.raises(InternalError, match="illegal memory access"):
            executor.step([item])
    assert executor.step([item])[0] is not None


def test_a_step_without_memory_holds_none_when_it_is_tried_again_in_parts(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = decoder(llama)
    executor.open_session(1, 0)
    item = StepItem(1, 0, np.array([5, 6]), "logits")
    held = []

    def too_large(*_: object) -> None:
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(executor._model, "forward", too_large)
        with pytest.raises(InternalError, match="out of memory") as caught:
            executor.step([item])
    assert held[0]() is None
    assert error_kind_of(caught.value) is DeviceErrorKind.MEMORY
    assert executor.step([item])[0] is not None


async def test_cost_is_measured_without_a_trace(llama: Tiny) -> None:
    async def at_once(work: Callable[[], int]) -> int:
        return work()

    made = decoder(llama)
    slots = made.free_block_slots
    cost = await measure_between_steps(made, at_once, chunk_tokens=16)
    assert cost.prefill_ns + cost.prefill_token_ns > 0
    assert cost.decode(1, 0) > 0
    assert cost.decode(4, 100) > 0
    assert cost.prefill_chunk_tokens == 16
    assert (made.sessions, made.free_block_slots) == (0, slots)
    made.close()


def test_a_session_may_be_promised_less_than_the_layout_allows(llama: Tiny) -> None:
    executor = decoder(llama)
    executor.open_session(1, 0, tokens=3)
    executor.step([StepItem(1, 0, np.array([5, 6, 7]), "nothing")])
    with pytest.raises(InvalidInput):
        executor.step([StepItem(1, 3, np.array([8]), "logits")])
    with pytest.raises(InvalidInput):
        executor.open_session(2, 0, tokens=TOKENS + 1)
