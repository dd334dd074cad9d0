"""Decision on the number of workers of a model: pure, events in and `Scale` commands out.

    arrivals, lengths   ->  change points  ->  rate expected when a new worker would be ready
    that rate           ->  workers line   ->  workers
    attainment, queue   ->  one more worker at once, whatever the line says
    what sufficed       ->  the line learns

Scaling out happens at once, scaling in late. One worker less must have been enough for a while,
with a margin, at the highest rate seen in that while, and some time after the last change. A number
of workers that failed at a rate is not tried again at that rate soon. Departures from Aladdin
(section 4.3), which has neither cold starts nor a cost of switching: the rate is predicted one cold
start ahead, there are hysteresis and cool-down, and below R the line is read but not learned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from catenary_scheduler.dispatch.events import Scale
from catenary_scheduler.scaling.workers.attainment import AnswerLength, OutcomeSums, attained
from catenary_scheduler.scaling.workers.change_points import ArrivalWatch, LengthWatch
from catenary_scheduler.scaling.workers.safety import ScalingSafety
from catenary_scheduler.scaling.workers.sufficient_workers import SufficientWorkers
from catenary_scheduler.scaling.workers.trend import ArrivalTrend
from catenary_scheduler.scaling.workers.worker_statistics import ScalingPolicy, WorkerStatistics
from catenary_scheduler.scaling.workers.workers_line import SessionLengths, WorkersLine, least_rate
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, Nanoseconds
from catenary_services.domain.latency import TokenObjectives

_SIMILAR = 0.8
"""Part of a rate at which so few workers would fail again, if they failed at the whole rate."""


@dataclass(slots=True)
class _Failure:
    """A number of workers that was not enough for a rate, and when that was."""

    rate: float = 0.0
    workers: int = 0
    at_ns: Nanoseconds = 0


class ModelScaling:
    """Decision on the number of workers of one model.

    Feed it `arrived`, `finished` and `cancelled`, each O(1); ask `decide` about once a second.

    Attributes:
        wanted: Number of workers there should be; 0 before the first decision.
        reason: Why that number is wanted, in words.
        cold_start_ns: Smoothed time from the order of a worker until it serves.
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
        self._trend = ArrivalTrend()
        self._sufficient_workers = SufficientWorkers(policy)
        self._safety = ScalingSafety(policy)
        self._session_ns = 10.0 * NANOSECONDS_PER_SECOND
        """Smoothed duration of a session, in nanoseconds."""
        self._unsteady_ns: Nanoseconds | None = None
        """Moment at which the load, or the number of workers for it, last changed. None before any
        arrival."""
        self._ordered_ns: Nanoseconds | None = None
        self._scaled_ns: Nanoseconds = 0
        self._learned_ns: Nanoseconds = 0
        self._needs: deque[tuple[Nanoseconds, int]] = deque()
        """Recent needs as (moment, workers), the largest first (a monotonic queue)."""
        self._failure = _Failure()

    @property
    def line(self) -> WorkersLine:
        """Line from which the number of workers for a rate is read."""
        return self._sufficient_workers.line

    # ---- what happened ----

    def arrived(self, prompt_tokens: int, now: Nanoseconds) -> None:
        """Counts a session that was asked for."""
        if self._unsteady_ns is None:
            self._unsteady_ns = now
        self._trend.arrived(now)
        if self.rates.arrived(now):
            self._changed(now)
        if self._prompts.observed(prompt_tokens):
            self.line.forget()

    def generated(self, tokens: int) -> None:
        """Counts tokens that sessions got, those of sessions that finish with them included.

        If this is never called, tokens are counted when their session is finished. Mean lengths are
        then too short while load grows.
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
        """Counts a session that has all its tokens.

        Args:
            outcome: Its number of tokens, the nanoseconds to the first one, and from there to the
                last.
            objectives: The objectives it was held to; None if there were none.
            arrived_ns: The moment at which it was asked for.
            now: The present moment.
        """
        tokens, first_token_ns, decode_ns = outcome
        met = attained(objectives, tokens, first_token_ns, decode_ns)
        found = OutcomeSums(1, int(met), max(0, tokens - 1), decode_ns)
        self._safety.finished(found, arrived_ns, now)
        if not self._hears_tokens:
            self._answer.generated(tokens)
        self._answer.finished()
        self._session_ns += 0.05 * (now - arrived_ns - self._session_ns)
        # In the steady state only, the sessions that finish are like those that arrive.
        if self._is_steady(now) and self._answers.observed(tokens):
            self.line.forget()

    def attainment(self, now: Nanoseconds) -> float:
        """Returns the share of recently finished sessions that met their objectives.

        Returns 1 if none finished.
        """
        return self._safety.recent.total(now).ratio

    def attainment_of_any(self, now: Nanoseconds) -> float:
        """Returns the share of recently finished sessions that met their objectives.

        Returns -1 if none finished.
        """
        recent = self._safety.recent.total(now)
        return recent.ratio if recent.finished else -1.0

    def reclaimed(self) -> None:
        """Forgets the last order, because a worker that was to go stays instead.

        A worker that was never started teaches nothing about cold starts.
        """
        self._ordered_ns = None

    def to_record(self) -> dict[str, object]:
        """Returns what was learned, for a successor: the workers line and the cold start time."""
        return {"line": self.line.to_record(), "cold_start_ns": self.cold_start_ns}

    def restore(self, record: Mapping[str, object]) -> None:
        """Restores what a predecessor has learned.

        Raises:
            ValueError: The record is malformed.
        """
        line, cold_start_ns = record.get("line"), record.get("cold_start_ns")
        if not isinstance(line, dict) or not isinstance(cold_start_ns, int):
            raise ValueError("not a record of scaling")
        self.line.restore(line)
        self.cold_start_ns = cold_start_ns

    def lengths(self, expected: SessionLengths) -> SessionLengths:
        """Returns the mean lengths of prompts and answers.

        They are drawn towards `expected` while few were seen.
        """
        usual, prompts = expected.prompt_tokens, self._prompts
        weight = min(1.0, prompts.count / 20)
        prompt = prompts.mean * weight + usual * (1.0 - weight)
        return SessionLengths(prompt, self._answer.mean(expected.answer_tokens))

    # ---- what should be ----

    def decide(self, statistics: WorkerStatistics, now: Nanoseconds) -> Scale | None:
        """Returns a command if the number of workers that there should be changes.

        Returns None if it does not.
        """
        self._note(statistics, now)
        if statistics.workers == 0:
            return None  # there is nothing to judge by before there is a first worker
        if self.wanted == 0:
            self.wanted, self.reason = statistics.workers, "as planned"
            self._scaled_ns = now
        before = self.wanted
        rate = self.rates.rate(now)
        expected = self._trend.ahead(rate, self.cold_start_ns, now)
        needed = self._bounded(self.line.needed(expected), statistics)
        has_plenty = self._sufficient_workers.is_plenty(rate, statistics.workers)
        problem = self._safety.problem(statistics, now, has_plenty=has_plenty)
        self._learn(statistics, rate, now)
        self._needs_at(rate, statistics.packed, now)
        if needed > self.wanted:
            said = "" if expected <= rate else f", {expected:.2g} soon"
            self._want(needed, f"{rate:.2g} sessions/s{said}", now)
        elif problem:
            self._add(statistics, rate, problem, now)
        else:
            self._shrink(statistics, rate, now)
        self.wanted = self._bounded(self.wanted, statistics)
        if self.wanted == before:
            return None
        return Scale(self.model, self.wanted, self.reason)

    def _note(self, statistics: WorkerStatistics, now: Nanoseconds) -> None:
        """Records how many workers there are and what one of them can do."""
        if self.rates.passed(now):
            self._changed(now)
        if self._safety.noted(statistics.workers, now):
            self._unsteady_ns = now
        if self._ordered_ns is not None and statistics.workers >= self.wanted:
            self.cold_start_ns = (self.cold_start_ns + now - self._ordered_ns) // 2
            self._ordered_ns = None
        self._sufficient_workers.note(statistics, self.lengths(statistics.expected))

    def _changed(self, now: Nanoseconds) -> None:
        self._trend.restart(now)
        self._unsteady_ns = now

    def _is_steady(self, now: Nanoseconds) -> bool:
        return self._unsteady_ns is not None and now - self._unsteady_ns > 3 * self._session_ns

    def _add(self, statistics: WorkerStatistics, rate: float, why: str, now: Nanoseconds) -> None:
        """Asks for one worker more than there are, unless help is on its way."""
        more = self._bounded(statistics.workers + 1, statistics)
        if more <= self.wanted or not self._may_add(statistics, now):
            return
        self._failure = _Failure(rate, statistics.workers, now)
        self._sufficient_workers.failed(rate, statistics.workers)
        self._want(more, why, now)

    def _may_add(self, statistics: WorkerStatistics, now: Nanoseconds) -> bool:
        """Returns False while workers that were ordered may still come or have only just come."""
        if statistics.workers < self.wanted and now - self._scaled_ns < 3 * self.cold_start_ns:
            return False
        return now - self._safety.ready_ns >= min(self.policy.cooldown_ns, self.cold_start_ns)

    def _learn(self, statistics: WorkerStatistics, rate: float, now: Nanoseconds) -> None:
        """Teaches the line how the last window went.

        It learns only if the rate is above R and enough sessions finished.
        """
        window_ns = self.policy.window_ns
        if now - max(self._learned_ns, self._safety.ready_ns) < window_ns:
            return
        variation = max(self._prompts.variation, self._answers.variation)
        done = self._safety.trusted.total(now)
        least = least_rate(variation, window_ns / NANOSECONDS_PER_SECOND)
        if rate > least and done.finished >= self.policy.least_finished:
            self._learned_ns = now
            self._sufficient_workers.lasted(statistics, rate, done)

    def _needs_at(self, rate: float, packed: int, now: Nanoseconds) -> None:
        """Records how many workers the present rate needs, with a margin.

        The need is at least `packed`, because the caches do not fit on fewer workers, whatever the
        rate.
        """
        needed = max(packed, self._sufficient_workers.with_margin(rate))
        failure = self._failure
        if now - failure.at_ns < self.policy.remember_ns and rate > _SIMILAR * failure.rate:
            needed = max(needed, failure.workers + 1)
        while self._needs and self._needs[-1][1] <= needed:
            self._needs.pop()
        self._needs.append((now, needed))
        while now - self._needs[0][0] > self.policy.scale_down_window_ns:
            self._needs.popleft()

    def _shrink(self, statistics: WorkerStatistics, rate: float, now: Nanoseconds) -> None:
        policy = self.policy
        # A backlog must be worked off before workers go.
        lately = max(self._needs[0][1], self._sufficient_workers.for_sessions(statistics.sessions))
        enough = self._bounded(lately, statistics)
        if enough >= self.wanted or statistics.workers < self.wanted:
            return
        if now - max(self._scaled_ns, self._safety.ready_ns) < max(
            policy.cooldown_ns, policy.scale_down_window_ns
        ):
            return
        # At most a quarter of the workers goes at a time, so that the effect shows before the next
        # step.
        least = self.wanted - max(1, self.wanted // 4)
        self._want(max(enough, least), f"{rate:.2g} sessions/s need no more", now)

    def _want(self, workers: int, reason: str, now: Nanoseconds) -> None:
        if workers > self.wanted and self._ordered_ns is None:
            self._ordered_ns = now
        elif workers < self.wanted:
            self._ordered_ns = None
        if workers != self.wanted:
            self._scaled_ns = now
        self.wanted, self.reason = workers, reason

    @staticmethod
    def _bounded(workers: int, statistics: WorkerStatistics) -> int:
        return max(statistics.least, min(statistics.most, workers))
