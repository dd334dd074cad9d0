"""Sessions that begin with the prompt of another session: its caches are copied, not computed.

Several answers to one prompt are sessions of their own, which the gateway opens one after the
other. Where all of a ring is that of the first one, the others wait at every agent until that has
cached the prompt but its last token, and take copies of its rows as they come. Each then computes
the last token, which is a decode row, and goes on by itself.

The first hop decides whether a session shares. It knows the other session, or forgets that there
was one to share with. It tells the next hops at once: if these were told with the session's first
rows, the other session could be over there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from catenary_agent.generation.state.incidents import incident
from catenary_agent.generation.state.states import CLOSED, LEAVING
from catenary_agent.kv import CacheSpan
from catenary_services.errors import CatenaryError, PartitionLost

if TYPE_CHECKING:
    from catenary_agent.generation.cache.cache_waiting import PendingCaches
    from catenary_agent.generation.state.session import Session, SessionSpec
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_agent.kv.arrays import CacheArray


class SharedPrompts:
    """The sessions that wait for the prompt of another session of this agent.

    Invariant: each of them is open, and so is the session whose prompt it shares.
    """

    def __init__(self, sessions: SessionTable, waiting: PendingCaches) -> None:
        """Watches the given sessions; `waiting` writes the rows into the slots of each."""
        self._sessions = sessions
        self._waiting = waiting
        self.readers: dict[int, list[Session]] = {}
        """The sessions that wait for the prompt of each session."""

    def source_of(self, spec: SessionSpec) -> Session | None:
        """Returns the session whose prompt a new one shares, or None: it reads its prompt itself.

        Raises:
            PartitionLost: The hops before share a prompt that is not here.
        """
        opening = spec.opening
        source = self._sessions.get(opening.shares_prompt_of)
        if source is not None and source.batcher.executor.exports_caches and _fits(spec, source):
            return source
        if not spec.is_first:
            raise PartitionLost("the session whose prompt it shares is not here")
        opening.ClearField("shares_prompt_of")
        return None

    def begin(self, session: Session, source: Session) -> None:
        """Lets a session that was opened wait for the prompt of another one."""
        self.readers.setdefault(source.spec.session_id, []).append(session)
        if source.introduced or source.spec.is_last:
            self._introduce(session)
        self._copy(source)

    def advanced(self, source: Session) -> None:
        """Copies what a step has cached of a session to those that share its prompt.

        It must be called before the session can end with the token of that step.
        """
        for session in self.readers.get(source.spec.session_id, ()):
            if not session.introduced:
                self._introduce(session)
        self._copy(source)

    def closed(self, session: Session) -> None:
        """Fails the sessions that still wait for the prompt of one that is over."""
        if session.pending_cache is not None and session.pending_cache.shared:
            self._drop(session, session.pending_cache.shared)
        for reader in self.readers.pop(session.spec.session_id, ()):
            lost = PartitionLost("the session whose prompt it shares is over")
            self._sessions.fail(reader.spec.session_id, lost)

    def validate(self) -> None:
        """Raises AssertionError unless all sessions that wait, wait for one that is open."""
        waiting = {
            (each.pending_cache.shared, each.spec.session_id)
            for each in self._sessions
            if each.pending_cache is not None and each.pending_cache.shared
        }
        known = {
            (source_id, reader.spec.session_id)
            for source_id, readers in self.readers.items()
            for reader in readers
        }
        assert waiting == known
        assert all(self._sessions.get(source_id) is not None for source_id in self.readers)

    def _introduce(self, session: Session) -> None:
        """Opens a session at the next agent, before it has rows."""
        if session.spec.is_last:
            session.introduced = True
        else:
            self._sessions.introduce(session, session.spec.opening.prompt_tokens - 1)

    def _copy(self, source: Session) -> None:
        hop = source.spec.own_hop
        exported: dict[tuple[int, int], CacheArray] = {}
        for session in list(self.readers.get(source.spec.session_id, ())):
            session_id, pending = session.spec.session_id, session.pending_cache
            if source.state is CLOSED or session.state is CLOSED or pending is None:
                continue  # memory was too small for all of them
            part = (pending.progress.come, min(source.cached, pending.progress.tokens))
            if part[0] >= part[1]:
                continue
            span = CacheSpan(hop.first_block, hop.last_block, *part)
            try:
                if part not in exported:
                    executor = source.batcher.executor
                    exported[part] = executor.export_cache(source.spec.session_id, span)
            except CatenaryError as error:
                self._sessions.fail(session_id, error)
                continue
            except Exception:
                what = "the prompt it shares could not be read"
                self._sessions.fail(session_id, incident(what, str(source.batcher.key)))
                continue
            self._waiting.take(session_id, span, exported[part])
            if session.pending_cache is None:
                self._drop(session, source.spec.session_id)

    def _drop(self, session: Session, source_id: int) -> None:
        readers = self.readers.get(source_id, [])
        if session in readers:
            readers.remove(session)
        if not readers:
            self.readers.pop(source_id, None)


def _fits(spec: SessionSpec, source: Session) -> bool:
    """Returns True if a new session can share the prompt of another one, here and behind."""
    mine, other = spec.opening, source.spec.opening
    if spec.side != "mixed" or source.spec.side != "mixed" or source.state is LEAVING:
        return False
    if source.incoming is not None or source.pending_cache is not None:
        return False
    tokens = list(mine.token_ids)
    if not 1 < mine.prompt_tokens == len(tokens) <= len(other.token_ids):
        return False
    return tokens == other.token_ids[: len(tokens)] and _blocks(spec) == _blocks(source.spec)


def _blocks(spec: SessionSpec) -> list[tuple[str, str, str, int, int]]:
    return [
        (hop.agent_id, hop.model, hop.model_version, hop.first_block, hop.last_block)
        for hop in spec.ring
    ]
