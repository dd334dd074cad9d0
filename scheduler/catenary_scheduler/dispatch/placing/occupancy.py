"""The sessions on a worker, and what they have saved so far, by running sums.

Sessions are folded in by small steps (`add`, `progressed`, `remove`); `look` updates what depends
on the moment, and only where something changed.

Three things are known here that the paper leaves out. Prompts that are in flight or being run have
not delayed anybody in the latest reports, yet they will: they are subtracted from what others have
saved. Sessions whose first token is not reported have saved nothing, so no other prompt is put
before their second token; only prompts that are placed within half a step of each other, and so run
in one pass, may join them. And what sessions save between two reports is counted, for a while.
"""

from __future__ import annotations

import math

from catenary_scheduler.dispatch.placing.jobs import Job, WorkerLimits
from catenary_services.domain.ids import Nanoseconds, RequestId
from catenary_services.domain.latency import LatencyLines

_HORIZON_NS = 150_000_000.0
"""The saving of a session since its last report is counted for this long at most."""
_SILENT_NS = 5_000_000_000
"""A session whose first token is not reported after this time generates without reports from its
gateway: it loads its worker, and its savings are not known."""


class RunningSequence:
    """A session on a worker, according to reports.

    Attributes:
        prompt_tokens: Tokens to be run first; for a restarted session this includes its answer so
            far.
        predicted_tokens: Predicted tokens of its answer from here on.
        generated_tokens: Tokens generated here, the first included; 0 until its prompt has run.
        carried_tokens: Tokens of its answer from sessions it lost.
        cached_tokens: Tokens of the prompt that the worker should have cached already.
        decode_ns: Time from the first token of the answer to the latest.
        per_token_ns: Its objective per token; 0: none.
        due_ns: Moment at which its first token is due; 0: none.
        placed_ns: Moment at which it was placed.
        began_ns: Moment at which its prompt had run.
        latest_ns: Moment at which it got its latest token.
        saved_ns: Time saved against its objective when all sessions of its worker were last looked
            at.
    """

    __slots__ = (
        "began_ns",
        "cached_tokens",
        "carried_tokens",
        "decode_ns",
        "due_ns",
        "generated_tokens",
        "is_new",
        "latest_ns",
        "per_token_ns",
        "placed_ns",
        "predicted_tokens",
        "prompt_tokens",
        "request",
        "saved_ns",
    )

    def __init__(
        self,
        request: RequestId,
        prompt_tokens: int,
        predicted_tokens: float,
        per_token_ns: Nanoseconds,
        due_ns: Nanoseconds,
        placed_ns: Nanoseconds,
    ) -> None:
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.predicted_tokens = predicted_tokens
        self.generated_tokens = 0
        self.carried_tokens = 0
        self.cached_tokens = 0
        self.decode_ns = 0.0
        self.is_new = True
        self.per_token_ns = per_token_ns
        self.due_ns = due_ns
        self.placed_ns = placed_ns
        self.began_ns: Nanoseconds = 0
        self.latest_ns: Nanoseconds = 0
        self.saved_ns = math.inf

    @property
    def final_tokens(self) -> float:
        """Length of its answer as placement counts it (R1)."""
        return max(self.predicted_tokens, float(self.generated_tokens))

    @property
    def unrun_tokens(self) -> int:
        """Number of tokens that are run before its first token here."""
        return self.prompt_tokens - self.cached_tokens

    def copied(self) -> RunningSequence:
        """Returns a copy for another worker."""
        running = RunningSequence(
            self.request,
            self.prompt_tokens,
            self.predicted_tokens,
            self.per_token_ns,
            self.due_ns,
            self.placed_ns,
        )
        running.generated_tokens, running.carried_tokens = (
            self.generated_tokens,
            self.carried_tokens,
        )
        running.cached_tokens = self.cached_tokens
        running.decode_ns, running.is_new = self.decode_ns, self.is_new
        running.began_ns, running.latest_ns = self.began_ns, self.latest_ns
        return running

    def job(self) -> Job:
        """Returns it in the form of the literal constraints."""
        return Job(
            self.prompt_tokens,
            self.predicted_tokens,
            self.generated_tokens,
            self.decode_ns,
            self.is_new,
        )


