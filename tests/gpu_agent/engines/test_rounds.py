"""The steps of an engine, told from when tokens come."""

from __future__ import annotations

import pytest

from catenary_agent.decoders.base import DecoderCost
from catenary_agent.engines import rounds as rounds_module
from catenary_agent.engines.requests import EngineRequest
from catenary_agent.engines.rounds import EngineRounds
from catenary_agent.engines.streams import EngineStream
from catenary_agent.supervision.steps import RunningSteps
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.sampling import SamplingParameters

KEY = PartitionKey(ModelKey("m", "1"), 0, 3)


class Engine:
    """Rounds on a clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000
        monkeypatch.setattr(rounds_module.time, "monotonic_ns", lambda: self.now)
        self.steps = RunningSteps()
        self.rounds = EngineRounds(KEY, self.steps)

    def ask(self, tokens: int) -> EngineStream:
        request = EngineRequest([1] * tokens, tokens, 50, SamplingParameters(), 1)
        stream = EngineStream(1, request)
        self.rounds.asked(stream)
        return stream

    def come(self, *streams: EngineStream, after: int) -> None:
        self.now += after
        for stream in streams:
            self.rounds.came(stream, 1, self.now)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_tokens_that_come_together_are_of_one_step(engine: Engine) -> None:
    one, other = engine.ask(10), engine.ask(20)
    engine.come(one, other, after=100)
    engine.come(one, other, after=30)
    engine.come(one, after=30)
    (prompts, first), (tokens, second) = engine.rounds.take()
    assert (prompts.decode_rows, prompts.chunks, first) == (0, (10, 20), (1_000, 1_100))
    assert (tokens.decode_rows, tokens.context_tokens, second) == (2, 11 + 21, (1_100, 1_130))


def test_a_round_is_whole_once_every_running_sequence_has_its_token(engine: Engine) -> None:
    one, other = engine.ask(10), engine.ask(20)
    assert engine.rounds.came(one, 1, engine.now)  # nobody knows when the other prompt is read
    assert engine.rounds.came(other, 1, engine.now)
    assert not engine.rounds.came(one, 1, engine.now)
    assert engine.rounds.came(other, 1, engine.now)
    engine.rounds.over(other)
    assert engine.rounds.came(one, 1, engine.now)


def test_the_last_step_is_complete_when_nothing_is_left_to_do(engine: Engine) -> None:
    one = engine.ask(5)
    engine.come(one, after=40)
    engine.rounds.over(one)
    ((size, times),) = engine.rounds.take()
    assert (size.chunks, times) == ((5,), (1_000, 1_040))
    engine.now += 9_000
    engine.come(engine.ask(5), after=40)
    other = engine.ask(5)
    engine.come(other, after=1)
    engine.come(other, after=50)
    (size, times), *_ = engine.rounds.take()
    assert times[0] == 10_040  # the time without work is nobody's


def test_a_prompt_beside_running_sessions_has_what_their_steps_take_longer(engine: Engine) -> None:
    engine.rounds.cost = DecoderCost(0, 1, 30, 0, decode_lone_ns=30)
    one = engine.ask(5)
    engine.come(one, after=10)
    engine.come(one, after=30)
    other = engine.ask(500)
    engine.come(one, after=80)  # 50 of them for the prompt
    engine.come(one, after=80)
    engine.come(one, other, after=80)
    engine.come(one, after=30)
    found = engine.rounds.take()
    decoded = [times[1] - times[0] for size, times in found if not size.chunks]
    assert decoded == [30, 30, 30]
    (both, times) = found[-1]
    assert both.chunks == (500,)
    assert times[1] - times[0] == 80 + 50 + 50


def test_the_watchdog_sees_a_step_while_there_is_work(engine: Engine) -> None:
    engine.rounds.cost = DecoderCost(100, 10, 30, 0, decode_lone_ns=30)
    assert not engine.steps.in_hand()
    one = engine.ask(5)
    (step,) = engine.steps.in_hand()
    assert step.booked_ns == 150
    engine.come(one, after=10)
    (later,) = engine.steps.in_hand()
    assert later.booked_ns == 30
    engine.rounds.over(one)
    assert not engine.steps.in_hand()
