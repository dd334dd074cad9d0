"""The effect of one more session on a worker: constraints b-e by a few additions.

`constraints` is the same to the letter, and a test compares the two. A prompt holds up the others
for a whole pass, unless prompts run in chunks, between which a step gives back part of it.
"""

from __future__ import annotations

import math

from catenary_scheduler.dispatch.placing.constraints import context_limit, kv_peak
from catenary_scheduler.dispatch.placing.jobs import Job
from catenary_scheduler.dispatch.placing.occupancy import Occupancy
from catenary_services.domain.ids import Nanoseconds

_LEAST_GAIN = 0.03
"""A worker that is slower than its objective is taken to catch up at this share of it, as sessions
end."""


class Worker(Occupancy):
    """One worker: a chain, or one half of a pair. `look` must have been called for the moment."""

    def stall_ns(self, prompt_tokens: int) -> float:
        """Returns how long a prompt, with those it joins, would hold up running sessions (c, d).

        With chunks there is a step after each, and what it takes less than the objective is saved.
        """
        if self.limits.split_decode:
            return 0.0
        tokens = self.joining_tokens + prompt_tokens
        chunk = self.lines.prefill_chunk_tokens
        if not chunk or tokens <= chunk:
            return self.lines.prefill(tokens)
        passes = -(-tokens // chunk)
        whole = (passes - 1) * self.lines.prefill(chunk)
        whole += self.lines.prefill(tokens - (passes - 1) * chunk)
        if self.tightest_ns == math.inf:
            return whole
        return max(
            self.lines.prefill(chunk),
            whole - (passes - 1) * max(0.0, self.tightest_ns - self.step_ns),
        )

    def may_join(self, prompt_tokens: int) -> bool:
        """True unless a prompt would hold up others right after their first token.

        With chunks, a session before it has that token after an earlier pass, and waits for the
        rest.
        """
        chunk = self.lines.prefill_chunk_tokens
        return not chunk or not self.joining or self.joining_tokens + prompt_tokens <= chunk

    def ready_ns(self, prompt_tokens: int) -> float:
        """Returns the time from now until the first token of a prompt.

        It is half a step until the next pass begins, the prompts before it, and its own passes.
        """
        if self.limits.split_decode:
            return 0.0
        wait, step = (self.step_ns / 2, self.step_ns) if self.running_sequences else (0.0, 0.0)
        return wait + self._late_ns + self.prompt_ns(self.joining_tokens + prompt_tokens, step)

    def prompt_ns(self, tokens: int, step_ns: float) -> float:
        """Returns the nanoseconds that a prompt takes; in chunks, with a step beside each."""
        chunk = self.lines.prefill_chunk_tokens
        if not chunk:
            return self.lines.prefill(tokens)
        passes = -(-tokens // chunk)
        last = self.lines.prefill(tokens - (passes - 1) * chunk)
        return (passes - 1) * self.lines.prefill(chunk) + last + passes * step_ns

    def planned_step_ns(self, prompt_tokens: int, predicted_tokens: float) -> float:
        """Returns the time of a step with one session more, at the weighted context (b)."""
        context = self.context_tokens + prompt_tokens + self.limits.gamma * predicted_tokens
        return self.lines.decode(len(self.running_sequences) + 1, context)

    def has_context(
        self,
        prompt_tokens: int,
        predicted_tokens: float,
        per_token_ns: Nanoseconds,
        theta: float,
        stall_share: float = 0.0,
    ) -> bool:
        """True if b holds with one session more, with steps in the time that prompts leave."""
        tightest = min(self.tightest_ns, float(per_token_ns) if per_token_ns else math.inf)
        if tightest == math.inf:
            return True
        tightest *= 1.0 - stall_share
        context = self.context_tokens + prompt_tokens + self.limits.gamma * predicted_tokens
        sessions = len(self.running_sequences) + 1
        if sessions == 1:
            return self.lines.decode(1, context) <= tightest
        return context <= theta * context_limit(self.lines, tightest, sessions)

    def has_cache(self, prompt_tokens: int, predicted_tokens: float) -> bool:
        """True if e holds with one session more.

        The final sizes together exceed what the sessions ever take at once, so the peak is computed
        only where they exceed the capacity.
        """
        capacity = self.limits.cache_capacity
        if capacity == math.inf:
            return True
        lines = self.lines
        tokens = self.final_tokens + prompt_tokens + math.ceil(predicted_tokens)
        sessions = len(self.running_sequences) + 1
        if lines.cache_token * tokens + lines.cache_session * sessions <= capacity:
            return True
        jobs = [running.job() for running in self.running_sequences.values()]
        return kv_peak(lines, [*jobs, Job(prompt_tokens, predicted_tokens)]) <= capacity

    def harm(self, stall_ns: float, margin_ns: float) -> float:
        """Returns how many more sessions will miss their objective if all are held up.

        A session that falls behind catches up by the time that a step leaves over. It is harmed if
        it ends before that; an answer ends at every token with the same probability, one over what
        is left of it.
        """
        if self.tightest_ns == math.inf:
            return 0.0
        gain = max(_LEAST_GAIN * self.tightest_ns, self.tightest_ns - self.step_ns)
        before = self.lines.prefill(self.joining_tokens) if self.joining else 0.0
        lost = 0.0
        for running in self.running_sequences.values():
            behind = stall_ns + margin_ns - self.gained_ns - running.saved_ns
            if behind > 0.0:
                left = max(1.0, running.final_tokens - running.generated_tokens) * gain
                lost += behind / (behind + left)
                behind += before - stall_ns
                if behind > 0.0 and before > 0.0:
                    lost -= behind / (behind + left)
        return lost