class Occupancy:
    """The sessions of one worker.

    Attributes:
        lines: Durations of passes and steps.
        limits: Capacity and gamma; the objectives are those of its sessions.
        running_sequences: The sessions by request.
        context_tokens: Weighted context, the left side of b.
        final_tokens: Sum of prompts and answers when all have ended.
        now_tokens: Tokens of prompts, and of answers so far.
        unrun_tokens: Tokens of the prompts that have not run, as far as is known.
        step_ns: Duration of a step with the present sessions.
        least_saved_ns: The least that any session has saved (d); infinity if none counts.
        tightest_ns: The least per-token objective; infinity if there is none.
        joining_tokens: Tokens of prompts that would run in one pass with one placed now.
        joining: Number of these prompts.
        gained_ns: Time that every session has saved since all were looked at.
        pending_ns: Time of all prompts that have not run, as far as is known.
        first_due_ns: Moment at which the first token of a joining prompt is due; 0 if there is
            none.
    """

    def __init__(self, lines: LatencyLines, limits: WorkerLimits) -> None:
        self.lines = lines
        self.limits = limits
        self.running_sequences: dict[RequestId, RunningSequence] = {}
        self.context_tokens = 0.0
        self.final_tokens = 0.0
        self.now_tokens = 0
        self.unrun_tokens = 0
        self.step_ns = 0.0
        self.least_saved_ns = math.inf
        self.tightest_ns = math.inf
        self.joining_tokens = 0
        self.joining = 0
        self.pending_ns = 0.0
        self.gained_ns = 0.0
        self.first_due_ns: Nanoseconds = 0
        self._late = 0
        self._late_ns = 0.0
        """The part of `pending_ns` of prompts that cannot be joined any more."""
        self._began_ns: Nanoseconds = 0
        """Moment at which the latest prompt had run."""
        self._joined_ns: Nanoseconds = 0
        """Moment at which the first of the joining prompts was placed."""
        self._window_ns = 0.0
        """Time for which a placed prompt can be joined."""
        self._looked_ns: Nanoseconds = 0
        self._full_ns: Nanoseconds = 0
        """Moment at which all sessions were last looked at."""
        self._stale = True

    # Sessions

    def add(self, running: RunningSequence) -> None:
        self.remove(running.request)
        self.running_sequences[running.request] = running
        self._count(running, 1)

    def remove(self, request: RequestId) -> RunningSequence | None:
        """Removes a session that is over or runs elsewhere; None if it is not here."""
        running = self.running_sequences.pop(request, None)
        if running is not None:
            self._count(running, -1)
        return running

    def progressed(
        self,
        running: RunningSequence,
        generated: int,
        decode_ns: float,
        latest: Nanoseconds,
        began: Nanoseconds,
    ) -> None:
        """Takes in the progress of a session.

        Args:
            running: Its running sequence on this worker.
            generated: Tokens of its whole answer.
            decode_ns: Time from the first token to the latest.
            latest: Moment of the latest token.
            began: Moment at which its prompt had run here.
        """
        here = generated - running.carried_tokens
        if here < 1 or (here <= running.generated_tokens and not running.is_new):
            return
        self._count(running, -1)
        if running.is_new:
            running.is_new = False
            running.began_ns = began
        running.generated_tokens = here
        running.decode_ns = decode_ns
        running.latest_ns = latest
        self._count(running, 1)

    def repredict(self, running: RunningSequence, predicted_tokens: float) -> None:
        """Takes a new prediction for a session that outgrew the last one (R11)."""
        self._count(running, -1)
        running.predicted_tokens = predicted_tokens
        self._count(running, 1)

    def adopt(self, lines: LatencyLines, limits: WorkerLimits) -> None:
        """Takes new latency lines or new limits."""
        self.lines = lines
        if limits.gamma != self.limits.gamma:
            self.context_tokens = sum(
                running.prompt_tokens + limits.gamma * running.final_tokens
                for running in self.running_sequences.values()
            )
        self.limits = limits
        self._stale = True

    def _count(self, running: RunningSequence, sign: int) -> None:
        final = running.final_tokens
        self.context_tokens += sign * (running.prompt_tokens + self.limits.gamma * final)
        self.final_tokens += sign * (running.prompt_tokens + math.ceil(final))
        self.now_tokens += sign * (running.prompt_tokens + running.generated_tokens)
        if running.is_new:
            self.unrun_tokens += sign * running.unrun_tokens
        self._stale = True
        if not self.running_sequences:
            self.context_tokens = self.final_tokens = 0.0
            self.now_tokens = self.unrun_tokens = 0

    # State at a moment

    def look(self, now: Nanoseconds) -> None:
        """Updates everything that decisions read."""
        if (
            self._stale
            or (self.joining and now - self._joined_ns > self._window_ns)
            or (self._late and now - self._full_ns > _SILENT_NS)
        ):
            self._look_at_all(now)
        elif now > self._looked_ns and self.least_saved_ns < math.inf and not self.pending_ns:
            # What sessions save without being reported, all at the same rate.
            spent = min(float(now - self._full_ns), _HORIZON_NS)
            gained = spent * self._gain()
            self.least_saved_ns += gained - self.gained_ns
            self.gained_ns = gained
            self._looked_ns = now

    def _gain(self) -> float:
        """Returns what a session saves in a nanosecond while all generate."""
        if self.step_ns <= 0.0 or self.tightest_ns == math.inf:
            return 0.0
        return self.tightest_ns / self.step_ns - 1.0

    def _look_at_all(self, now: Nanoseconds) -> None:
        self._sort_prompts(now)
        generating = len(self.running_sequences) - self.joining - self._late
        self.step_ns = self.lines.decode(max(1, generating), self.now_tokens)
        gain = self._gain()
        least = math.inf
        for running in self.running_sequences.values():
            if running.per_token_ns:
                running.saved_ns = self._saved(running, now, gain)
                least = min(least, running.saved_ns)
        self.least_saved_ns = least
        self.gained_ns = 0.0
        self._full_ns = self._looked_ns = now
        self._stale = False

    def _sort_prompts(self, now: Nanoseconds) -> None:
        """Separates prompts that one placed now would join from those that run before it."""
        late_tokens = self.joining = self.joining_tokens = self._late = 0
        self.first_due_ns = self._began_ns = 0
        self.tightest_ns = math.inf
        # If no session generates, a prompt runs at once; the decode half of a pair runs none.
        split = self.limits.split_decode
        self._window_ns = 0.0
        for running in self.running_sequences.values():
            if not running.is_new:
                self._window_ns = self.step_ns / 2
                break
        for running in self.running_sequences.values():
            if running.per_token_ns:
                self.tightest_ns = min(self.tightest_ns, float(running.per_token_ns))
            if split:
                continue
            if not running.is_new:
                self._began_ns = max(self._began_ns, running.began_ns)
            elif now - running.placed_ns <= self._window_ns:
                self._joined_ns = running.placed_ns if not self.joining else self._joined_ns
                self.joining += 1
                self.joining_tokens += running.unrun_tokens
                if running.due_ns and (not self.first_due_ns or running.due_ns < self.first_due_ns):
                    self.first_due_ns = running.due_ns
            elif now - running.placed_ns <= _SILENT_NS:
                self._late += 1
                late_tokens += running.unrun_tokens
        self._late_ns = self.lines.prefill(late_tokens) if self._late else 0.0
        self.pending_ns = self._late_ns
        if self.joining:
            self.pending_ns += self.lines.prefill(self.joining_tokens)

    def _saved(self, running: RunningSequence, now: Nanoseconds, gain: float) -> float:
        """Returns what a session has saved; a prompt that can be joined does not count (d)."""
        if self.limits.split_decode:
            return math.inf
        if running.is_new:
            waits = now - running.placed_ns
            return 0.0 if self._window_ns < waits <= _SILENT_NS else math.inf
        tokens = running.generated_tokens + running.carried_tokens - 1
        saved = running.per_token_ns * tokens - running.decode_ns
        since = running.latest_ns
        if since < self._began_ns:  # the prompts of others ran since its last report
            saved -= self._began_ns - since
            since = self._began_ns
        spent = min(max(0.0, now - since - self.pending_ns), _HORIZON_NS)
        return saved + spent * gain - self._late_ns
