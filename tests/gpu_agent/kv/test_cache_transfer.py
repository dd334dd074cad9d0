"""Caches exported from one executor and imported by others: the text goes on as if nothing was."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from catenary_agent.decoders.base import CacheLayout, DecoderExecutor, StepItem, set_layout
from catenary_agent.decoders.loading import DecoderLibrary, DecoderNumbers, load_decoder
from catenary_agent.executors.device import Device
from catenary_agent.kv import CacheSpan, pieces, to_bfloat16, to_float32
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import InvalidInput
from tiny_language_models import LAYERS, imported_llama

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

PROMPTS = {n: [(7 * n + 3 * i * i) % 150 + 3 for i in range(3 + 9 * n)] for n in range(1, 5)}
TOKENS = 6


def load(
    library: DecoderLibrary,
    first: int = 0,
    last: int = LAYERS,
    *entries: int,
    slots: int = 60,
    numbers: DecoderNumbers = "auto",
) -> DecoderExecutor:
    repository, key, _ = imported_llama()
    layout = CacheLayout(slots, 96, (first, *entries))
    blocks = PartitionKey(key, first, last)
    return load_decoder(repository, blocks, Device("cpu"), layout, library=library, numbers=numbers)


@pytest.fixture(params=["onnx", "torch"])
def whole(request: pytest.FixtureRequest) -> Iterator[DecoderExecutor]:
    executor = load(request.param)
    yield executor
    executor.close()


def step(executors: list[DecoderExecutor], session: int, position: int, tokens: list[int]) -> int:
    """Runs tokens through a ring; returns the likeliest next one."""
    array: np.ndarray | None = np.array(tokens, np.int64)
    for executor in executors:
        want = "logits" if executor is executors[-1] else "hidden"
        assert array is not None
        [array] = executor.step([StepItem(session, position, array, want)])
    assert array is not None
    return int(array.argmax())


def go_on(executors: list[DecoderExecutor], session: int, known: list[int]) -> list[int]:
    """Generates behind `known`, all of which but the last is cached."""
    made = list(known)
    while len(made) < len(known) + TOKENS:
        made.append(step(executors, session, len(made) - 1, made[-1:]))
    return made[len(known) :]


def handed_over(
    source: DecoderExecutor, targets: list[DecoderExecutor], session: int, tokens: int
) -> None:
    """Copies a session's cache in small pieces, the targets in turns."""
    row_bytes = source.table.cache_bytes_per_token
    queues = [
        list(pieces(CacheSpan(t.key.first_block, t.key.last_block, 0, tokens), row_bytes, 3000))
        for t in targets
    ]
    for target in targets:
        target.open_session(session, target.key.first_block, 96)
    while any(queues):
        for target, queue in zip(targets, queues, strict=True):
            if queue:
                span = queue.pop(0)
                rows = source.export_cache(session, span)
                rows.flags.writeable = False
                target.import_cache(session, span, rows)


@pytest.mark.parametrize("library", ["onnx", "torch"])
def test_a_session_goes_on_elsewhere_as_it_would_have_here(whole, library):
    targets = [load(library, *cut) for cut in pairwise((0, 1, 4, 6))]
    for session, prompt in list(PROMPTS.items())[1:3]:
        whole.open_session(session, 0)
        for start in range(0, len(prompt), 8):
            token = step([whole], session, start, prompt[start : start + 8])
        handed_over(whole, targets, session, len(prompt))
        known = [*prompt, token]
        assert go_on(targets, session, known) == go_on([whole], session, known)
    for executor in targets:
        executor.close()


@pytest.mark.parametrize("numbers", ["float16", "bfloat16"])
def test_a_session_in_16_bits_goes_on_elsewhere_as_it_would_have_here(numbers):
    source = load("torch", numbers=numbers)
    targets = [load("torch", *cut, numbers=numbers) for cut in pairwise((0, 2, 6))]
    prompt = PROMPTS[2]
    source.open_session(1, 0)
    token = step([source], 1, 0, prompt)
    assert source.export_cache(1, CacheSpan(0, LAYERS, 0, len(prompt))).itemsize == 2
    handed_over(source, targets, 1, len(prompt))
    assert go_on(targets, 1, [*prompt, token]) == go_on([source], 1, [*prompt, token])
    for executor in (source, *targets):
        executor.close()


