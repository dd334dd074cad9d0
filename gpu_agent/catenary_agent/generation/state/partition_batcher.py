"""One partition of decoder blocks and the queue of sessions at it: iteration-level batching.

Every step includes all sessions that have one row to compute, whatever block they enter at. Beside
them it has at most one chunk of prompt tokens (chunked prefill, Agrawal et al., "Sarathi-Serve",
OSDI 2024), so that no prompt delays the others by more than a chunk. Prompts take turns.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from catenary_agent.generation.state.session import Session, SessionWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from catenary_agent.decoders.base import DecoderCost, DecoderExecutor
    from catenary_agent.executors.device import Device
    from catenary_services.domain.ids import PartitionKey

_CPU_CHUNK_TOKENS = 64
_GPU_CHUNK_TOKENS = 512
_SHORT_CHUNKS = 4
"""The number of parts a chunk is divided into beside decode rows, for a session without hurry."""
_SHORTEST_CHUNKS = 8
"""The number of parts any chunk is divided into while a moved stream is about to continue here."""
_FEWEST_TOKENS = 4
"""The most tokens that a step may take of a session that still generates elsewhere, even while
steps are short. With fewer, reading its tokens could be slower than generating them."""
_GENTLE_NS = 500_000_000
_PACE_SHARE = 0.05
"""The weight of the latest step in the exponential average `BatcherWork.pace`."""
_MOST_PACE = 8.0
"""A step that is slower or faster than expected by more than this factor counts as this factor: it
was probably interrupted."""


def chunk_tokens_for(device: Device) -> int:
    """Returns how many prompt tokens are a good chunk on a device.

    On a CPU, 256 tokens of SmolLM2-135M (float32, one thread) took 1000, 860, 747, 737 and 732 ms
    in chunks of 16, 32, 64, 128 and 256; a chunk of 64 took 196 ms. Beyond 64 a longer chunk gains
    nothing and only delays the sessions beside it.
    """
    return _CPU_CHUNK_TOKENS if device.kind == "cpu" else _GPU_CHUNK_TOKENS


class PartitionBatcher:
    """An executor and the queues of sessions in front of it.

    Invariant: a session is in at most one of the queues, at most once, and only while it is open
    and has pending tokens. Closed sessions are skipped when their turn comes.
    """

    def __init__(self, executor: DecoderExecutor, cost: DecoderCost | None = None) -> None:
        """Queues for `executor`; without its `cost`, the time of mixed steps is split by tokens."""
        self.executor = executor
        self.cost = cost
        self.retired = False
        """True if no session may begin here any more."""
        self.work_done = BatcherWork()
        self._gentle_until_ns = 0
        self._is_awaited = False
        """True if a stream that has moved here continues with the next step."""
        self._urgent: list[Session] = []
        self._decoding: list[Session] = []
        self._prefilling: deque[Session] = deque()
        # Only emulated executors let a session wait without computing it.
        self._waiting_ns: Callable[[int, int], int] | None = getattr(executor, "waiting_ns", None)
        self._waiting: list[tuple[int, int, Session]] = []
        """A heap of sessions in an emulated wait: the moment it ends, session id, session."""

    @property
    def key(self) -> PartitionKey:
        return self.executor.key

    @property
    def is_ready(self) -> bool:
        """True if a step has something to compute."""
        return bool(self._decoding or self._prefilling or self._urgent)

    @property
    def used_block_slots(self) -> int:
        """Number of block slots that sessions hold."""
        return self.executor.layout.block_slots - self.executor.free_block_slots

    def queue(self, session: Session, now_ns: int = 0) -> None:
        """Queues a session for the next step; it must not be queued already."""
        if self._waiting_ns is not None:
            wait_ns = self._waiting_ns(session.spec.session_id, session.pending)
            if wait_ns > 0:
                entry = (now_ns + wait_ns, session.spec.session_id, session)
                heapq.heappush(self._waiting, entry)
                return
        self._enqueue(session)

    def wake(self, now_ns: int) -> None:
        """Queues the sessions whose emulated wait is over."""
        while self._waiting and self._waiting[0][0] <= now_ns:
            session = heapq.heappop(self._waiting)[2]
            if not session.closed:
                self._enqueue(session)

    @property
    def next_wake_ns(self) -> int | None:
        """The moment at which `wake` has something to do; None if no session waits."""
        return self._waiting[0][0] if self._waiting else None

    def _enqueue(self, session: Session) -> None:
        if session.pending == 1:
            self._decoding.append(session)
        else:
            self._prefilling.append(session)

    def queue_first(self, session: Session, now_ns: int = 0) -> None:
        """Queues a session whose stream stands still until its few pending tokens are computed."""
        if session.pending == 1 or self._waiting_ns is not None:
            self.queue(session, now_ns)
        else:
            self._urgent.append(session)
        self._is_awaited = True

    def be_gentle(self, now_ns: int) -> None:
        """Keeps steps short for 0.5 s, because a stream is about to continue here."""
        self._gentle_until_ns = now_ns + _GENTLE_NS

    def compose(self, chunk_tokens: int, now_ns: int = 0) -> tuple[list[SessionWork], int]:
        """Takes the work of the next step out of the queues.

        Args:
            chunk_tokens: The most prompt tokens in one step. Fewer are taken while a stream is
                about to continue here, and none beside decode rows in the step in which it does.
                Beside decode rows, fewer are also taken of sessions that still generate elsewhere:
                they are in no hurry.
            now_ns: The present moment.

        Returns:
            The work with decode rows first, and the number of decode rows.
        """
        works = [session.take(1) for session in self._decoding if not session.closed]
        self._decoding.clear()
        decode_rows = len(works)
        works += [each.take(chunk_tokens) for each in self._urgent if not each.closed]
        self._urgent.clear()
        is_gentle = now_ns < self._gentle_until_ns
        left = max(1, chunk_tokens // _SHORTEST_CHUNKS) if is_gentle else chunk_tokens
        spare = max(1, chunk_tokens // _SHORT_CHUNKS) if works else chunk_tokens
        if is_gentle:
            spare = min(spare, max(left, _FEWEST_TOKENS))
        if works and self._is_awaited:
            left = spare = 0
        self._is_awaited = False
        passed_over: list[Session] = []
        while max(left, spare) > 0 and self._prefilling:
            session = self._prefilling.popleft()
            if session.closed:
                continue
            most = spare if session.incoming is not None else left
            if most <= 0:
                passed_over.append(session)
                continue
            work = session.take(most)
            left -= len(work.inputs)
            spare -= len(work.inputs)
            works.append(work)
        self._prefilling.extendleft(reversed(passed_over))
        return works, decode_rows


class BatcherWork:
    """The work of a batcher since its last report; see `catenary.v1.GenerationReport`."""

    __slots__ = (
        "decode_context_tokens",
        "decode_ns",
        "decode_rows",
        "decode_steps",
        "lone_context_tokens",
        "lone_ns",
        "lone_steps",
        "pace",
        "prefill_chunks",
        "prefill_ns",
        "prefill_tokens",
        "since_ns",
    )

    def __init__(self, pace: float = 1.0) -> None:
        self.since_ns = 0
        """The end of the first step counted; 0 if there was none."""
        self.pace = pace
        """Average ratio of measured to expected time of recent decode steps: how slow the device
        is."""
        self.decode_steps = 0
        self.decode_rows = 0
        self.decode_context_tokens = 0
        self.decode_ns = 0
        self.lone_steps = 0
        self.lone_context_tokens = 0
        self.lone_ns = 0
        self.prefill_chunks = 0
        self.prefill_tokens = 0
        self.prefill_ns = 0

    def add(
        self,
        works: list[SessionWork],
        decode_rows: int,
        times: tuple[int, int],
        cost: DecoderCost | None,
    ) -> int:
        """Counts a step that ran from `times[0]` to `times[1]`; returns its prompt tokens.

        The time of a step with both kinds of work is split. Decode rows are charged what a step of
        their own takes by `cost`, at the pace of recent steps of decode rows only; prompt tokens
        are charged the rest.
        """
        started_ns, ended_ns = times
        duration_ns = ended_ns - started_ns
        prefill_tokens = sum(len(work.inputs) for work in works[decode_rows:])
        context = sum(work.session.cached for work in works[:decode_rows])
        decode_ns = duration_ns if decode_rows else 0
        if decode_rows and prefill_tokens and cost is None:
            decode_ns = duration_ns * decode_rows // (decode_rows + prefill_tokens)
        elif decode_rows and cost is not None:
            alone_ns = cost.decode(decode_rows, context)
            if prefill_tokens:
                decode_ns = min(duration_ns, round(alone_ns * self.pace))
            elif alone_ns > 0:
                pace = min(_MOST_PACE, max(1 / _MOST_PACE, duration_ns / alone_ns))
                self.pace += _PACE_SHARE * (pace - self.pace)
        self.since_ns = self.since_ns or ended_ns
        self.decode_steps += decode_rows > 0
        self.decode_rows += decode_rows
        self.decode_context_tokens += context
        self.decode_ns += decode_ns
        if decode_rows == 1:
            self.lone_steps += 1
            self.lone_context_tokens += context
            self.lone_ns += decode_ns
        self.prefill_chunks += len(works) - decode_rows
        self.prefill_tokens += prefill_tokens
        self.prefill_ns += duration_ns - decode_ns
        return prefill_tokens
