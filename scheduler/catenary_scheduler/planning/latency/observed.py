"""Cost of one partition on one agent, as measured at load and corrected by later reports.

Reports are sums over the steps of a second or so. Steps of a single session have a mean of their
own (t1), other steps follow the line of eq. 3, and chunks of prompts the line of eq. 2. The floor
of short chunks cannot be derived from sums, so it changes in proportion to the time of a whole
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from catenary_scheduler.planning.latency.errors import ErrorWindow
from catenary_scheduler.planning.latency.refit import LineRefit, RefitPolicy
from catenary_scheduler.planning.live.generation import GenerationCost

WORTH_TELLING = 0.03
"""Relative change of a typical step above which planners are told the new cost."""
_CHUNK_TOKENS = 64
"""Length of chunks that is assumed if an agent does not report it."""
_CONTEXT_TOKENS = 512
_SESSIONS = (2, 8)


@dataclass(frozen=True, slots=True)
class WorkTotals:
    """Sums over some steps, the values of a `catenary.v1.GenerationReport`.

    Times are in nanoseconds.
    """

    decode_steps: int = 0
    decode_rows: int = 0
    decode_context_tokens: int = 0
    decode_ns: int = 0
    prefill_chunks: int = 0
    prefill_tokens: int = 0
    prefill_ns: int = 0
    lone_steps: int = 0
    """Number of the decode steps that had one session. The next two fields are sums over these
    steps."""
    lone_context_tokens: int = 0
    lone_ns: int = 0

    @property
    def shared(self) -> tuple[int, int, int]:
        """Context tokens, rows and steps without the lone steps: the regressors of eq. 3."""
        return (
            self.decode_context_tokens - self.lone_context_tokens,
            self.decode_rows - self.lone_steps,
            self.decode_steps - self.lone_steps,
        )


class ObservedCost:
    """A cost of one partition on one agent that follows reports.

    Attributes:
        measured: Cost as measured at load.
        prefill_errors: Errors for prompts, of the predictions before each report.
        decode_errors: Errors for decode steps.
        cache_errors: Errors for block slots in use, added by the owner of the slot ledger.
        shared: Refit of eq. 3: coefficients k2, c2, c3 on context tokens, rows, steps.
        prefill: Refit of eq. 2 per chunk: k1, c1 on tokens, chunks.
        lone: Refit of t1, on steps.
    """

    def __init__(
        self,
        measured: GenerationCost,
        policy: RefitPolicy | None = None,
        told: GenerationCost | None = None,
    ) -> None:
        """Starts with the measurement, or with what a predecessor made of it (`told`)."""
        self.measured = measured
        prior = told or measured
        self.prefill_errors = ErrorWindow()
        self.decode_errors = ErrorWindow()
        self.cache_errors = ErrorWindow()
        chunk = measured.prefill_chunk_tokens or _CHUNK_TOKENS
        self.prefill = LineRefit(
            (prior.prefill_token_ns, prior.prefill_ns), ((chunk, 1), (chunk / 8, 1)), policy
        )
        points = [(rows * depth, rows, 1) for rows in _SESSIONS for depth in (1, _CONTEXT_TOKENS)]
        self.shared = LineRefit(
            (prior.decode_context_token_ns, prior.decode_session_ns, prior.decode_ns),
            points,
            policy,
        )
        self.lone = LineRefit((prior.decode_lone_ns,), ((1,),), policy)
        self.cost = prior
        """Present cost, refitted by all reports so far."""
        self.told = prior
        """Cost that planners were last told."""

    def add(self, work: WorkTotals) -> None:
        """Adds a report. Values that no steps can have are ignored."""
        self._note_errors(work)
        if work.prefill_chunks > 0 and work.prefill_tokens > 0:
            regressors = (work.prefill_tokens, work.prefill_chunks)
            self.prefill.add(work.prefill_chunks, regressors, work.prefill_ns)
        context, rows, steps = work.shared
        if steps > 0 and rows >= 2 * steps and context >= 0:
            self.shared.add(steps, (context, rows, steps), work.decode_ns - work.lone_ns)
        self.lone.add(work.lone_steps, (work.lone_steps,), work.lone_ns)
        self.cost = self._refitted()

    def take_change(self) -> bool:
        """Returns True if the cost has changed notably since this last returned True."""
        if not moved(self.told, self.cost):
            return False
        self.told = self.cost
        return True

    def _note_errors(self, work: WorkTotals) -> None:
        if work.prefill_tokens > 0 and work.prefill_ns > 0:
            predicted = self.cost.prefill(work.prefill_tokens, work.prefill_chunks)
            self.prefill_errors.add(work.prefill_ns, predicted)
        if work.decode_steps > 0 and work.decode_ns > 0:
            self.decode_errors.add(work.decode_ns, _decode_ns(self.cost, work))

    def _refitted(self) -> GenerationCost:
        k1, c1 = (float(each) for each in self.prefill.coefficients)
        k2, c2, c3 = (float(each) for each in self.shared.coefficients)
        cost = replace(
            self.measured,
            prefill_ns=round(c1),
            prefill_token_ns=round(k1),
            decode_ns=round(c3),
            decode_session_ns=round(c2),
            decode_context_token_ns=k2,
            decode_lone_ns=round(float(self.lone.coefficients[0])),
            prefill_floor_ns=0,
        )
        chunk = self.measured.prefill_chunk_tokens or _CHUNK_TOKENS
        before = replace(self.measured, prefill_floor_ns=0).prefill(chunk)
        pace = cost.prefill(chunk) / before if before > 0 else 1.0
        return replace(cost, prefill_floor_ns=round(self.measured.prefill_floor_ns * pace))


def expected_work_ns(cost: GenerationCost, work: WorkTotals) -> float:
    """Returns the nanoseconds that a cost predicts for the work of a report."""
    prompts_ns = cost.prefill(work.prefill_tokens, work.prefill_chunks)
    return _decode_ns(cost, work) + (prompts_ns if work.prefill_tokens > 0 else 0.0)


def _decode_ns(cost: GenerationCost, work: WorkTotals) -> float:
    context, rows, steps = work.shared
    line_ns = (
        steps * cost.decode_ns
        + rows * cost.decode_session_ns
        + context * cost.decode_context_token_ns
    )
    lone_ns = cost.decode(1, work.lone_context_tokens / max(1, work.lone_steps))
    return line_ns + work.lone_steps * lone_ns


def moved(before: GenerationCost, now: GenerationCost, ratio: float = WORTH_TELLING) -> bool:
    """Returns True if a typical step takes more than `ratio` longer or shorter than it did.

    Steps are compared rather than coefficients, because two coefficients may change in opposite
    ways without any effect.
    """
    chunk = before.prefill_chunk_tokens or _CHUNK_TOKENS
    pairs = [
        (before.prefill(tokens), now.prefill(tokens)) for tokens in (max(1, chunk // 8), chunk)
    ]
    pairs += [
        (before.decode(rows, rows * _CONTEXT_TOKENS), now.decode(rows, rows * _CONTEXT_TOKENS))
        for rows in (1, *_SESSIONS)
    ]
    return any(abs(new - old) > ratio * old for old, new in pairs)
