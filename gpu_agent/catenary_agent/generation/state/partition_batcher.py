"""One partition of decoder blocks, the queues of sessions in front of it, and what it has computed.

The queues hold the ids of sessions only; `loop.step_plan` makes steps of them.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from catenary_services.domain.decoder import GPU_CHUNK_TOKENS
from catenary_services.domain.prefixes import KeptBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from catenary_agent.decoders.base import DecoderCost, DecoderExecutor
    from catenary_agent.decoders.sampling.grammar_masks import GrammarMasks
    from catenary_agent.decoders.sampling.sampling import SessionSampler
    from catenary_agent.executors.device import Device
    from catenary_agent.kv.arrays import CacheArray
    from catenary_protos.catenary.v1 import frame_pb2
    from catenary_services.domain.ids import Nanoseconds

_CPU_CHUNK_TOKENS = 64
PROMPT_PAUSE_NS = 80_000_000
"""The time for which a prompt may hold up the streams of a ring between two of their tokens: a
reader hardly notices it, and shorter chunks cost the prompt more (see `chunk_tokens_for`)."""
_GENTLE_NS = 500_000_000
_PACE_SHARE = 0.05
"""The weight of the latest step in the exponential average `BatcherWork.pace`."""
_MOST_PACE = 8.0
"""A step that is slower or faster than expected by more than this factor counts as this factor: it
was probably interrupted."""


LONGEST_PRECEDENCE_NS = 30_000_000_000
"""A prompt that may take longer is read as if it had to be answered after so many nanoseconds.
Otherwise those with shorter deadlines could go before it for as long as they keep coming."""


class PromptTurn(NamedTuple):
    """The place of a prompt in the order in which prompts are read: the least comes first.

    Prompts that take turns chunk by chunk all get their first token late, as if each of them had
    come last. Read one after the other, only the last one does.
    """

    due_ns: Nanoseconds
    """The deadline of the request, or `LONGEST_PRECEDENCE_NS` after the arrival if it is later."""
    opened_ns: Nanoseconds
    """The arrival of the opening at this agent."""
    rest_tokens: int
    """Number of tokens still to be read. It decides between choices of one request."""
    session_id: int


def chunk_tokens_for(device: Device) -> int:
    """Returns how many prompt tokens are a good chunk on a device.

    On a CPU, 256 tokens of SmolLM2-135M (float32, one thread) took 1000, 860, 747, 737 and 732 ms
    in chunks of 16, 32, 64, 128 and 256; a chunk of 64 took 196 ms. Beyond 64 a longer chunk gains
    nothing and only delays the sessions beside it.
    """
    return _CPU_CHUNK_TOKENS if device.kind == "cpu" else GPU_CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class StepDone:
    """The record of one computed step, for the metrics."""

    model: str
    decode_rows: int
    prefill_tokens: int
    duration_ns: int


class QueuedSpec(Protocol):
    """The part of a session's constant properties that batchers look at."""

    @property
    def session_id(self) -> int: ...

    @property
    def opening(self) -> frame_pb2.SessionOpening: ...


