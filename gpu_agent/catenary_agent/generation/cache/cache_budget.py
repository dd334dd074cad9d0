"""The memory limit of key-value caches, where not all slots can be filled at the same time.

The scheduler keeps sessions from growing beyond what a partition holds: it moves some away, or lets
some wait. It hears of new tokens a moment late, so this agent has the last word. When memory runs
out, the youngest session on the partition fails with CACHE_FULL, and the scheduler starts it again
with its history, elsewhere or later. The oldest session always continues, so every session ends
eventually. Session ids grow with time, so all agents of a chain agree on which one is youngest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from catenary_services.errors import CacheFull

if TYPE_CHECKING:
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_agent.generation.state.sessions import SessionTable


def over_budget(
    sessions: SessionTable, batcher: PartitionBatcher, coming: Mapping[int, int]
) -> Iterator[tuple[int, CacheFull]]:
    """Yields the youngest sessions of a batcher until its caches hold what is about to be written.

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
        yield session_id, CacheFull(text)
        held -= sizes[session_id]
        if held <= budget:
            return


def room_for_kept(batcher: PartitionBatcher, coming: Mapping[int, int], leaving: int = 0) -> int:
    """Returns how many block tokens a batcher may keep of sessions that are over.

    Kept caches are in the memory of the host: there its sessions leave some over, or have none.

    Args:
        batcher: The batcher.
        coming: By session id, the number of tokens its cache is about to have.
        leaving: A session whose memory is about to be free; 0: none.
    """
    executor = batcher.executor
    if not executor.caches_on_host:
        return batcher.host_block_tokens
    held = executor.cached_block_tokens - executor.block_tokens(leaving)
    for session_id, tokens in coming.items():
        held += executor.block_tokens(session_id, tokens) - executor.block_tokens(session_id)
    return max(0, executor.layout.memory_tokens - held)


def relieve(sessions: SessionTable, batcher: PartitionBatcher, coming: Mapping[int, int]) -> None:
    """Makes room for what is about to be written: sessions fail only if nothing else is left.

    Caches of sessions that are over go first. The sessions that are `over_budget` fail.
    """
    if batcher.kept.size:
        batcher.kept.shrink(room_for_kept(batcher, coming))
    for session_id, error in over_budget(sessions, batcher, coming):
        sessions.fail(session_id, error)
