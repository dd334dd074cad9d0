"""What holds for decoders of every library: exact in any cut and batch, exact in their accounts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from catenary_agent.decoders.base import CacheLayout, DecoderExecutor, StepItem, set_layout
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.decoders.sampling.sampling import SessionSampler
from catenary_agent.executors.device import Device
from catenary_agent.generation.loop.measuring import measure_between_steps
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import InvalidInput, ModelNotFound, Overloaded
from small_models.decoder_ring import DecoderRing
from tiny_language_models import LAYERS, PROMPTS, TOKENS, VOCABULARY, imported_llama, llama_answers

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

Load = Callable[..., DecoderExecutor]


@pytest.fixture(params=["onnx", "torch"])
def load(request: pytest.FixtureRequest) -> Load:
    """Loads blocks of the model by one of the libraries."""
    repository, key, _ = imported_llama()

    def decoder(
        first: int = 0,
        last: int = LAYERS,
        slots: int = 8 * LAYERS,
        *entries: int,
        layout: CacheLayout | None = None,
        model: ModelKey = key,
    ) -> DecoderExecutor:
        layout = layout or CacheLayout(slots, 64, (first, *entries))
        blocks = PartitionKey(model, first, last)
        return load_decoder(repository, blocks, Device("cpu"), layout, library=request.param)

    return decoder


@pytest.fixture
def whole(load: Load) -> Iterator[DecoderExecutor]:
    executor = load()
    yield executor
    executor.close()


def ring(load: Load, cuts: tuple[int, ...], sessions: int = 8) -> DecoderRing:
    edges = [0, *cuts, LAYERS]
    return DecoderRing([load(a, b, sessions * (b - a)) for a, b in pairwise(edges)])


@pytest.mark.parametrize("cuts", [(), (3,), (1, 5), (1, 2, 3, 5)], ids=str)
@pytest.mark.parametrize("chunk", [3, 1000])
def test_any_cut_and_chunk_generates_the_same(
    cuts: tuple[int, ...], chunk: int, load: Load
) -> None:
    agents = ring(load, cuts)
    assert agents.generate(PROMPTS, TOKENS, chunk) == llama_answers()
    for executor in agents.executors:
        assert executor.sessions == 0
        assert executor.free_block_slots == executor.layout.block_slots


def test_who_else_is_in_the_batch_changes_no_token(load: Load) -> None:
    """Sessions join one by one, sit out steps, and leave in between."""
    agents = ring(load, (2,))
    random = np.random.default_rng(3)
    waiting, running = list(PROMPTS), set[int]()
    answers: dict[int, list[int]] = {}
    while waiting or running:
        if waiting and (not running or random.random() < 0.4):
            agents.open(waiting[0], PROMPTS[waiting[0]])
            running.add(waiting.pop(0))
        ready = [s for s in running if random.random() < 0.6]
        left = {s: len(agents.tokens[s]) - agents.cached[s] for s in ready}
        agents.advance({s: min(int(random.integers(1, 6)), n) for s, n in left.items()})
        for session in ready:
            answer = agents.tokens[session][len(PROMPTS[session]) :]
            if len(answer) == TOKENS:
                answers[session] = answer
                agents.close(session)
                running.remove(session)
    assert answers == llama_answers()


def test_sessions_that_enter_in_the_middle_share_the_pass(load: Load) -> None:
    """Some sessions take blocks 0-4 elsewhere and enter a partition of [2, 6) at 4."""
    front, side = load(0, 2, 99), load(0, 4, 99)
    shared = load(2, LAYERS, 6 * 4, 4)
    late = {2, 3, 5}
    tokens = {s: list(p) for s, p in PROMPTS.items()}
    cached = dict.fromkeys(PROMPTS, 0)
    for session in PROMPTS:
        (side if session in late else front).open_session(session, 0)
        shared.open_session(session, 4 if session in late else 2)
    assert shared.free_block_slots == 6 * 4 - 3 * 4 - 3 * 2
    for _ in range(TOKENS):
        hidden: dict[int, np.ndarray] = {}
        for executor, group in ((front, set(PROMPTS) - late), (side, late)):
            items = [
                StepItem(s, cached[s], np.array(tokens[s][cached[s] :]), "hidden") for s in group
            ]
            hidden |= zip(group, executor.step(items), strict=True)  # type: ignore[arg-type]
        logits = shared.step([StepItem(s, cached[s], hidden[s], "logits") for s in hidden])
        for session, row in zip(hidden, logits, strict=True):
            assert row is not None
            cached[session] = len(tokens[session])
            tokens[session].append(int(row.argmax()))
    assert {s: t[len(PROMPTS[s]) :] for s, t in tokens.items()} == llama_answers()
    for session in PROMPTS:
        shared.close_session(session)
    assert shared.free_block_slots == 6 * 4


def test_a_change_of_layout_leaves_running_sessions_unharmed(load: Load) -> None:
    agents = ring(load, ())
    (executor,) = agents.executors
    for session, prompt in PROMPTS.items():
        agents.open(session, prompt)
    layouts = [
        CacheLayout(9 * LAYERS, 64, (0, 3)),
        CacheLayout(8 * LAYERS, 100, (0, 3, 5)),
        CacheLayout(2 * LAYERS, 48, (0,)),  # fewer than are in use: they go on
        CacheLayout(7 * LAYERS, 64, (0,)),
    ]
    for step in range(TOKENS):
        if step % 3 == 1 and layouts:
            set_layout(executor, layouts.pop(0))
            assert executor.free_block_slots == executor.layout.block_slots - 6 * LAYERS
            if executor.free_block_slots < 0:
                with pytest.raises(Overloaded):
                    executor.open_session(99, 0)
        agents.advance({s: len(agents.tokens[s]) - agents.cached[s] for s in PROMPTS})
    assert {s: agents.tokens[s][len(p) :] for s, p in PROMPTS.items()} == llama_answers()
    assert not layouts


def test_a_layout_is_prepared_beside_running_steps(load: Load) -> None:
    agents = ring(load, ())
    (executor,) = agents.executors
    prepared: list[Any] = []
    layout = CacheLayout(4 * LAYERS, 64, (0, 2))
    thread = threading.Thread(target=lambda: prepared.append(executor.prepare_layout(layout)))
    thread.start()
    first = {s: PROMPTS[s] for s in (1, 2, 3)}
    assert agents.generate(first, TOKENS) == {s: llama_answers()[s] for s in first}
    thread.join(30)
    executor.open_session(50, 0)  # opened between preparing and applying
    executor.apply_layout(prepared[0])
    executor.open_session(51, 2)
    assert executor.free_block_slots == 4 * LAYERS - LAYERS - (LAYERS - 2)
    executor.close_session(50)
    second = {s: PROMPTS[s] for s in (4, 5)}
    assert agents.generate(second, TOKENS) == {s: llama_answers()[s] for s in second}


def test_a_session_opened_at_an_entry_that_goes_keeps_it(load: Load) -> None:
    executor = load(2, LAYERS, 40, 4)
    prepared = executor.prepare_layout(CacheLayout(40, 64, (2,)))
    executor.open_session(1, 4)
    hidden = np.ones((3, 64), np.float32)
    executor.apply_layout(prepared)
    (made,) = executor.step([StepItem(1, 0, hidden, "logits")])
    other = load(4, LAYERS, 40)
    other.open_session(1, 4)
    (same,) = other.step([StepItem(1, 0, hidden, "logits")])
    assert made is not None
    assert same is not None
    np.testing.assert_allclose(made, same, rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidInput, match="do not enter"):
        executor.open_session(2, 4)


def test_sessions_that_entered_late_leave_room_for_new_ones_after_their_entry_went(
    load: Load,
) -> None:
    """Six of two slots each, then two of all six: more rows in the last blocks than 24 / 6."""
    executor = load(0, LAYERS, 18, 4)
    for session in range(100, 106):
        executor.open_session(session, 4)
    set_layout(executor, CacheLayout(24, 64, (0,)))
    agents = DecoderRing([executor])
    late = [StepItem(s, 0, np.full((3, 64), 0.5, np.float32), "logits") for s in range(100, 106)]
    before = executor.step(late)
    two = {s: PROMPTS[s] for s in (2, 5)}
    assert agents.generate(two, TOKENS) == {s: llama_answers()[s] for s in two}
    for session in range(100, 106):
        executor.close_session(session)
    assert executor.free_block_slots == 24
    assert all(np.array_equal(row, before[0]) for row in before if row is not None)  # type: ignore[arg-type]


def test_slots_are_counted_exactly(whole: DecoderExecutor) -> None:
    for session in range(8):
        whole.open_session(session, 0)
    assert whole.free_block_slots == 0
    with pytest.raises(Overloaded, match="0 block slots left, 6 are needed"):
        whole.open_session(8, 0)
    whole.close_session(3)
    whole.close_session(3)
    assert whole.free_block_slots == LAYERS
    whole.open_session(8, 0)
    assert (whole.sessions, whole.free_block_slots) == (8, 0)


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (StepItem(7, 0, np.array([1]), "logits"), "session"),
        (StepItem(1, 1, np.array([1]), "logits"), "position"),
        (StepItem(1, 0, np.arange(11), "logits"), "position"),
        (StepItem(1, 0, np.array([VOCABULARY]), "logits"), "inputs"),
        (StepItem(1, 0, np.array([-1]), "logits"), "inputs"),
        (StepItem(1, 0, np.zeros((1, 64), np.float32), "logits"), "inputs"),
        (StepItem(1, 0, np.array([], np.int64), "logits"), "inputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_item_is_refused_before_anything_is_computed(
    item: StepItem, field: str, whole: DecoderExecutor
) -> None:
    whole.open_session(1, 0, tokens=10)
    whole.open_session(2, 0)
    good = StepItem(2, 0, np.array([5, 6]), "nothing")
    with pytest.raises(InvalidInput) as refused:
        whole.step([good, item])
    assert refused.value.field == field
    assert whole.step([good]) == [None]  # its position has not moved


def test_a_session_is_no_longer_than_the_layout_and_once_in_a_step(whole: DecoderExecutor) -> None:
    with pytest.raises(InvalidInput, match="more than the 64 a session may have"):
        whole.open_session(1, 0, tokens=65)
    whole.open_session(1, 0)
    good = StepItem(1, 0, np.array([5, 6]), "nothing")
    with pytest.raises(InvalidInput, match="occurs twice"):
        whole.step([good, good])
    assert whole.step([good]) == [None]


def test_results_stay_what_they_were(whole: DecoderExecutor) -> None:
    whole.open_session(1, 0)
    (first,) = whole.step([StepItem(1, 0, np.array([5]), "logits")])
    assert first is not None
    kept = first.copy()
    whole.step([StepItem(1, 1, np.array([9]), "logits")])
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(
    "layout",
    [
        CacheLayout(6, 64, ()),
        CacheLayout(6, 64, (1,)),
        CacheLayout(6, 64, (0, 6)),
        CacheLayout(6, 64, (0, 3, 2)),
        CacheLayout(-1, 64, (0,)),
        CacheLayout(6, 0, (0,)),
    ],
    ids=str,
)
def test_an_impossible_layout_is_refused(layout: CacheLayout, load: Load) -> None:
    with pytest.raises(InvalidInput, match=r"cache\."):
        load(layout=layout)


def test_blocks_the_model_has_not_are_refused(load: Load) -> None:
    with pytest.raises(InvalidInput, match="is not within 6 blocks"):
        load(0, 7)
    with pytest.raises(ModelNotFound):
        load(model=ModelKey("no", "1"))


@pytest.mark.parametrize("chunk", [16, 64])
async def test_cost_is_measured_without_a_trace(whole: DecoderExecutor, chunk: int) -> None:
    async def at_once(work: Callable[[], int]) -> int:
        return work()

    whole.open_session(1, 0)
    cost = await measure_between_steps(whole, at_once, chunk_tokens=chunk)
    assert cost.prefill_ns + cost.prefill_token_ns > 0
    assert cost.decode(1, 0) > 0
    assert cost.decode(4, 100) > 0
    assert cost.prefill_chunk_tokens == chunk
    assert (whole.sessions, whole.free_block_slots) == (1, 7 * LAYERS)


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_guesses_change_no_token_and_leave_nothing_behind(wrong: int, load: Load) -> None:
    """All sessions guess at once: some tokens rightly, and `wrong` more that are not."""
    executor = load()
    answers = llama_answers()
    tokens = {session: list(prompt) for session, prompt in PROMPTS.items()}
    samplers = {s: SessionSampler(SamplingParameters(), p, len(p), ()) for s, p in PROMPTS.items()}
    for session in PROMPTS:
        executor.open_session(session, 0)
    cached = dict.fromkeys(PROMPTS, 0)
    while any(len(tokens[s]) < len(PROMPTS[s]) + TOKENS for s in PROMPTS):
        items, rightly = [], {}
        for session, known in tokens.items():
            said = len(known) - len(PROMPTS[session])
            right = answers[session][said : said + session % 3]
            rightly[session] = len(right)
            drafts = [*right, *[(each + 1) % VOCABULARY for each in answers[session][:wrong]]]
            inputs = np.array([*known[cached[session] :], *drafts])
            sampler = samplers[session]
            items.append(
                StepItem(session, cached[session], inputs, "token", sampler, drafts=drafts)
            )
        for item, made in zip(items, executor.step(items), strict=True):
            assert made is not None
            session = item.session
            assert len(made) > rightly[session]
            cached[session] = item.position + len(item.inputs) - len(item.drafts) + len(made) - 1
            executor.truncate(session, cached[session])
            tokens[session] += made.tolist()
            for token in made.tolist():
                samplers[session].accept(token)
    for session, prompt in PROMPTS.items():
        assert tokens[session][len(prompt) :][:TOKENS] == answers[session]
    with pytest.raises(InvalidInput, match="cannot be kept"):
        executor.truncate(1, cached[1] + 1)
    item = StepItem(1, cached[1], np.array([1]), "token", samplers[1], drafts=[1])
    with pytest.raises(InvalidInput, match="drafts"):
        executor.step([item])
    executor.close()
