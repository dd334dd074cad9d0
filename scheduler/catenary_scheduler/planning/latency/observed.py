"""One partition on one agent: its cost as measured at load, and what it reported since.

Reports are sums over the steps of a second or so. Steps of a single session have a mean of their
own (t1), the others the line of eq. 3; chunks of prompts the line of eq. 2. The floor of short
chunks cannot be told from sums and moves with the time of a whole chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from catenary_scheduler.planning.latency.errors import ErrorWindow
from catenary_scheduler.planning.latency.refit import LineRefit, RefitPolicy
from catenary_scheduler.planning.live.generation import GenerationCost

WORTH_TELLING = 0.03
"""Costs that changed by more than this at a typical load are told to whoever plans with them."""
_CHUNK_TOKENS = 64
"""Where an agent does not say how long its chunks are."""
_CONTEXT_TOKENS = 512
_SESSIONS = (2, 8)


@dataclass(frozen=True, slots=True)
class WorkTotals:
    """Sums over some steps; `catenary.v1.GenerationReport` as values. Times in nanoseconds."""

    decode_steps: int = 0
    decode_rows: int = 0
    decode_context_tokens: int = 0
    decode_ns: int = 0
    prefill_chunks: int = 0
    prefill_tokens: int = 0
    prefill_ns: int = 0
    lone_steps: int = 0
    """Of the decode steps, as the next two."""
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
    """A cost that follows what is reported.

    Attributes:
        measured: At load.
        prefill_errors: Of prompts, by what was predicted before each report.
        decode_errors: Of decode steps.
        cache_errors: Of block slots in use; noted by whoever keeps the book of them.
        shared: Eq. 3 refitted: coefficients k2, c2, c3 on context tokens, rows, steps.
        prefill: Eq. 2 refitted, per chunk: k1, c1 on tokens, chunks.
        lone: t1 refitted, on steps.
    """

    def __init__(
        self,
        measured: GenerationCost,
        policy: RefitPolicy | None = None,
        told: GenerationCost | None = None,
    ) -> None:
        """Begins with what was measured, or with what a predecessor made of it (`told`)."""
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
        """By now."""
        self.told = prior
        """What others were told last."""

    def add(self, work: WorkTotals) -> None:
        """Takes a report in; what cannot be true of any steps is left out."""
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
        """Returns True if the cost moved notably since it last returned True."""
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
    """Returns how long the work of a report takes by a cost."""
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

    Steps are compared, not coefficients: two of these may trade places without any effect.
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
