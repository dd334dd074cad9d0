"""Caches of sessions that are over, or have read their prompts, for sessions that begin alike.

What a token's keys and values are depends on the tokens up to it, and on nothing else of its
session. So every agent keeps copies under digests of all tokens up to their end
(`domain.prefixes`), in the memory that its sessions leave over, and copies them into the slots of
a session that begins with the same tokens. They live as long as the executor that computed them.

A beginning counts only as far as all agents of a ring have it. The first agent opens the session at
the next one with the number of tokens that it has, this one passes on what both have, and so on
(`SessionOpening.prefix_tokens`). Whoever is last, or has nothing, tells the first agent, which
forgets what is too much and begins behind the rest. The position of the first rows tells the
others. An agent that does not answer costs a wait, one that lost everything the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from catenary_agent.generation.cache.cache_budget import room_for_kept
from catenary_agent.generation.state.events import PrefixOut
from catenary_agent.generation.state.incidents import incident
from catenary_agent.generation.state.stall_timer import StallTimer
from catenary_agent.kv import CacheSpan
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS, extend_digests

if TYPE_CHECKING:
    from catenary_agent.generation.context import GenerationLimits
    from catenary_agent.generation.state.events import PrefixConfirmed
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_agent.kv.arrays import CacheArray
    from catenary_services.domain.ids import Nanoseconds

_ANSWER_NS = 2_000_000_000
"""The time after which a session reads all of its prompt, if agents do not say what they have. A
ring of intercontinental links takes a second."""


class PrefixCache:
    """Keeps the caches of beginnings, and lets sessions begin behind them.

    Invariant: each session that waits for the other agents of its ring has a timeout.
    """

    def __init__(
        self, sessions: SessionTable, limits: GenerationLimits, clock: Callable[[], Nanoseconds]
    ) -> None:
        """Keeps what `sessions` have cached, unless `limits` say that nothing is kept."""
        self._sessions = sessions
        self._is_on = limits.keeps_prefixes
        self._clock = clock
        self.stall_timer = StallTimer(_ANSWER_NS)
        self.ignored = 0
        """Number of answers that came late, twice or for no session."""
        if self._is_on:
            sessions.on_closing = self._closing

    # -- sessions that begin ---------------------------------------------------------------------

    def begin(self, session: Session) -> None:
        """Copies what was kept of a session's beginning into its slots, as it is opened."""
        spec = session.spec
        offered = spec.history if spec.is_first else spec.opening.prefix_tokens
        if not spec.is_first and not offered:
            return
        tokens = self._copy_in(session, offered)
        session.cached = session.expected = session.reused = tokens
        session.may_rewind = not spec.is_first and tokens > 0
        spec.opening.prefix_tokens = tokens
        if tokens and not spec.is_last:
            self._sessions.introduce(session, 0)
        elif not spec.is_first:
            self._sessions.out.prefixes.append(PrefixOut(spec, tokens))
        if spec.is_first:
            session.awaits_prefix = session.introduced
            if session.awaits_prefix:
                self.stall_timer.touch(spec.session_id, self._clock())
            else:
                self._count(session)

    def on_confirmed(self, event: PrefixConfirmed) -> None:
        """Begins a session behind the tokens that all agents of its ring have."""
        session = self._sessions.get(event.session_id)
        if session is None or not session.awaits_prefix:
            self.ignored += 1
            return
        self.stall_timer.drop(event.session_id)
        self._begin_at(session, event.tokens)

    def expire(self, now: Nanoseconds) -> None:
        """Has sessions read all of their prompts whose rings did not answer in time."""
        for session_id in self.stall_timer.lost(now):
            session = self._sessions.get(session_id)
            if session is not None and session.awaits_prefix:
                self._begin_at(session, 0)

    def _begin_at(self, session: Session, tokens: int) -> None:
        session.awaits_prefix = False
        session.rewind(tokens)
        self._count(session)
        self._sessions.resume(session)

    def _count(self, session: Session) -> None:
        asked = (session.batcher.key.model.name, session.spec.history, session.reused)
        self._sessions.out.asked.append(asked)

    def _copy_in(self, session: Session, most: int) -> int:
        """Returns how many tokens were copied into a session's slots: whole blocks, `most` at most.

        The last token is left to be computed, since the next one is chosen after it.
        """
        spec, batcher = session.spec, session.batcher
        session_id, executor, kept = spec.session_id, batcher.executor, batcher.kept
        if not kept.size or spec.opening.sampling.HasField("prompt_logprobs"):
            return 0
        self._digest(session, min(most, spec.history - 1) // PREFIX_BLOCK_TOKENS)
        digests = session.digests[: kept.known(session.digests)]
        tokens = len(digests) * PREFIX_BLOCK_TOKENS
        held = executor.cached_block_tokens + executor.block_tokens(session_id, tokens)
        if not digests or 0 < executor.layout.cache_tokens < held:
            return 0
        try:
            for block, rows in enumerate(kept.use(digests)):
                executor.import_cache(session_id, _span(session, block), rows)
        except Exception:
            # A device that cannot write fails the next step, and says why.
            incident("what was kept of its beginning could not be read", str(batcher.key))
            executor.truncate(session_id, 0)
            kept.clear()
            return 0
        session.kept_blocks = len(digests)
        kept.shrink(room_for_kept(batcher, {}))
        return tokens

    # -- what is kept ----------------------------------------------------------------------------

    def advanced(self, session: Session) -> None:
        """Keeps what a step has cached of a session's prompt."""
        if self._is_on:
            self._keep(session)

    def _closing(self, session: Session) -> None:
        """Keeps what a session has cached, whose memory is about to be free."""
        if not session.batcher.retired:
            self._keep(session, leaving=session.spec.session_id)

    def _keep(self, session: Session, leaving: int = 0) -> None:
        batcher = session.batcher
        executor, kept = batcher.executor, batcher.kept
        blocks = min(session.cached, len(session.tokens)) // PREFIX_BLOCK_TOKENS
        if not executor.exports_caches or session.spec.side != "mixed":
            return
        if blocks <= session.kept_blocks and not leaving:
            return
        room = room_for_kept(batcher, {}, leaving)
        size = PREFIX_BLOCK_TOKENS * (executor.key.last_block - session.spec.own_hop.first_block)
        if room < size * blocks:  # what would be dropped at once
            return
        self._digest(session, blocks)
        digests = session.digests[:blocks]
        missing = [n for n in range(blocks) if digests[n] not in kept]
        kept.use([each for each in digests if each in kept])
        kept.shrink(room - size * len(missing))
        try:
            for block, rows in zip(missing, self._rows(session, missing), strict=True):
                kept.keep(digests[block], rows, size)
        except Exception:
            incident("what it has cached could not be kept", str(batcher.key))
            kept.clear()
            return
        kept.use(digests)
        session.kept_blocks = blocks

    def _rows(self, session: Session, blocks: list[int]) -> list[CacheArray]:
        """Returns copies of the rows of a session's blocks."""
        executor, session_id = session.batcher.executor, session.spec.session_id
        exported = [executor.export_cache(session_id, _span(session, block)) for block in blocks]
        # Memory that a device can reach without a copy is scarce.
        return exported if executor.caches_on_host else [each.copy() for each in exported]

    def _digest(self, session: Session, blocks: int) -> None:
        """Computes the digests of a session's first blocks, as far as they are not known."""
        opening, own = session.spec.opening, session.spec.own_hop
        root = f"{opening.adapter} {own.first_block}".encode()
        extend_digests(session.digests, session.tokens, blocks, root)

    def validate(self) -> None:
        """Raises AssertionError unless every invariant holds."""
        for session in self._sessions:
            is_timed = session.spec.session_id in self.stall_timer
            assert is_timed or not session.awaits_prefix
            assert session.kept_blocks <= len(session.digests)
        for batcher in self._sessions.batchers:
            batcher.kept.validate()


def _span(session: Session, block: int) -> CacheSpan:
    own, token = session.spec.own_hop, block * PREFIX_BLOCK_TOKENS
    return CacheSpan(own.first_block, own.last_block, token, token + PREFIX_BLOCK_TOKENS)
