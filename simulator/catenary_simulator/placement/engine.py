"""A worker simulated iteration by iteration: continuous batching by its latency lines (eq. 2-3).

Whole prompts go first: a pass over all waiting prompts delays the sessions that generate. With
chunks, every step takes at most a chunk of prompt tokens beside the sessions that generate, and
prompts are read in the order of their arrival, as agents do whose requests have equal time.
Times are in picoseconds and coefficients are rounded to them, so that the time of many steps is one
sum of integers, exactly equal to adding the steps one by one.
"""

from __future__ import annotations

from collections import deque
from math import sqrt

from catenary_services.domain.ids import RequestId, SessionId
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS, KeptBlocks

PICOSECONDS = 1000
"""Number of picoseconds in a nanosecond."""
_WATERMARK = 0.01
"""Share of the cache that stays free when a session joins others, so that a preempted session does
not return only to be preempted again (vLLM's watermark)."""


class SimulatedSession:
    """A session on its way through a worker; times are in picoseconds.

    Attributes:
        generated: Tokens of the answer when it last joined the batch; the worker's steps since then
            add to them.
        first_ps: Time of its first token; -1 before.
        last_ps: Time of the latest token it had when it joined or left the batch.
        pending: Tokens still to be prefilled: of the prompt, and of the answer so far if it was
            preempted.
        worker: Index of its worker; -1 before it has one.
        blocks: Numbers of the whole blocks of its prompt and answer, equal in equal texts; empty if
            it shares nothing.
        reused: Tokens that its worker had cached when it began there.
    """

    def __init__(
        self, request: RequestId, prompt_tokens: int, answer_tokens: int, arrived_ps: int
    ) -> None:
        self.request = request
        self.session: SessionId | None = None
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = answer_tokens
        self.arrived_ps = arrived_ps
        self.generated = 0
        self.pending = prompt_tokens
        self.joined_steps = 0
        self.finish_step = 0
        self.first_ps = -1
        self.last_ps = -1
        self.worker = -1
        self.blocks: tuple[int, ...] = ()
        self.reused = 0
        self.reported = 0
        self.preemptions = 0
        self.is_over = False

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt and of the answer, as of the last join."""
        return self.prompt_tokens + self.generated


class SimulatedWorker:
    """A simulated worker that prefills prompts and generates.

    Args:
        index: Index of the worker.
        lines: The latency lines of passes and steps, and the cache that a token takes.
        cache_tokens: Capacity of the cache, M.
        split_decode: Whether sessions come with their first token from elsewhere (split phase).
    """

    def __init__(
        self, index: int, lines: LatencyLines, cache_tokens: float, split_decode: bool = False
    ) -> None:
        self.index = index
        self.split_decode = split_decode
        self.chunk_tokens = lines.prefill_chunk_tokens
        self.prefill_token_ps = round(lines.prefill_token_ns * PICOSECONDS)
        self.prefill_ps = round(lines.prefill_ns * PICOSECONDS)
        self.floor_ps = round(lines.prefill_floor_ns * PICOSECONDS)
        self.context_token_ps = round(lines.decode_context_token_ns * PICOSECONDS)
        self.session_ps = round(lines.decode_session_ns * PICOSECONDS)
        self.decode_ps = round(lines.decode_ns * PICOSECONDS)
        self.lone_ps = round(lines.decode_lone_ns * PICOSECONDS)
        self.cache_token = lines.cache_token
        self.cache_session = lines.cache_session
        self.capacity = cache_tokens
        self.waiting: deque[SimulatedSession] = deque()
        self.prefilling: deque[SimulatedSession] = deque()
        self.reserved_tokens = 0
        """Tokens of cache reserved for sessions whose prompts are being prefilled."""
        self.running: list[SimulatedSession] = []
        self.context_tokens = 0
        """Tokens in the caches of all sessions that generate."""
        self.steps = 0
        """Number of decode steps that are over."""
        self.last_step_ps = -1
        self.sessions = 0
        """Number of sessions at the worker that are not over."""
        self.kept: KeptBlocks[None] = KeptBlocks()
        """The blocks that sessions have cached, for others that begin alike; they take the cache
        that sessions leave."""
        self.busy_ps = 0
        self.preemptions = 0
        self.began_ps = 0
        self.ends_ps = -1
        """End of the present iteration; -1 while there is none."""
        self.announced_ps = -1
        """The value of `ends_ps` that the loop driving the worker has noted."""
        self.planned = 0
        """Number of decode steps until `ends_ps`."""
        self._parts: list[SimulatedSession] = []
        """The sessions whose prompts are being prefilled until `ends_ps`."""

    # From outside

    def can_ever_hold(self, session: SimulatedSession) -> bool:
        """Returns False if a session's cache alone exceeds the worker's capacity."""
        return self._cache(session.prompt_tokens + session.answer_tokens, 1) <= self.capacity

    def submit(self, session: SimulatedSession, now_ps: int) -> list[SimulatedSession]:
        """Adds a session from the next step on; `ends_ps` may change.

        Returns the sessions that are over at once: those that came with their only token.
        """
        over: list[SimulatedSession] = []
        session.worker = self.index
        self.sessions += 1
        self.waiting.append(session)
        if self.ends_ps < 0:
            self._plan(now_ps, over)
        elif self.planned > 1:
            elapsed = now_ps - self.began_ps
            steps = self._steps_within(elapsed)
            if steps == 0 or self._steps_ps(steps) < elapsed:
                steps += 1
            if steps < self.planned:
                self.planned = steps
                self.ends_ps = self.began_ps + self._steps_ps(steps)
        return over

    def boundary(self) -> list[SimulatedSession]:
        """Ends the present iteration, begins the next, and returns the sessions that are over."""
        now_ps = self.ends_ps
        self.busy_ps += now_ps - self.began_ps
        over: list[SimulatedSession] = []
        if self.planned:
            self.steps += self.planned
            self.context_tokens += self.planned * len(self.running)
            self.last_step_ps = now_ps
            self._take_finished(now_ps, over)
        for session in self._parts:
            if session.pending == 0:
                self._join(session, now_ps, over)
            else:  # the last one of the pass: its rest is read before those that came later
                self.prefilling.appendleft(session)
        self._parts.clear()
        self._plan(now_ps, over)
        return over

    def progress_at(self, now_ps: int) -> tuple[int, int]:
        """Returns the number of decode steps since the start, and the time of the last one."""
        if self.planned and self.ends_ps >= 0:
            steps = min(self.planned, self._steps_within(now_ps - self.began_ps))
            if steps and not self._parts:
                return self.steps + steps, self.began_ps + self._steps_ps(steps)
        return self.steps, self.last_step_ps

    def state_of(self, session: SimulatedSession, steps: int, last_step_ps: int) -> tuple[int, int]:
        """Returns a generating session's answer tokens, and the time of the latest.

        Args:
            session: A session in `running`.
            steps: The number of steps that `progress_at` returns.
            last_step_ps: The time that `progress_at` returns.
        """
        own = steps - session.joined_steps
        return session.generated + own, last_step_ps if own else session.last_ps

    # What happens next

    def _plan(self, now_ps: int, over: list[SimulatedSession]) -> None:
        self.began_ps = now_ps
        self.planned = 0
        self._admit(now_ps, over)
        duration = 0
        if self.prefilling:
            if self.chunk_tokens:
                self._make_room()
            duration = self._take_prompts()
            if self.chunk_tokens and self.running:
                self.planned = 1
                duration += self._steps_ps(1)
        elif self.running:
            room = self._make_room()
            first = min([session.finish_step for session in self.running])
            self.planned = min(first - self.steps, room)
            duration = self._steps_ps(self.planned)
        if self.kept.size:
            self.kept.shrink(self._left_tokens())
        busy = bool(self.planned or self._parts)
        self.ends_ps = now_ps + max(1, duration) if busy else -1

    def _admit(self, now_ps: int, over: list[SimulatedSession]) -> None:
        """Gives cache to waiting sessions in their order, as far as it goes."""
        waiting = self.waiting
        while waiting:
            session = waiting[0]
            need = session.tokens + 1
            held = self.context_tokens + self.reserved_tokens + need
            count = len(self.running) + len(self.prefilling) + 1
            least_free = _WATERMARK * self.capacity if count > 1 else 0.0
            if self._cache(held, count) + least_free > self.capacity:
                return
            waiting.popleft()
            if self._is_handed_over(session):
                session.pending = 0
                self._join(session, now_ps, over)
            else:
                session.reused = self._reuse(session)
                session.pending = session.tokens - session.reused
                self.reserved_tokens += need
                self.prefilling.append(session)

    def _take_prompts(self) -> int:
        """Takes the prompt tokens of the next pass; returns its duration (eq. 2)."""
        left = self.chunk_tokens or 1 << 60
        taken = 0
        while left > 0 and self.prefilling:
            session = self.prefilling.popleft()
            tokens = min(left, session.pending)
            session.pending -= tokens
            left -= tokens
            taken += tokens
            self._parts.append(session)
        if not taken:
            return 0
        return max(self.floor_ps, self.prefill_token_ps * taken + self.prefill_ps)

    def _join(self, session: SimulatedSession, now_ps: int, over: list[SimulatedSession]) -> None:
        """Adds a session to the batch, with one token more from its prefill or from elsewhere."""
        if self._is_handed_over(session):
            # Its first token was there when it came.
            session.first_ps = session.last_ps = session.arrived_ps
        else:
            self.reserved_tokens -= session.tokens + 1
            session.last_ps = now_ps
            if session.first_ps < 0:
                session.first_ps = now_ps
            self._keep(session, session.tokens)
        session.generated += 1
        session.joined_steps = self.steps
        session.finish_step = self.steps + session.answer_tokens - session.generated
        if session.generated == session.answer_tokens:
            session.is_over = True
            self.sessions -= 1
            over.append(session)
            return
        self.context_tokens += session.tokens
        self.running.append(session)

    def _is_handed_over(self, session: SimulatedSession) -> bool:
        return self.split_decode and session.first_ps < 0

    def _take_finished(self, now_ps: int, over: list[SimulatedSession]) -> None:
        staying: list[SimulatedSession] = []
        for session in self.running:
            if session.finish_step == self.steps:
                session.generated = session.answer_tokens
                session.last_ps = now_ps
                session.is_over = True
                self.context_tokens -= session.tokens
                # The last token of an answer is sampled, and never computed.
                self._keep(session, session.tokens - 1)
                self.sessions -= 1
                over.append(session)
            else:
                staying.append(session)
        if len(staying) < len(self.running):
            self.running = staying

    # Cache

    def _reuse(self, session: SimulatedSession) -> int:
        """Returns how many of a session's first tokens are cached; one is always computed."""
        most = (session.tokens - 1) // PREFIX_BLOCK_TOKENS
        blocks = session.blocks[: self.kept.known(session.blocks[:most])]
        self.kept.use(blocks)
        return len(blocks) * PREFIX_BLOCK_TOKENS

    def _keep(self, session: SimulatedSession, tokens: int) -> None:
        """Keeps the whole blocks of a session's first tokens, as far as there is room."""
        blocks = session.blocks[: tokens // PREFIX_BLOCK_TOKENS]
        for block in blocks:
            if block not in self.kept:
                self.kept.keep(block, None, PREFIX_BLOCK_TOKENS)
        self.kept.use(blocks)
        self.kept.shrink(self._left_tokens())

    def _left_tokens(self) -> int:
        """Returns for how many tokens sessions leave cache."""
        held = self._cache(
            self.context_tokens + self.reserved_tokens, len(self.running) + len(self.prefilling)
        )
        return max(0, int((self.capacity - held) / max(self.cache_token, 1e-9)))

    def _cache(self, tokens: int, sessions: int) -> float:
        return self.cache_token * tokens + self.cache_session * sessions

    def _room(self) -> int:
        """Returns for how many steps the running sessions have cache."""
        batch = len(self.running)
        held = self.context_tokens + self.reserved_tokens
        free = self.capacity - self._cache(held, batch + len(self.prefilling))
        if self.cache_token <= 0.0 or batch == 0 or free >= 1e15:
            return 1 << 60
        return int(free / (self.cache_token * batch))

    def _make_room(self) -> int:
        """Preempts the latest sessions until a step fits; returns the steps there is room for."""
        while True:
            room = self._room()
            if room >= 1 or (len(self.running) <= 1 and not self.prefilling):
                return max(1, room)
            if self.prefilling:
                session = self.prefilling.pop()
                self.reserved_tokens -= session.tokens + 1
            else:
                session = self.running.pop()
                self.context_tokens -= session.tokens + self.steps - session.joined_steps
                if self.steps > session.joined_steps:
                    session.generated += self.steps - session.joined_steps
                    session.last_ps = self.last_step_ps
            session.preemptions += 1
            self.preemptions += 1
            self.waiting.appendleft(session)

    # Steps of the batch as it is

    def _steps_ps(self, steps: int) -> int:
        """Returns the duration of `steps` steps; each adds the batch to the context (eq. 3)."""
        batch = len(self.running)
        if batch == 1 and self.lone_ps:
            return steps * self.lone_ps
        first = self.context_token_ps * self.context_tokens + self.session_ps * batch
        first += self.decode_ps
        return steps * first + self.context_token_ps * batch * (steps * (steps - 1) // 2)

    def _steps_within(self, elapsed_ps: int) -> int:
        """Returns how many whole steps fit into a time since `began_ps`."""
        step = self._steps_ps(1)
        batch = len(self.running)
        growth = 0 if batch == 1 and self.lone_ps else self.context_token_ps * batch
        if elapsed_ps < step:
            return 0
        if growth == 0:
            return elapsed_ps // max(1, step)
        base = step - growth / 2
        steps = int((sqrt(base * base + 2.0 * growth * elapsed_ps) - base) / growth)
        while self._steps_ps(steps) > elapsed_ps:
            steps -= 1
        while self._steps_ps(steps + 1) <= elapsed_ps:
            steps += 1
        return steps
