"""Load that a chain sustains within its objectives, and the times its sessions see (eq. 6, live).

In the steady state a chain that begins r sessions a time spends a share r * p of it on prompts (p:
one prefill) and the rest on decode steps of s * b + c3 for b sessions (s = k2 * l + c2, l their
mean context). A session generates n further tokens, each of which takes T, so by Little's law

    T (1 - r p) = s b + c3,   b = r n T     hence     T = c3 / (1 - r (p + s n))

A prompt waits for those before it as in a queue of fixed services, and for one decode step per
chunk. All of it grows with r, so the largest r that keeps the objectives and the slots is found by
halving. Without prompts, and with the whole objective allowed, r * n is the throughput of eq. 6: b
sessions by the caches, or by the objective, over their step.

These are means: no queue of sessions and no spread of lengths is in them, which is why only a
share of every limit is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import ChainRole

USED_SHARE = 0.9
"""Share of objectives and slots that means may use; the rest is for what differs from the mean."""
_HALVINGS = 50
_ANY = TokenObjectives()


class LoadLimit(StrEnum):
    """The limit that keeps a chain from sustaining more sessions."""

    FIRST_TOKEN = "the objective for the first token"
    PER_TOKEN = "the objective for each further token"
    SLOTS = "the sessions that its caches hold"
    COMPUTE = "the computing time of its agents"


@dataclass(frozen=True, slots=True)
class ChainWork:
    """Work of a mean session on one chain, in nanoseconds, and the sessions it has room for."""

    prompt_ns: float
    """One prefill, p; 0 on a chain that only generates."""
    steps: float
    """Decode steps n of a session; 0 on a chain that only runs prompts."""
    session_ns: float
    """Part of a step that every session adds, s."""
    step_ns: float
    """Part of a step that does not depend on the sessions, c3."""
    lone_ns: float
    """A step of one session."""
    slots: float
    chunks: float = 1.0
    """Number of chunks of a prompt, each of which waits for one step."""

    def waiting(self, handover_ns: float) -> ChainWork:
        """Returns the work of sessions that wait once, for their caches, before they generate."""
        if not self.steps:
            return self
        each_ns = handover_ns / self.steps
        return replace(self, step_ns=self.step_ns + each_ns, lone_ns=self.lone_ns + each_ns)

    def per_token_ns(self, rate: float) -> float:
        """Returns T at `rate` sessions a nanosecond; infinite if they come faster than they go."""
        if not self.steps:
            return 0.0
        left = 1.0 - rate * (self.prompt_ns + self.session_ns * self.steps)
        return max(self.lone_ns, self.step_ns / left) if left > 0.0 else math.inf

    def first_token_ns(self, rate: float) -> float:
        """Returns the time from arrival to the first token, or to the caches on a decode chain."""
        busy = rate * self.prompt_ns
        if busy >= 1.0:
            return math.inf
        queued_ns = busy * self.prompt_ns / (2.0 * (1.0 - busy))
        token_ns = self.per_token_ns(rate)
        if math.isinf(token_ns):
            return math.inf
        if not self.prompt_ns:
            return 0.0
        generating = rate * self.steps * token_ns
        step_ns = self.session_ns * max(1.0, generating) + self.step_ns
        return self.prompt_ns + queued_ns + self.chunks * min(1.0, generating) * step_ns

    def sessions(self, rate: float) -> float:
        """Returns the mean number of sessions at a time."""
        longest_ns = self.steps * self.per_token_ns(rate) + self.first_token_ns(rate)
        return rate * longest_ns if rate else 0.0

    def exceeded(
        self, rate: float, objectives: TokenObjectives | None, share: float = USED_SHARE
    ) -> LoadLimit | None:
        """Returns the first limit that a rate exceeds; None if it keeps all of them."""
        wanted = objectives or _ANY
        first_ns, token_ns = self.first_token_ns(rate), self.per_token_ns(rate)
        if math.isinf(first_ns) or math.isinf(token_ns):
            return LoadLimit.COMPUTE
        # A step that a session takes alone cannot be shortened, so all of the objective is for it.
        if wanted.per_token_ns and token_ns > max(
            share * wanted.per_token_ns, min(self.lone_ns, wanted.per_token_ns)
        ):
            return LoadLimit.PER_TOKEN
        if wanted.first_token_ns and first_ns > max(
            share * wanted.first_token_ns, min(self.prompt_ns, wanted.first_token_ns)
        ):
            return LoadLimit.FIRST_TOKEN
        if self.sessions(rate) > share * self.slots:
            return LoadLimit.SLOTS
        return None

    def sustained(
        self, objectives: TokenObjectives | None, share: float = USED_SHARE
    ) -> tuple[float, LoadLimit]:
        """Returns the largest rate within all limits, in sessions a nanosecond, and what binds it.

        The rate is 0 if a session that is alone misses its objectives already.
        """
        at_once = self.exceeded(0.0, objectives, share)
        if at_once is not None:
            return 0.0, at_once
        work_ns = self.prompt_ns + self.session_ns * self.steps
        # As many sessions as there are slots, each as short as one that is alone: more is no rate.
        alone_ns = self.prompt_ns + self.steps * self.lone_ns
        least, most = (
            0.0,
            min(
                1.0 / work_ns if work_ns else math.inf,
                self.slots / alone_ns if alone_ns else math.inf,
            ),
        )
        if math.isinf(most) or not most:
            return 0.0, LoadLimit.SLOTS if not most else LoadLimit.COMPUTE
        limit = self.exceeded(most, objectives, share)
        if limit is None:
            return most, LoadLimit.COMPUTE
        for _ in range(_HALVINGS):
            middle = (least + most) / 2.0
            found = self.exceeded(middle, objectives, share)
            if found is None:
                least = middle
            else:
                most, limit = middle, found
        return least, limit


def chain_work(
    lines: LatencyLines,
    role: ChainRole,
    lengths: tuple[float, float],
    slots: float,
) -> ChainWork:
    """Returns the work of a mean session on a chain.

    Args:
        lines: Latency lines of the chain.
        role: Whether it runs prompts, generates, or does both.
        lengths: Mean tokens of prompts and of answers.
        slots: Sessions of mean length at a time.
    """
    prompt, answer = lengths
    steps = 0.0 if role == "prefill" else max(1.0 if role == "decode" else 0.0, answer - 1.0)
    session_ns = lines.decode_context_token_ns * (prompt + answer / 2.0) + lines.decode_session_ns
    chunk = lines.prefill_chunk_tokens
    return ChainWork(
        0.0 if role == "decode" else lines.prefill(prompt),
        steps,
        session_ns,
        lines.decode_ns,
        lines.decode_lone_ns or session_ns + lines.decode_ns,
        slots,
        math.ceil(prompt / chunk) if chunk else 1.0,
    )


def shared_rates(rates: Sequence[float], load: float) -> list[float]:
    """Returns the part of a load that each chain gets: in proportion to what it sustains."""
    whole = math.fsum(rates)
    if not whole:
        return [0.0] * len(rates)
    return [min(1.0, load / whole) * rate for rate in rates]
