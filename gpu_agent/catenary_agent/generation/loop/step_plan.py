"""Planning of one step: iteration-level batching (Orca, OSDI 2022), without any side effect.

Every step includes all sessions that have one row to compute, whatever block they enter at. Beside
them it has at most one chunk of prompt tokens (chunked prefill, Agrawal et al., "Sarathi-Serve",
OSDI 2024), so that no prompt delays the others by more than a chunk, which is as long as the
partition's measured cost and the link to the next agent allow. Prompts are read one after the
other, in the order of their deadlines and then of their arrival (`PromptTurn`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from catenary_agent.decoders.base import FEWEST_CHUNK_TOKENS
from catenary_agent.generation.cache.cache_budget import over_budget
from catenary_agent.generation.frames.link_pace import FIRST_FRAME_BYTES, FRAME_NS
from catenary_agent.generation.state.partition_batcher import StepSize
from catenary_agent.generation.state.states import QUEUED

if TYPE_CHECKING:
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher, PromptTurn
    from catenary_agent.generation.state.session import Session, SessionWork
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_services.domain.ids import Nanoseconds
    from catenary_services.errors import CacheFull

_SHORT_CHUNKS = 4
"""The number of parts a chunk is divided into beside decode rows, for a session without hurry."""
_SHORTEST_CHUNKS = 8
"""The number of parts any chunk is divided into while a moved stream is about to continue here."""
_FEWEST_TOKENS = 4
"""The most tokens that a step may take of a session that still generates elsewhere, even while
steps are short. With fewer, reading its tokens could be slower than generating them."""
_SHORT_FRAMES = 25
"""The number of frames of rows that go with those of streams, which together are as long as a frame
that others may overtake: each occupies the link for a millisecond."""
_FEWEST_LINK_TOKENS = 8
"""The prompt tokens that a step takes however slow the link is: fewer would cost a device as much
as eight do."""
_NO_PROMPTS: Sequence[PromptTurn] = ()


class PromptLimits(NamedTuple):
    """The most prompt tokens in one step, by the device and by the link to the next agent."""

    chunk_tokens: int
    """The number that is a good chunk on the device."""
    link_bytes: Mapping[str, int] | None = None
    """See `GenerationLimits.link_bytes`."""
    number_bytes: int = 4
    """The bytes of one number in the rows on their way."""

    def bound(self, session: Session, tokens: int) -> int:
        """Returns how many of so many tokens of a session a step should take."""
        if self.link_bytes is None or session.spec.is_last:
            return tokens
        nbytes = self.link_bytes.get(session.spec.next_agent, FIRST_FRAME_BYTES)
        if not nbytes:
            return tokens
        return min(tokens, max(_FEWEST_LINK_TOKENS, nbytes // self._row_bytes(session)))

    def row_ns(self, session: Session) -> float:
        """Returns the time for which a row of a session occupies the link; 0 if that is unknown."""
        if self.link_bytes is None or session.spec.is_last:
            return 0.0
        nbytes = self.link_bytes.get(session.spec.next_agent, 0)
        return FRAME_NS * self._row_bytes(session) / nbytes if nbytes else 0.0

    def _row_bytes(self, session: Session) -> int:
        return self.number_bytes * session.batcher.executor.table.hidden_size

    def turn_of(self, session: Session, tokens: int) -> PromptTurn | None:
        """Returns the place of a session's rows among those of prompts for the next agent.

        None if they hardly occupy the link there, and go with the rows of streams: sessions that
        begin together then stay together.

        Args:
            session: The session.
            tokens: Number of its rows.
        """
        if self.link_bytes is None:
            return None
        most = self.link_bytes.get(session.spec.next_agent, FIRST_FRAME_BYTES)
        nbytes = tokens * self._row_bytes(session)
        is_long = _SHORT_FRAMES * nbytes > most
        return session.turn if most and (is_long or session.unsent) else None


class StepPlan(NamedTuple):
    """One step of one batcher."""

    batcher: PartitionBatcher
    made_ns: Nanoseconds
    works: list[SessionWork]
    """The parts of the sessions; decode rows come first."""
    size: StepSize
    """The same in numbers."""
    evicted: Mapping[int, CacheFull]
    """The sessions that must fail first, because memory is too small for them."""
    looked_at: tuple[int, int]
    """The numbers of decode rows and urgent sessions that leave their queues."""
    prompts: Sequence[PromptTurn]
    """The prompts that leave their queue."""

    def only(self, is_kept: Callable[[SessionWork], bool]) -> StepPlan:
        """Returns the same plan with fewer works."""
        rows = list(filter(is_kept, self.works[: self.size.decode_rows]))
        chunks = filter(is_kept, self.works[self.size.decode_rows :])
        return self._of([*rows, *chunks], len(rows))

    def parts(self) -> Iterator[StepPlan]:
        """Yields a plan of each of the works alone."""
        for number, work in enumerate(self.works):
            yield self._of([work], int(number < self.size.decode_rows))

    def _of(self, works: list[SessionWork], decode_rows: int) -> StepPlan:
        return self._replace(works=works, size=size_of(works, decode_rows))


def size_of(works: Sequence[SessionWork], decode_rows: int) -> StepSize:
    """Returns the work of a step in numbers."""
    if len(works) == decode_rows:
        return StepSize(decode_rows, sum([work.position for work in works]))
    context_tokens = sum([work.position for work in works[:decode_rows]])
    chunks = tuple([len(work.inputs) for work in works[decode_rows:]])
    return StepSize(decode_rows, context_tokens, chunks)


def plan_step(
    batcher: PartitionBatcher,
    sessions: SessionTable,
    limits: PromptLimits,
    now_ns: Nanoseconds,
    drafts_for: Callable[[Session, int], Sequence[int]],
) -> StepPlan:
    """Returns the next step of a batcher, and changes nothing.

    Args:
        batcher: The executor and its queues.
        sessions: The sessions of this agent.
        limits: The most prompt tokens in one step. Fewer are taken while a stream is about to
            continue here, and none beside decode rows in the step in which it does. Beside decode
            rows, fewer are also taken of sessions that still generate elsewhere: they are in no
            hurry.
        now_ns: The present moment.
        drafts_for: Returns the guesses that are computed with the newest token of a session, given
            with the number of sessions whose tokens are.
    """
    decoding = _queued(batcher.decoding, sessions)
    works = [session.work(1, drafts_for(session, len(decoding))) for session in decoding]
    decode_rows = len(works)
    if batcher.urgent:
        works += [each.work(limits.chunk_tokens) for each in _queued(batcher.urgent, sessions)]
    prompts = _NO_PROMPTS
    if batcher.prefilling:
        prompts = _add_prompts(works, batcher, sessions, limits, now_ns)
    leaving = (len(batcher.decoding), len(batcher.urgent))
    size = size_of(works, decode_rows)
    plan = StepPlan(batcher, now_ns, works, size, {}, leaving, prompts)
    if not batcher.executor.layout.cache_tokens:
        return plan
    coming = {work.session.spec.session_id: work.end for work in works}
    evicted = dict(over_budget(sessions, batcher, coming))
    fitting = plan.only(lambda work: work.session.spec.session_id not in evicted)
    return fitting._replace(evicted=evicted)


def _queued(queue: Iterable[int], sessions: SessionTable) -> list[Session]:
    """Returns each queued session that is still here."""
    get = sessions.get
    return [
        session
        for session_id in queue
        if (session := get(session_id)) is not None and session.state is QUEUED
    ]


def _add_prompts(
    works: list[SessionWork],
    batcher: PartitionBatcher,
    sessions: SessionTable,
    limits: PromptLimits,
    now_ns: Nanoseconds,
) -> Sequence[PromptTurn]:
    """Adds as many prompt tokens to a step as fit beside its works so far.

    Returns:
        The prompts that leave their queue.
    """
    chunk_tokens = limits.chunk_tokens
    is_gentle = now_ns < batcher.gentle_until_ns
    if works and batcher.cost is not None:
        fitting = batcher.cost.prefill_chunk_tokens or chunk_tokens
        guessed = sum([len(work.drafts.tokens) for work in works])
        least = min(fitting, FEWEST_CHUNK_TOKENS)
        chunk_tokens = min(chunk_tokens, max(least, fitting - guessed))
    left = max(1, chunk_tokens // _SHORTEST_CHUNKS) if is_gentle else chunk_tokens
    spare = max(1, chunk_tokens // _SHORT_CHUNKS) if works else chunk_tokens
    if is_gentle:
        spare = min(spare, max(left, _FEWEST_TOKENS))
    if works and batcher.is_awaited:
        left = spare = 0
    leaving: list[PromptTurn] = []
    for turn in batcher.prefilling:
        if max(left, spare) <= 0:
            break
        session = sessions.get(turn.session_id)
        if session is None or session.state is not QUEUED:
            leaving.append(turn)
            continue
        most = spare if session.incoming is not None else left
        if most <= 0:
            continue
        leaving.append(turn)
        work = session.work(limits.bound(session, most))
        left -= len(work.inputs)
        spare -= len(work.inputs)
        works.append(work)
    return leaving
