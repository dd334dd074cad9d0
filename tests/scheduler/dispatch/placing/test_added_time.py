"""The time that a session adds to all: against its definition, and against simulated workers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.dispatch.placing.added_time import added_ns
from catenary_scheduler.dispatch.placing.jobs import WorkerLimits
from catenary_scheduler.dispatch.placing.occupancy import RunningSequence
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import GatewayId, RequestId
from catenary_services.domain.latency import LatencyLines
from catenary_simulator.placement.engine import SimulatedSession, SimulatedWorker

MS = 1_000_000
GAMMA = 0.5
LIMITS = WorkerLimits(0, 0, float("inf"), GAMMA)
NEW = LatencyLines(0.3e6, 12e6, 800.0, 1.2e6, 20e6, 21e6)
OLD = LatencyLines(0.8e6, 25e6, 2000.0, 3e6, 45e6, 48e6)


@dataclass
class Session:
    """A session as the definition of the added time sees it."""

    prompt: int
    predicted: int
    generated: int

    @property
    def left(self) -> int:
        """Tokens that it is still to generate."""
        return max(0, self.predicted - self.generated)


@dataclass
class Load:
    """The sessions of a worker, and the worker that counts them by running sums."""

    lines: LatencyLines
    sessions: list[Session] = field(default_factory=list)

    def worker(self) -> Worker:
        worker = Worker(self.lines, LIMITS)
        for number, session in enumerate(self.sessions):
            request = RequestId(GatewayId("g"), number)
            running = RunningSequence(request, session.prompt, session.predicted, 0, 0, 0)
            worker.add(running)
            if session.generated:
                worker.progressed(running, session.generated, 1.0, 10, 5)
        return worker

    def added(self, prompt: int, answer: int) -> float:
        """Returns the added time from each session, one by one."""
        lines = self.lines
        here = self.sessions
        context = sum(each.prompt + each.generated for each in here)
        after = self.step(len(here) + 1, context + prompt + GAMMA * answer)
        if not here:
            return lines.prefill(prompt) + (answer - 1) * after
        before = self.step(len(here), context)
        unrun = sum(each.prompt for each in here if not each.generated)
        own = before / 2 + lines.prefill(unrun + prompt) + (answer - 1) * after
        together = min(sum(each.left for each in here), len(here) * (answer - 1))
        held_up = sum(lines.prefill(prompt) for _ in here)
        return own + held_up + (after - before) * together + len(here)

    def step(self, sessions: int, context: float) -> float:
        lines = self.lines
        if sessions == 1 and lines.decode_lone_ns:
            return lines.decode_lone_ns
        return max(lines.decode_lone_ns, lines.decode(sessions, context))


LINES = st.builds(
    LatencyLines,
    st.floats(0, 1e6),
    st.floats(0, 3e7),
    st.floats(0, 3e3),
    st.floats(0, 3e6),
    st.floats(1e6, 5e7),
    st.one_of(st.just(0.0), st.floats(1e6, 6e7)),
    st.floats(0, 1e7),
)
SESSIONS = st.lists(
    st.builds(Session, st.integers(1, 2000), st.integers(1, 800), st.integers(0, 900)), max_size=6
)


@settings(max_examples=200, deadline=None)
@given(LINES, SESSIONS, st.integers(1, 3000), st.integers(1, 1000))
def test_running_sums_say_what_the_definition_says(
    lines: LatencyLines, sessions: list[Session], prompt: int, answer: int
) -> None:
    load = Load(lines, sessions)
    assert added_ns(load.worker(), prompt, answer) == pytest.approx(load.added(prompt, answer))


@settings(max_examples=200, deadline=None)
@given(LINES, SESSIONS, st.integers(1, 3000), st.integers(1, 1000))
def test_no_session_more_is_for_free(
    lines: LatencyLines, sessions: list[Session], prompt: int, answer: int
) -> None:
    # Without a lone step of its own: the second session may cost the first one more than a third.
    lines = replace(lines, decode_lone_ns=0.0)
    load = Load(lines, sessions)
    added = added_ns(load.worker(), prompt, answer)
    more = Load(lines, [*sessions, Session(10, 10, 1)])
    assert added_ns(more.worker(), prompt, answer) > added
    assert added_ns(load.worker(), prompt + 1, answer) >= added
    assert added_ns(load.worker(), prompt, answer + 1) > added


@settings(max_examples=100, deadline=None)
@given(LINES, SESSIONS, st.floats(0.1, 4.0), st.floats(0.0, 5000.0))
def test_sessions_of_others_on_the_same_devices_count(
    lines: LatencyLines, sessions: list[Session], others: float, tokens: float
) -> None:
    worker = Load(replace(lines, decode_lone_ns=0.0), sessions).worker()
    assert added_ns(worker, 100, 50, others, tokens) > added_ns(worker, 100, 50)


def ends(lines: LatencyLines, sessions: list[SimulatedSession]) -> float:
    """Returns the sum of the times at which a simulated worker ends the sessions, in ns."""
    worker = SimulatedWorker(0, lines, 1e12)
    for session in sessions:
        worker.submit(session, 0)
    while worker.ends_ps >= 0:
        worker.boundary()
    return sum(session.last_ps for session in sessions) / 1000


def simulated(lines: LatencyLines, here: list[tuple[int, int]], asked: tuple[int, int]) -> float:
    """Returns by how much the ends of all move if one request more comes to a simulated worker."""

    def made(lengths: list[tuple[int, int]]) -> list[SimulatedSession]:
        return [
            SimulatedSession(RequestId(GatewayId("g"), at), prompt, answer, 0)
            for at, (prompt, answer) in enumerate(lengths)
        ]

    return ends(lines, made([*here, asked])) - ends(lines, made(here))


def test_alone_it_is_the_time_that_a_simulated_worker_takes() -> None:
    for lines in (NEW, OLD):
        for asked in ((40, 20), (500, 200), (2000, 30)):
            worker = Load(lines).worker()
            assert added_ns(worker, *asked) == pytest.approx(simulated(lines, [], asked), rel=1e-3)


def test_the_worker_with_the_least_added_time_is_as_good_as_the_best_in_hindsight() -> None:
    chosen = best = worst = 0.0
    for seed in range(150):
        draw = random.Random(seed)
        loads = {}
        for lines in (NEW, OLD):
            count = draw.randrange(10)
            loads[lines] = [(draw.randint(5, 600), draw.randint(5, 400)) for _ in range(count)]
        asked = (draw.randint(5, 600), draw.randint(5, 400))
        true = {lines: simulated(lines, here, asked) for lines, here in loads.items()}
        predicted = {
            lines: added_ns(Load(lines, [Session(p, a, 0) for p, a in here]).worker(), *asked)
            for lines, here in loads.items()
        }
        chosen += true[min(predicted, key=lambda each: predicted[each])]
        best += min(true.values())
        worst += max(true.values())
    assert best <= chosen <= 1.02 * best
    assert worst > 1.5 * best
