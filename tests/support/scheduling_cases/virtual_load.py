"""Sessions on virtual workers, in steps of a tenth of a second, under a `ModelScaling`.

A worker's sessions share its iterations as the latency lines say (eq. 3); prompts hold everybody up
(eq. 2). New sessions go to the worker with the fewest. It is no serious simulator, only enough of
one for a controller to control.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from catenary_scheduler.dispatch.events import Scale
from catenary_scheduler.scaling import ModelScaling, WorkerStatistics
from catenary_scheduler.scaling.workers.workers_line import SessionLengths
from catenary_services.domain.latency import LatencyLines, TokenObjectives

S = 10**9
STEP_NS = S // 10
LINES = LatencyLines(
    prefill_token_ns=0.2e6,
    prefill_ns=10e6,
    decode_context_token_ns=2e3,
    decode_session_ns=2e6,
    decode_ns=20e6,
    decode_lone_ns=22e6,
)
OBJECTIVES = TokenObjectives(first_token_ns=S, per_token_ns=60 * 10**6)
LENGTHS = SessionLengths(100.0, 100.0)


@dataclass
class Session:
    arrived_ns: int
    prompt: int
    answer: int
    generated: float = 0.0
    first_ns: int = 0
    """From its arrival to its first token."""


@dataclass
class Worker:
    sessions: list[Session] = field(default_factory=list)
    draining: bool = False
    stalled_ns: float = 0.0

    tokens: int = 0
    """Generated in the last step."""

    def step(self, now: int) -> list[Session]:
        """Lets a step pass; returns the sessions that came to their end."""
        before = sum(int(s.generated) for s in self.sessions)
        left = float(STEP_NS)
        for session in self.sessions:
            if not session.first_ns:
                left -= LINES.prefill(session.prompt)
                session.first_ns = now - session.arrived_ns + round(STEP_NS - left)
                session.generated = 1.0
        if left > 0 and self.sessions:
            context = sum(s.prompt + s.generated for s in self.sessions)
            tokens = left / LINES.decode(len(self.sessions), context)
            for session in self.sessions:
                session.generated += tokens
        self.tokens = sum(min(int(s.generated), s.answer) for s in self.sessions) - before
        done = [s for s in self.sessions if s.generated >= s.answer]
        self.sessions = [s for s in self.sessions if s.generated < s.answer]
        return done


class VirtualLoad:
    """A model on workers that come after a cold start and go when they are empty."""

    def __init__(
        self,
        scaling: ModelScaling,
        rate: Callable[[float], float],
        *,
        cold_start_s: float = 8.0,
        least: int = 1,
        most: int = 20,
        workers: int = 1,
        seed: int = 1,
        slots: int = 32,
    ) -> None:
        self.scaling, self.rate = scaling, rate
        self.cold_start_ns, self.slots = int(cold_start_s * S), slots
        self.least, self.most = least, most
        self.workers = [Worker() for _ in range(workers)]
        self.coming: list[int] = []
        self.now = S
        self.orders: list[tuple[float, Scale]] = []
        self.met = self.finished = 0
        self.worker_seconds = 0.0
        self._random = random.Random(seed)
        self._wanted = workers

    def run(self, seconds: float) -> VirtualLoad:
        """Goes on for so long."""
        end = self.now + int(seconds * S)
        while self.now < end:
            self.now += STEP_NS
            self._arrive()
            self._work()
            if self.now % S == 0:
                self._decide()
        return self

    @property
    def serving(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.draining]

    def _arrive(self) -> None:
        expected = self.rate(self.now / S) * STEP_NS / S
        for _ in range(poisson(self._random, expected)):
            prompt = max(1, round(self._random.expovariate(1 / LENGTHS.prompt_tokens)))
            answer = 2 + round(self._random.expovariate(1 / LENGTHS.answer_tokens))
            self.scaling.arrived(prompt, self.now)
            session = Session(self.now, prompt, answer)
            min(self.serving, key=lambda each: len(each.sessions)).sessions.append(session)

    def _work(self) -> None:
        while self.coming and self.coming[0] <= self.now:
            self.coming.pop(0)
            self.workers.append(Worker())
        for worker in self.workers:
            done = worker.step(self.now)
            self.scaling.generated(worker.tokens)
            for session in done:
                total = self.now - session.arrived_ns
                outcome = (session.answer, session.first_ns, total - session.first_ns)
                self.scaling.finished(outcome, OBJECTIVES, session.arrived_ns, self.now)
                pace = outcome[2] / max(1, session.answer - 1)
                self.finished += 1
                self.met += (
                    session.first_ns <= OBJECTIVES.first_token_ns
                    and pace <= OBJECTIVES.per_token_ns
                )
        self.workers = [w for w in self.workers if w.sessions or not w.draining]
        self.worker_seconds += len(self.workers) * STEP_NS / S

    def _decide(self) -> None:
        serving = self.serving
        facts = WorkerStatistics(
            workers=len(serving),
            sessions=sum(len(w.sessions) for w in serving),
            slots=self.slots * len(serving),
            lines=LINES,
            objectives=OBJECTIVES,
            least=self.least,
            most=self.most,
            expected=LENGTHS,
        )
        order = self.scaling.decide(facts, self.now)
        if order is None:
            return
        self.orders.append((self.now / S, order))
        missing = order.workers - len(serving) - len(self.coming)
        self.coming += [self.now + self.cold_start_ns] * max(0, missing)
        for _ in range(len(serving) - order.workers):
            going = min(self.serving, key=lambda each: len(each.sessions))
            going.draining = True


def poisson(source: random.Random, mean: float) -> int:
    """Returns how many events of a Poisson process with such a mean happen."""
    limit, product, count = math.exp(-mean), source.random(), 0
    while product > limit:
        product *= source.random()
        count += 1
    return count