class QueuedSession(Protocol):
    """The part of a session that batchers look at."""

    @property
    def spec(self) -> QueuedSpec: ...

    @property
    def pending(self) -> int:
        """Number of known tokens that can be computed in one piece."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """The whole sequence as far as it is known."""
        ...

    @property
    def limit(self) -> int:
        """The most tokens it may have, prompt included."""
        ...

    @property
    def sampler(self) -> SessionSampler | None:
        """The sampler, where its tokens are chosen."""
        ...

    @property
    def incoming(self) -> object | None:
        """The origin of a session that moves here; None otherwise."""
        ...

    @property
    def turn(self) -> PromptTurn:
        """The place of its prompt among others."""
        ...


class PartitionBatcher:
    """An executor and the queues of sessions in front of it.

    Invariant: a session enters one of the queues with the state QUEUED, and is in it once. If it
    has another state when its turn comes, it is skipped.
    """

    def __init__(
        self,
        executor: DecoderExecutor,
        cost: DecoderCost | None = None,
        masks: GrammarMasks | None = None,
    ) -> None:
        """Queues for an executor.

        Args:
            executor: The executor.
            cost: Its measured cost; without it, the time of mixed steps is split by tokens.
            masks: What keeps answers to their grammars; None where no tokens are sampled, or
                emulated ones, which no grammar changes.
        """
        self.executor = executor
        self.key = executor.key
        self.cost = cost
        self.masks = masks
        self.retired = False
        """True if no session may begin here any more."""
        self.kept: KeptBlocks[CacheArray] = KeptBlocks()
        """The caches of sessions that are over, or have read their prompts, for others that begin
        alike."""
        self.host_block_tokens = 0
        """The most block tokens of them in host memory, where sessions have memory of their own."""
        self.work_done = BatcherWork()
        self.gentle_until_ns = 0
        self.is_awaited = False
        """True if a stream that has moved here continues with the next step."""
        self.urgent: list[int] = []
        self.decoding: list[int] = []
        self.prefilling: list[PromptTurn] = []
        """The prompts, in the order in which they are read."""
        # Only emulated executors let a session wait without computing it.
        self._waiting_ns: Callable[[int, int], int] | None = getattr(executor, "waiting_ns", None)
        self._waiting: list[tuple[Nanoseconds, int]] = []
        """A heap of sessions in an emulated wait: the moment it ends, session id."""

    @property
    def is_ready(self) -> bool:
        """True if a step has something to compute."""
        return bool(self.decoding or self.prefilling or self.urgent)

    @property
    def used_block_slots(self) -> int:
        """Number of block slots that sessions hold."""
        return self.executor.layout.block_slots - self.executor.free_block_slots

    @property
    def queued(self) -> list[int]:
        """The ids of the sessions in all queues and in emulated waits."""
        waiting = [session_id for _, session_id in self._waiting]
        prompts = [turn.session_id for turn in self.prefilling]
        return [*self.decoding, *self.urgent, *prompts, *waiting]

    def queue(self, session: QueuedSession, now_ns: Nanoseconds) -> None:
        """Queues a session, which has tokens to compute, for the next step."""
        if self._waiting_ns is not None:
            session_id = session.spec.session_id
            wait_ns = self._waiting_ns(session_id, session.pending)
            if wait_ns > 0:
                heapq.heappush(self._waiting, (now_ns + wait_ns, session_id))
                return
        self._line_up(session)

    def wake(self, session: QueuedSession) -> None:
        """Queues a session that need not wait any more."""
        self._line_up(session)

    def _line_up(self, session: QueuedSession) -> None:
        if session.pending == 1:
            self.decoding.append(session.spec.session_id)
        else:
            bisect.insort(self.prefilling, session.turn)

    def queue_first(self, session: QueuedSession, now_ns: Nanoseconds) -> None:
        """Queues a session whose stream stands still until its few pending tokens are computed."""
        if session.pending == 1 or self._waiting_ns is not None:
            self.queue(session, now_ns)
        else:
            self.urgent.append(session.spec.session_id)
        self.is_awaited = True

    def count(self, size: StepSize, times: tuple[int, int]) -> Sequence[StepDone]:
        """Counts a step that ran from `times[0]` to `times[1]`; returns what the metrics get."""
        prefill_tokens = self.work_done.add(size, times, self.cost)
        model, duration_ns = self.key.model.name, times[1] - times[0]
        return (StepDone(model, size.decode_rows, prefill_tokens, duration_ns),)

    def dequeue(self, decoding: int, urgent: int, prompts: Collection[PromptTurn]) -> None:
        """Takes sessions out of the queues: so many of the first two, and some prompts."""
        del self.decoding[:decoding], self.urgent[:urgent]
        if prompts:
            self.prefilling = [turn for turn in self.prefilling if turn not in prompts]
        self.is_awaited = False

    def woken(self, now_ns: Nanoseconds) -> Iterator[int]:
        """Removes and yields the sessions whose emulated wait is over."""
        while self._waiting and self._waiting[0][0] <= now_ns:
            yield heapq.heappop(self._waiting)[1]

    @property
    def next_wake_ns(self) -> Nanoseconds | None:
        """The moment at which `woken` yields a session; None if no session waits."""
        return self._waiting[0][0] if self._waiting else None

    def be_gentle(self, now_ns: Nanoseconds) -> None:
        """Keeps steps short for 0.5 s, because a stream is about to continue here."""
        self.gentle_until_ns = now_ns + _GENTLE_NS


class StepSize(NamedTuple):
    """The work of a step in numbers."""

    decode_rows: int
    context_tokens: int
    """Number of tokens that the sessions of the decode rows have cached, in total."""
    chunks: tuple[int, ...] = ()
    """Number of tokens of each prompt chunk."""

    def booked_ns(self, cost: DecoderCost | None) -> Nanoseconds:
        """Returns how long the step should take by the measured cost; 0 if there is none."""
        if cost is None:
            return 0
        expected = cost.decode(self.decode_rows, self.context_tokens) if self.decode_rows else 0.0
        for tokens in self.chunks:
            prompt_ns = cost.prefill_ns + tokens * cost.prefill_token_ns
            expected += max(cost.prefill_floor_ns, prompt_ns)
        return round(expected)


@dataclass(slots=True)
class BatcherWork:
    """The work of a batcher since its last report; see `catenary.v1.GenerationReport`."""

    pace: float = 1.0
    """Average ratio of measured to expected time of recent decode steps: how slow the device is."""
    since_ns: Nanoseconds = 0
    """The end of the first step counted; 0 if there was none."""
    decode_steps: int = 0
    decode_rows: int = 0
    decode_context_tokens: int = 0
    decode_ns: int = 0
    lone_steps: int = 0
    lone_context_tokens: int = 0
    lone_ns: int = 0
    prefill_chunks: int = 0
    prefill_tokens: int = 0
    prefill_ns: int = 0

    def add(self, size: StepSize, times: tuple[int, int], cost: DecoderCost | None) -> int:
        """Counts a step that ran from `times[0]` to `times[1]`; returns its prompt tokens.

        The time of a step with both kinds of work is split. Decode rows are charged what a step of
        their own takes by `cost`, at the pace of recent steps of decode rows only; prompt tokens
        are charged the rest.
        """
        started_ns, ended_ns = times
        duration_ns = ended_ns - started_ns
        decode_rows, context, chunks = size
        prefill_tokens = sum(chunks)
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
        self.prefill_chunks += len(chunks)
        self.prefill_tokens += prefill_tokens
        self.prefill_ns += duration_ns - decode_ns
        return prefill_tokens
