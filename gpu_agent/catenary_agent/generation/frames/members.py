"""A filter for frames of sessions: only the members of a session's rings and its gateway may send.

The first frame of a session names them in its opening. From then on frames of all others are
refused, whatever openings they carry. For a session that moves, the members of both rings are
admitted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from catenary_protos.catenary.v1 import frame_pb2

_MOST_MOVES = 4_096
_Names = frozenset[str]
_Entry = frame_pb2.SessionRows | frame_pb2.SessionToken | frame_pb2.SessionCache


class FrameFilter:
    """Decides on the event loop whether a frame may reach the generation loop.

    Invariant: `_of` contains the sessions that are here, and `_moves` at most `_MOST_MOVES` others.
    """

    def __init__(self) -> None:
        self._of: dict[int, _Names] = {}
        self._moves: OrderedDict[int, _Names | None] = OrderedDict()
        """Further senders admitted for a session that moves, by its new id. None admits every
        peer."""

    def note(self, session_id: int, opening: frame_pb2.SessionOpening) -> None:
        """Remembers the members of a session that is here from now on."""
        if session_id not in self._of:
            self._of[session_id] = names_of(opening)

    def forget(self, session_id: int) -> None:
        """Forgets the members of a session that holds nothing here any more."""
        self._of.pop(session_id, None)
        self._moves.pop(session_id, None)

    def admits(self, entries: Iterable[_Entry], name: str) -> bool:
        """Returns True if a peer may speak of all the sessions that the entries belong to."""
        for entry in entries:
            names = self._of.get(entry.session_id)
            if names is not None and name in names:
                continue
            if entry.session_id in self._moves:
                movers = self._moves[entry.session_id]
                if movers is None or name in movers:
                    continue
                return False
            if names is not None:
                return False
            # The session is not known yet. Without an opening the generation loop ignores it.
            if entry.HasField("opening") and name not in names_of(entry.opening):
                return False
        return True

    def admits_cache(self, cache: frame_pb2.SessionCache, name: str) -> bool:
        """Returns True if a peer may send a part of a session's caches, or lend it as its own."""
        is_own = not cache.HasField("lent") or cache.lent.agent_id == name
        return is_own and self.admits((cache,), name)

    def admits_loan(self, loan: frame_pb2.CacheLoan, name: str) -> bool:
        """Returns True if a peer may say this of lent memory.

        Memory is offered by members of a session that is here. What others may answer is known to
        those who lend.
        """
        if loan.agent_id != name:
            return False
        if loan.step != frame_pb2.CacheLoan.STEP_OFFER:
            return True
        movers = self._moves.get(loan.session_id, frozenset())
        return movers is None or name in movers | self._of.get(loan.session_id, frozenset())

    def admits_move(self, move: frame_pb2.SessionMove, name: str) -> bool:
        """Returns True if a peer may take this step of a move, and notes who else may speak."""
        if move.agent_id and move.agent_id != name:
            return False
        new, old = move.session_id, move.moved_session_id
        known = [self._of[each] for each in (new, old) if each in self._of]
        if new in self._moves:
            movers = self._moves[new]
            known.append(frozenset((name,)) if movers is None else movers)
        if known and not any(name in names for names in known):
            return False
        if move.HasField("opening"):
            if move.step == frame_pb2.SessionMove.STEP_BEGIN and old in self._of:
                self._widen(new, self._of[old] | names_of(move.opening))
            elif move.step == frame_pb2.SessionMove.STEP_ROUND:
                # Older releases of the agent do not name the members of the old ring.
                old_ring = frozenset((name, *move.from_agent_ids))
                is_told = bool(move.from_agent_ids)
                self._widen(new, old_ring | names_of(move.opening) if is_told else None)
        return True

    def _widen(self, session_id: int, names: _Names | None) -> None:
        before = self._moves.get(session_id, frozenset())
        both = None if names is None or before is None else before | names
        self._moves[session_id] = both
        if len(self._moves) > _MOST_MOVES:
            self._moves.popitem(last=False)


def names_of(opening: frame_pb2.SessionOpening) -> _Names:
    """Returns the ids of the agents in a session's rings and of its gateway."""
    hops = (*opening.route, *opening.decode_route)
    return frozenset((opening.gateway_id, *(hop.agent_id for hop in hops)))
