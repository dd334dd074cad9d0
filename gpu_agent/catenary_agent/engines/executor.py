"""A decoder executor of all blocks of a model that an engine computes.

Sessions and slots are counted as by every executor. A session's tokens are asked for once, when its
prompt is complete; from then on they come by themselves, ahead of the generation loop by no more
than the session has room for. The loop takes one at a time, so that deadlines, moves, the ends of
answers and the messages about them are those of all sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.cache.slot_book import BookedDecoder
from catenary_agent.decoders.sampling.gumbel import stream_of
from catenary_agent.engines.requests import EngineRequest
from catenary_agent.engines.streams import EnginePlaces, EngineStream
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import (
    CatenaryError,
    InternalError,
    InvalidInput,
    NotSupported,
    PlanInfeasible,
)

if TYPE_CHECKING:
    from asyncio import TimerHandle

    from catenary_agent.decoders.base import DecoderCost
    from catenary_agent.engines.child import EngineChild
    from catenary_agent.engines.client import EngineClient
    from catenary_agent.engines.requests import EngineProtocol, EngineTokens
    from catenary_agent.engines.rounds import EngineRounds
    from catenary_agent.generation.state.partition_batcher import QueuedSession
    from catenary_agent.kv.arrays import CacheArray
    from catenary_agent.kv.span import CacheSpan
    from catenary_services.domain.decoder import AllocatedSizes, DecoderTable
    from catenary_services.domain.ids import PartitionKey

ENGINE_CHUNK_TOKENS = 2_048
"""Prompt tokens that the generation loop hands on in one step, which takes it no time."""
_SEEDS = (1 << 63) - 1

_ROUND_S = 0.002
"""The longest that a token waits for those of other sessions in its round."""

TellAnswered = Callable[[Sequence[int], CatenaryError | None], None]
"""Tells the generation thread that tokens of sessions are here, or that none will come."""


class EngineExecutor(BookedDecoder):
    """Sessions of a model that an engine serves."""

    commits_on_use = True
    exports_caches = False
    takes_drafts = False

    def __init__(
        self,
        key: PartitionKey,
        table: DecoderTable,
        sizes: AllocatedSizes,
        layout: CacheLayout,
        engine: tuple[EngineChild, EngineClient, EngineProtocol, EngineRounds],
    ) -> None:
        """Serves sessions with an engine that is ready, and ends it when it is closed.

        Args:
            key: The partition: all blocks of the model.
            table: The sizes of the model.
            sizes: Its sizes in the form in which the engine holds it.
            layout: The layout of the caches for which the engine was started.
            engine: The process, what talks to it, the protocol, and the account of its steps.
        """
        super().__init__(key, table, layout)
        self.sizes = sizes
        self.tell: TellAnswered = lambda sessions, error: None
        self.child, self._client, self._protocol, self.rounds = engine
        self._places = EnginePlaces(self._protocol.places)
        self._largest = layout
        self._streams: dict[int, EngineStream] = {}
        self._reads: dict[int, EngineStream] = {}
        """The requests by which the engine reads the tokens of sessions that move here."""
        self._news: list[int] = []
        """The sessions whose tokens have come in this round, and were not told of yet; the client's
        thread alone has them."""
        self._telling: TimerHandle | None = None
        """The timer that tells of them if the round has not come whole by then."""
        self.parked: set[int] = set()
        """The sessions whose next token has not come; `EngineBatcher` adds to them."""

    @property
    def cost(self) -> DecoderCost | None:
        """The times that were measured when the engine had started."""
        return self.rounds.cost

    @property
    def memory_bytes(self) -> int:
        """The bytes of weights, and of caches that the engine has beyond the present layout."""
        has = self._largest.memory_tokens(commits_on_use=True)
        beyond = has - self.layout.memory_tokens(commits_on_use=True)
        weights = self.sizes.weight_bytes(self.key.first_block, self.key.last_block)
        return weights + self.sizes.slot_bytes(max(0, beyond))

    # -- what the batcher asks -------------------------------------------------------------------

    def has_next(self, session: QueuedSession) -> bool:
        """Returns True if a session's next token is here; else the engine is asked for it.

        What cannot be asked for is told like an answer that fails.
        """
        session_id = session.spec.session_id
        stream = self._streams.get(session_id)
        if stream is None:
            try:
                request = _request_of(session, self._places.take(session_id, session.tokens))
                body = self._protocol.body(request)
            except CatenaryError as error:
                self.tell((session_id,), error)
                return False
            stream = self._streams[session_id] = EngineStream(session_id, request)
            self._client.begin(stream, body, self)
        return bool(stream.tokens)

    def has_read(self, session: QueuedSession) -> bool:
        """Returns True once the engine has read the tokens of a session that moves here.

        Whatever it was asked then is in its prefix cache, so that the session goes on at once when
        it is handed over. It is asked once; what the old ring adds meanwhile is little.
        """
        session_id, known = session.spec.session_id, session.tokens
        stream = self._reads.get(session_id)
        if stream is None:
            opening, parameters = session.spec.opening, SamplingParameters()
            prompt, adapter = opening.prompt_tokens, opening.adapter
            place = self._places.take(session_id, known)
            request = EngineRequest(
                tuple(known), prompt, 1, parameters, 1, adapter=adapter, place=place
            )
            stream = self._reads[session_id] = EngineStream(session_id, request)
            self._client.begin(stream, self._protocol.body(request), self)
        return stream.is_over

    # -- what the client tells, on its thread ----------------------------------------------------

    def asked(self, stream: EngineStream) -> None:
        self.rounds.asked(stream)

    def came(self, stream: EngineStream, delta: EngineTokens, now_ns: int) -> None:
        # The tokens of a round come one by one, within a moment: together they are one step of the
        # generation loop, and one frame to each gateway.
        is_whole = self.rounds.came(stream, len(delta.token_ids), now_ns)
        self._news.append(stream.session)
        if is_whole:
            self._tell_news()
        elif self._telling is None:
            self._telling = self._client.later(_ROUND_S, self._tell_news)

    def over(self, stream: EngineStream, error: CatenaryError | None) -> None:
        self.rounds.over(stream)
        stream.error = error
        if stream.is_closed:
            return
        if stream is self._reads.get(stream.session):
            self.tell((stream.session,), None)  # read or not: it goes on by its own request
        elif error is not None:
            self._tell_news()  # what came before is taken first
            self.tell((stream.session,), error)

    def _tell_news(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if self._news:
            sessions, self._news = self._news, []
            self.tell(sessions, None)

    # -- DecoderExecutor -------------------------------------------------------------------------

    def open_session(self, session: int, entry_block: int, tokens: int = 0) -> None:
        self._book.open(session, entry_block, tokens)

    def close_session(self, session: int) -> None:
        self.parked.discard(session)
        self._places.leave(session)
        for streams in (self._streams, self._reads):
            stream = streams.pop(session, None)
            if stream is not None:
                self._client.abort(stream)
        self._book.close(session)

    def step(self, items: Sequence[StepItem]) -> list[np.ndarray | None]:
        """Takes a token of each session that wants one; see `DecoderExecutor.step`."""
        self._book.check(items)
        for item in items:
            if item.want not in ("token", "nothing"):
                raise InvalidInput("want", f"{item.want!r} does not come out of an engine")
            stream = self._streams.get(item.session)
            if item.want == "token" and (stream is None or not stream.tokens):
                raise InternalError("the engine's token was taken before it came")
        results = [self._taken(item) for item in items]
        for item in items:
            self._book.cached[item.session] += len(item.inputs)
        return results

    def export_cache(self, session: int, span: CacheSpan) -> CacheArray:
        """Refuses: what an engine has cached does not leave it."""
        raise NotSupported("an engine hands out no caches: the session can move by its tokens")

    def import_cache(self, session: int, span: CacheSpan, rows: CacheArray) -> None:
        """Refuses: an engine takes no caches over."""
        raise NotSupported("an engine takes no caches over: the session can move by its tokens")

    def prepare_layout(self, layout: CacheLayout) -> CacheLayout:
        """Returns a layout that is no larger than the one for which the engine was started.

        Raises:
            PlanInfeasible: It is larger; an engine has its caches from the beginning.
        """
        layout.check(self.key)
        largest = self._largest
        tokens = layout.memory_tokens(commits_on_use=True)
        if (
            layout.block_slots > largest.block_slots
            or layout.session_tokens > largest.session_tokens
            or tokens > largest.memory_tokens(commits_on_use=True)
        ):
            raise PlanInfeasible(
                f"the engine of {self.key} was started with less room than is asked for now"
                " (restart its agent, or deploy the model anew)"
            )
        return layout

    def apply_layout(self, prepared: CacheLayout) -> None:
        """Puts a layout into force: fewer sessions are admitted."""
        self._book.layout = prepared

    def close(self) -> None:
        """Ends the engine. Idempotent."""
        self.rounds.close()
        self._client.close()
        self.child.close()

    def fail(self, error: CatenaryError) -> None:
        """Tells every session that the engine is gone; on any thread."""
        self.tell([*list(self._streams), *list(self._reads)], error)

    def _taken(self, item: StepItem) -> np.ndarray | None:
        if item.want == "nothing":
            return None
        token, scored = self._streams[item.session].tokens.popleft()
        if item.scores is not None and item.scores.token_top is not None:
            item.scores.token = scored
        return np.array([token])


def _request_of(session: QueuedSession, place: int | None) -> EngineRequest:
    """Returns what an engine is to generate for a session from here on.

    Raises:
        InvalidInput: The answer has a grammar and was begun elsewhere: an engine would match it
            from its beginning.
    """
    sampler = session.sampler
    assert sampler is not None  # an engine computes all blocks, so it also samples
    parameters, tokens = sampler.parameters, session.tokens
    opening = session.spec.opening
    prompt = opening.prompt_tokens
    if parameters.grammar and len(tokens) > prompt:
        raise InvalidInput("grammar", "an answer that began elsewhere cannot go on in an engine")
    # The session's seed alone would give a session that goes on the noise of its beginning again.
    seed = stream_of(parameters.seed or 0, len(tokens)) & _SEEDS
    most = session.limit - len(tokens)
    return EngineRequest(
        tuple(tokens), prompt, most, parameters, seed, adapter=opening.adapter, place=place
    )