@pytest.mark.parametrize("library", ["onnx", "torch"])
def test_others_that_step_come_leave_and_change_the_layout_harm_no_half_imported_cache(library):
    source, target = load(library), load(library)
    prompt = PROMPTS[4]
    source.open_session(9, 0)
    token = step([source], 9, 0, prompt)
    known = {session: PROMPTS[session] for session in (1, 2, 3)}
    for session in known:
        target.open_session(session, 0)
        known[session] = [*PROMPTS[session], step([target], session, 0, PROMPTS[session])]
    target.open_session(9, 0)
    target.open_session(5, 0)  # behind it: rows in between are computed along
    step([target], 5, 0, PROMPTS[1])
    for round_, start in enumerate(range(0, len(prompt), 5)):
        for first, last in ((0, 2), (2, 6)):
            span = CacheSpan(first, last, start, min(start + 5, len(prompt)))
            target.import_cache(9, span, source.export_cache(9, span))
            for session in (1, 5):
                made = known.setdefault(session, [*PROMPTS[1], 7])
                items = [StepItem(session, len(made) - 1, np.array(made[-1:], np.int64), "logits")]
                [logits] = target.step(items)
                assert logits is not None
                made.append(int(logits.argmax()))
        if round_ == 2:
            target.close_session(2)  # the last row moves into the hole
        if round_ == 4:
            set_layout(target, CacheLayout(72, 128, (0,)))
    assert go_on([target], 9, [*prompt, token]) == go_on([source], 9, [*prompt, token])
    for executor in (source, target):
        executor.close()


def test_bfloat16_is_taken_in_by_who_keeps_float32(whole):
    whole.open_session(1, 0)
    step([whole], 1, 0, PROMPTS[2])
    span = CacheSpan(1, 4, 2, 11)
    rows = whole.export_cache(1, span)
    whole.import_cache(1, span, to_bfloat16(rows))
    again = whole.export_cache(1, span)
    assert again.dtype == np.float32
    assert np.array_equal(to_bfloat16(again), to_bfloat16(rows))
    assert not np.array_equal(again, rows)
    np.testing.assert_allclose(again, rows, rtol=2**-8)


@pytest.mark.parametrize(
    ("session", "span"),
    [
        (2, CacheSpan(0, 6, 0, 4)),  # not open
        (1, CacheSpan(0, 7, 0, 4)),
        (1, CacheSpan(3, 3, 0, 4)),
        (1, CacheSpan(0, 6, 4, 4)),
        (1, CacheSpan(0, 6, 0, 97)),
    ],
)
def test_rows_a_session_does_not_have_are_refused(whole, session, span):
    whole.open_session(1, 0)
    step([whole], 1, 0, PROMPTS[1])
    with pytest.raises(InvalidInput):
        whole.export_cache(session, span)
    rows = np.zeros((max(0, span.blocks), 2, max(0, span.tokens), 2, 16), np.float32)
    with pytest.raises(InvalidInput):
        whole.import_cache(session, span, rows)


def test_arrays_that_do_not_fit_are_refused_and_change_nothing(whole):
    whole.open_session(1, 0)
    step([whole], 1, 0, PROMPTS[1])
    span = CacheSpan(0, 6, 0, 4)
    before = whole.export_cache(1, span)
    for wrong in (before[:5], before[:, :, :3], before.astype(np.float64), before[0]):
        with pytest.raises(InvalidInput):
            whole.import_cache(1, span, wrong)
    assert np.array_equal(whole.export_cache(1, span), before)


def test_a_pool_in_bfloat16_gives_its_bits_and_takes_either_type():
    import torch

    from catenary_agent.decoders.torch.torch_cache import CachePool, TokenCacheShape

    shape = TokenCacheShape(2, 8, torch.bfloat16, torch.device("cpu"))
    source, target = CachePool(12 * 16, 16, 4, shape), CachePool(9 * 20, 20, 4, shape)
    source.keys.copy_(torch.randn(source.keys.shape))
    source.values.copy_(torch.randn(source.values.shape))
    theirs, other, mine = source.open(0), target.open(0), target.open(1)
    for pool, cache in ((source, theirs), (target, other), (target, mine)):
        pool.grow(cache, 9)
    span = CacheSpan(11, 13, 2, 9)  # of blocks [10, 14)
    bits = source.read(theirs, span, 10)
    assert (bits.dtype, bits.shape) == (np.uint16, (2, 2, 7, 2, 8))
    expected = source.keys[theirs.starts[2] + 2 : theirs.starts[2] + 9]
    assert np.array_equal(to_float32(bits)[1, 0], expected.float().numpy())
    for cache, rows in ((other, bits), (mine, to_float32(bits))):
        target.write_part(cache, span, 10, rows)
        assert np.array_equal(target.read(cache, span, 10), bits)
