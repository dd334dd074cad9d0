"""How many workers a model should have: pure, events in and `Scale` commands out.

    arrivals, lengths   ->  change points  ->  rate expected when a new worker would be ready
    that rate           ->  workers line   ->  workers
    attainment, queue   ->  one more worker at once, whatever the line says
    what sufficed       ->  the line learns

Out at once, in with patience: a worker less must have been enough for a while, with a margin, at
the highest rate seen in that while, and some time after the last change. What has failed at a rate
is not tried again at that rate soon. Departures from Aladdin (section 4.3), which has neither cold
start nor a cost of switching: the rate is foreseen by one cold start, hysteresis and cool-down, and
below R the line is read but not learned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from catenary_scheduler.dispatch.events import Scale
from catenary_scheduler.scaling.workers.attainment import AnswerLength, Outcomes, attained
from catenary_scheduler.scaling.workers.change_points import ArrivalWatch, LengthWatch
from catenary_scheduler.scaling.workers.safety import Safety
from catenary_scheduler.scaling.workers.sufficiency import Sufficiency
from catenary_scheduler.scaling.workers.trend import Trend
from catenary_scheduler.scaling.workers.worker_facts import ScalingPolicy, WorkerFacts
from catenary_scheduler.scaling.workers.workers_line import Lengths, WorkersLine, least_rate
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, Nanoseconds
from catenary_services.domain.latency import TokenObjectives

_SIMILAR = 0.8
"""What failed at a rate would fail at this part of it too."""


@dataclass(slots=True)
class _Failure:
    """So few workers were not enough for such a rate."""

    rate: float = 0.0
    workers: int = 0
    at_ns: Nanoseconds = 0


class ModelScaling:
    """How many workers one model should have.

    Feed it `arrived`, `finished` and `cancelled`, each O(1); ask `decide` about once a second.

    Attributes:
        wanted: Workers there should be; 0 before the first decision.
        reason: Why, in words.
        cold_start_ns: From the wish for a worker until it serves: measured, smoothed.
    """

    def __init__(self, model: ModelKey, policy: ScalingPolicy | None = None) -> None:
        self.model = model
        self.policy = policy = policy or ScalingPolicy()
        self.wanted = 0
        self.reason = ""
        self.cold_start_ns = policy.cold_start_ns
        self.rates = ArrivalWatch()
        self._prompts, self._answers = LengthWatch(), LengthWatch()
        self._answer = AnswerLength()
        self._hears_tokens = False
        self._trend = Trend()
        self._sufficiency = Sufficiency(policy)
        self._safety = Safety(policy)
        self._session_ns = 10.0 * NANOSECONDS_PER_SECOND
        """How long a session takes, smoothed."""
        self._unsteady_ns: Nanoseconds | None = None
        """When the load, or the workers for it, changed last."""
        self._wished_ns: Nanoseconds | None = None
        self._scaled_ns: Nanoseconds = 0
        self._learned_ns: Nanoseconds = 0
        self._needs: deque[tuple[Nanoseconds, int]] = deque()
        """What was needed lately, the largest first (a monotonic queue)."""
        self._failure = _Failure()

    @property
    def line(self) -> WorkersLine:
        """Workers by rate."""
        return self._sufficiency.line

    # ---- what happened ----

    def arrived(self, prompt_tokens: int, now: Nanoseconds) -> None:
        """A session was asked for."""
        if self._unsteady_ns is None:
            self._unsteady_ns = now
        self._trend.arrived(now)
        if self.rates.arrived(now):
            self._changed(now)
        if self._prompts.observed(prompt_tokens):
            self.line.forget()

    def generated(self, tokens: int) -> None:
        """Sessions got so many more tokens, those that finish with them too.

        Who never says this is taken to say it when a session is finished: then mean lengths come
        out short while load grows.
        """
        self._hears_tokens = True
        self._answer.generated(tokens)

    def finished(
        self,
        outcome: tuple[int, int, int],
        objectives: TokenObjectives | None,
        arrived_ns: Nanoseconds,
        now: Nanoseconds,
    ) -> None:
        """A session has all its tokens.

        Args:
            outcome: Its tokens, the time to its first one, and from there to its last.
            objectives: What it was held to.
            arrived_ns: When it was asked for.
            now: The moment.
        """
        tokens, first_token_ns, decode_ns = outcome
        met = attained(objectives, tokens, first_token_ns, decode_ns)
        found = Outcomes(1, int(met), max(0, tokens - 1), decode_ns)
        self._safety.finished(found, arrived_ns, now)
        if not self._hears_tokens:
            self._answer.generated(tokens)
        self._answer.finished()
        self._session_ns += 0.05 * (now - arrived_ns - self._session_ns)
        # Only in the steady state are those that finish like those that arrive.
        if self._is_steady(now) and self._answers.observed(tokens):
            self.line.forget()

    def attainment(self, now: Nanoseconds) -> float:
        """Returns the share of the sessions finished lately that met their objectives."""
        return self._safety.recent.total(now).ratio

    def attainment_of_any(self, now: Nanoseconds) -> float:
        """Returns the same, -1 if none finished lately."""
        recent = self._safety.recent.total(now)
        return recent.ratio if recent.finished else -1.0

    def reclaimed(self) -> None:
        """A worker that was on its way out stays: nothing is learned of cold starts from it."""
        self._wished_ns = None

    def to_record(self) -> dict[str, object]:
        """Returns what was learned and is worth keeping."""
        return {"line": self.line.to_record(), "cold_start_ns": self.cold_start_ns}

    def restore(self, record: Mapping[str, object]) -> None:
        """Goes on from a predecessor's record.

        Raises:
            ValueError: it is none.
        """
        line, cold_start_ns = record.get("line"), record.get("cold_start_ns")
        if not isinstance(line, dict) or not isinstance(cold_start_ns, int):
            raise ValueError("not a record of scaling")
        self.line.restore(line)
        self.cold_start_ns = cold_start_ns

    def lengths(self, expected: Lengths) -> Lengths:
        """Returns the mean lengths, drawn towards what is expected while few were seen."""
        usual, prompts = expected.prompt_tokens, self._prompts
        weight = min(1.0, prompts.count / 20)
        prompt = prompts.mean * weight + usual * (1.0 - weight)
        return Lengths(prompt, self._answer.mean(expected.answer_tokens))

    # ---- what should be ----

    def decide(self, facts: WorkerFacts, now: Nanoseconds) -> Scale | None:
        """Returns a command if there should be another number of workers than before."""
        self._note(facts, now)
        if facts.workers == 0:
            return None  # nothing to judge by before there is a first worker
        if self.wanted == 0:
            self.wanted, self.reason = facts.workers, "as planned"
            self._scaled_ns = now
        before = self.wanted
        rate = self.rates.rate(now)
        expected = self._trend.ahead(rate, self.cold_start_ns, now)
        needed = self._bounded(self.line.needed(expected), facts)
        has_plenty = self._sufficiency.is_plenty(rate, facts.workers)
        problem = self._safety.problem(facts, now, has_plenty=has_plenty)
        self._learn(facts, rate, now)
        self._needs_at(rate, facts.packed, now)
        if needed > self.wanted:
            said = "" if expected <= rate else f", {expected:.2g} soon"
            self._want(needed, f"{rate:.2g} sessions/s{said}", now)
        elif problem:
            self._add(facts, rate, problem, now)
        else:
            self._shrink(facts, rate, now)
        self.wanted = self._bounded(self.wanted, facts)
        if self.wanted == before:
            return None
        return Scale(self.model, self.wanted, self.reason)

    def _note(self, facts: WorkerFacts, now: Nanoseconds) -> None:
        """Follows the workers and what they are good for."""
        if self.rates.passed(now):
            self._changed(now)
        if self._safety.noted(facts.workers, now):
            self._unsteady_ns = now
        if self._wished_ns is not None and facts.workers >= self.wanted:
            self.cold_start_ns = (self.cold_start_ns + now - self._wished_ns) // 2
            self._wished_ns = None
        self._sufficiency.note(facts, self.lengths(facts.expected))

    def _changed(self, now: Nanoseconds) -> None:
        self._trend.restart(now)
        self._unsteady_ns = now

    def _is_steady(self, now: Nanoseconds) -> bool:
        return self._unsteady_ns is not None and now - self._unsteady_ns > 3 * self._session_ns

    def _add(self, facts: WorkerFacts, rate: float, why: str, now: Nanoseconds) -> None:
        """Wants one more worker than there are, unless help is on its way."""
        more = self._bounded(facts.workers + 1, facts)
        if more <= self.wanted or not self._may_add(facts, now):
            return
        self._failure = _Failure(rate, facts.workers, now)
        self._sufficiency.failed(rate, facts.workers)
        self._want(more, why, now)

    def _may_add(self, facts: WorkerFacts, now: Nanoseconds) -> bool:
        """True unless help is on its way."""
        if facts.workers < self.wanted and now - self._scaled_ns < 3 * self.cold_start_ns:
            return False
        return now - self._safety.ready_ns >= min(self.policy.cooldown_ns, self.cold_start_ns)

    def _learn(self, facts: WorkerFacts, rate: float, now: Nanoseconds) -> None:
        """Teaches the line what became of the last while, if that tells anything (above R)."""
        window_ns = self.policy.window_ns
        if now - max(self._learned_ns, self._safety.ready_ns) < window_ns:
            return
        variation = max(self._prompts.variation, self._answers.variation)
        done = self._safety.trusted.total(now)
        least = least_rate(variation, window_ns / NANOSECONDS_PER_SECOND)
        if rate > least and done.finished >= self.policy.least_finished:
            self._learned_ns = now
            self._sufficiency.lasted(facts, rate, done)

    def _needs_at(self, rate: float, packed: int, now: Nanoseconds) -> None:
        """Remembers how many workers the present rate needs, with a margin.

        Caches that need so many workers do not fit on fewer, whatever the rate.
        """
        needed = max(packed, self._sufficiency.with_margin(rate))
        failure = self._failure
        if now - failure.at_ns < self.policy.remember_ns and rate > _SIMILAR * failure.rate:
            needed = max(needed, failure.workers + 1)
        while self._needs and self._needs[-1][1] <= needed:
            self._needs.pop()
        self._needs.append((now, needed))
        while now - self._needs[0][0] > self.policy.patience_ns:
            self._needs.popleft()

    def _shrink(self, facts: WorkerFacts, rate: float, now: Nanoseconds) -> None:
        policy = self.policy
        # A backlog is worked off first.
        lately = max(self._needs[0][1], self._sufficiency.for_sessions(facts.sessions))
        enough = self._bounded(lately, facts)
        if enough >= self.wanted or facts.workers < self.wanted:
            return
        if now - max(self._scaled_ns, self._safety.ready_ns) < max(
            policy.cooldown_ns, policy.patience_ns
        ):
            return
        # A quarter at a time: the next step is taken after a look at what became of this one.
        least = self.wanted - max(1, self.wanted // 4)
        self._want(max(enough, least), f"{rate:.2g} sessions/s need no more", now)

    def _want(self, workers: int, reason: str, now: Nanoseconds) -> None:
        if workers > self.wanted and self._wished_ns is None:
            self._wished_ns = now
        elif workers < self.wanted:
            self._wished_ns = None
        if workers != self.wanted:
            self._scaled_ns = now
        self.wanted, self.reason = workers, reason

    @staticmethod
    def _bounded(workers: int, facts: WorkerFacts) -> int:
        return max(facts.least, min(facts.most, workers))
