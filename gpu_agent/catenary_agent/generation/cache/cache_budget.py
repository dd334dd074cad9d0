"""The memory limit of key-value caches, where not all slots can be filled at the same time.

The scheduler keeps sessions from growing beyond what a partition holds: it moves some away, or lets
some wait. It hears of new tokens a moment late, so this agent has the last word. When memory runs
out, the youngest session on the partition fails with CACHE_FULL, and the scheduler starts it again
with its history, elsewhere or later. The oldest session always continues, so every session ends
eventually. Session ids grow with time, so all agents of a chain agree on which one is youngest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from catenary_services.errors import CacheFull

if TYPE_CHECKING:
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_agent.generation.state.session import SessionWork
    from catenary_agent.generation.state.sessions import SessionTable


def relieve(sessions: SessionTable, batcher: PartitionBatcher, coming: Mapping[int, int]) -> None:
    """Fails the youngest sessions of a batcher until its caches hold what is about to be written.

    At least one session is left: it may become as long as it was admitted for.

    Args:
        sessions: The sessions of this agent.
        batcher: The batcher whose cache memory is checked.
        coming: By session id, the number of tokens its cache is about to have.
    """
    budget, executor = batcher.executor.layout.cache_tokens, batcher.executor
    if not budget:
        return
    held = executor.cached_block_tokens
    for session_id, tokens in coming.items():
        held += executor.block_tokens(session_id, tokens) - executor.block_tokens(session_id)
    if held <= budget:
        return
    sizes = {
        session_id: size
        for session in sessions
        if session.batcher is batcher
        for session_id in (session.spec.session_id,)
        for size in (executor.block_tokens(session_id, coming.get(session_id, 0)),)
        if size
    }
    for session_id in sorted(sizes, reverse=True)[: len(sizes) - 1]:
        text = f"{batcher.key} has memory for {budget} block tokens, {held} are needed"
        sessions.fail(session_id, CacheFull(text))
        held -= sizes[session_id]
        if held <= budget:
            return


def affordable(
    sessions: SessionTable, batcher: PartitionBatcher, works: list[SessionWork], decode_rows: int
) -> tuple[list[SessionWork], int]:
    """Returns the part of a step that fits into memory, and the number of decode rows in it.

    The youngest sessions are failed until the others fit.
    """
    if not batcher.executor.layout.cache_tokens:
        return works, decode_rows
    coming = {
        work.session.spec.session_id: work.session.cached + len(work.inputs) for work in works
    }
    relieve(sessions, batcher, coming)
    if not any(work.session.closed for work in works):
        return works, decode_rows
    left = []
    for index, work in enumerate(works):
        if not work.session.closed:
            left.append(work)
            continue
        decode_rows -= index < decode_rows
        # These bytes are counted here, since `take` removed the rows from `chunks` already.
        if not work.session.spec.is_first:
            sessions.out.consumed_bytes += work.inputs.nbytes
    return left, decode_rows
