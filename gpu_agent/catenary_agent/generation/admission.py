"""Checks of sessions before they begin here, and of their rows and tokens as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from catenary_agent.decoders.sampling.sampling import SessionSampler
from catenary_agent.engine.inbound.intake import not_loaded
from catenary_agent.generation.cache.cache_pushing import outlets_of
from catenary_agent.generation.drafts.drafter import Drafter
from catenary_agent.generation.state.incidents import incident
from catenary_agent.generation.state.session import PendingCache, Session
from catenary_agent.generation.state.states import (
    AWAITING_TOKEN,
    MIGRATING_IN,
    RECEIVING,
    WAITING,
)
from catenary_agent.kv import CacheReceiveProgress
from catenary_services.errors import CatenaryError, InvalidInput, Overloaded
from catenary_services.grpc.sampling_messages import sampling_of_message

if TYPE_CHECKING:
    from catenary_agent.decoders.base import DecoderExecutor
    from catenary_agent.generation.state.events import RowsArrived, SessionOpened
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_agent.generation.state.session import IncomingMigration, SessionSpec
    from catenary_agent.generation.state.states import SessionState
    from catenary_agent.kv import CacheSendProgress
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2


def try_admit(
    event: SessionOpened,
    batchers: Sequence[PartitionBatcher],
    incoming: IncomingMigration | None = None,
    *,
    shares: bool = False,
) -> Session | CatenaryError:
    """Returns a session that holds its block slots, or the error that prevents it."""
    try:
        return admit(event, batchers, incoming, shares=shares)
    except CatenaryError as error:
        return error
    except Exception:
        for batcher in batchers:
            batcher.executor.close_session(event.spec.session_id)
        return incident("the session could not be opened")


def admit(
    event: SessionOpened,
    batchers: Sequence[PartitionBatcher],
    incoming: IncomingMigration | None = None,
    *,
    shares: bool = False,
) -> Session:
    """Returns a session that holds its block slots.

    Args:
        event: The opening, as it arrived.
        batchers: The batchers of this agent.
        incoming: The live migration by which the session comes here; None if it is new.
        shares: Whether the session gets the caches of its prompt from another one that is here.

    Raises:
        PartitionLost: No batcher runs these blocks.
        Overloaded: Too few block slots are free, which the scheduler's book should have known.
        InvalidInput: The opening contradicts the model or itself.
    """
    spec, opening = event.spec, event.spec.opening
    batcher = _batcher_for(spec.own_hop, spec.own_hop.agent_id, batchers)
    executor, table = batcher.executor, batcher.executor.table
    limit = executor.layout.session_tokens
    tokens = list(opening.token_ids)
    if not 0 < opening.prompt_tokens <= len(tokens):
        raise InvalidInput("prompt_tokens", f"{opening.prompt_tokens} of {len(tokens)} tokens")
    if len(tokens) >= limit:
        raise InvalidInput("token_ids", f"{len(tokens)} tokens; a session has at most {limit}")
    if max(tokens) >= table.vocabulary_size:
        raise InvalidInput("token_ids", f"{max(tokens)} is not in the vocabulary")
    if opening.adapter and opening.adapter not in executor.adapters:
        raise InvalidInput("model", f"{batcher.key.model} has no adapter {opening.adapter!r} here")
    if spec.is_last != (spec.own_hop.last_block == table.blocks):
        raise InvalidInput("route", "does not end at the model's last block")
    room = _room(opening, limit)
    sampler = None
    if spec.is_last:
        parameters = sampling_of_message(opening.sampling)
        parameters.check_vocabulary(table.vocabulary_size)
        sampler = SessionSampler(parameters, tokens, opening.prompt_tokens, table.end_token_ids)
    executor.open_session(spec.session_id, spec.own_hop.first_block, room)
    if sampler is not None and sampler.parameters.grammar and batcher.masks is not None:
        sampler.mask = batcher.masks.begin(
            spec.session_id,
            sampler.parameters.grammar,
            tokens[opening.prompt_tokens :],
            sampler.parameters.min_tokens,
        )
    state, pending_cache = _first_state(spec, room, incoming, shares=shares)
    return Session(
        spec,
        batcher,
        room,
        event.arrived,
        state,
        tokens=tokens,
        drafter=_drafter_of(spec, executor),
        ring_takes_drafts=spec.is_last,
        sampler=sampler,
        opened_ns=event.arrived.received_ns,
        expected=len(tokens) if spec.side == "decode" else len(tokens) - 1 if shares else 0,
        pending_cache=pending_cache,
        incoming=incoming,
        cache_sends=_outlets_of(spec, room),
        introduced=incoming is not None,
        is_held=sampler is not None and sampler.mask is not None,
    )


def _drafter_of(spec: SessionSpec, executor: DecoderExecutor) -> Drafter | None:
    """Returns what guesses tokens of a session here; None if none can be guessed."""
    if not spec.is_first or spec.side == "prefill" or not executor.takes_drafts:
        return None
    return Drafter() if sampling_of_message(spec.opening.sampling).takes_drafts else None


def _first_state(
    spec: SessionSpec, room: int, incoming: IncomingMigration | None, *, shares: bool
) -> tuple[SessionState, PendingCache | None]:
    """Returns the first state of a session, and the caches that it must wait for.

    In the split phase, the hops that embed or sample tokens also wait for the first one.
    """
    own = spec.own_hop
    if spec.side == "decode":
        state = AWAITING_TOKEN if spec.is_first or spec.is_last else RECEIVING
        progress = CacheReceiveProgress(own.first_block, own.last_block, spec.history)
        return state, PendingCache(progress)
    if shares:
        progress = CacheReceiveProgress(own.first_block, own.last_block, spec.history - 1)
        return RECEIVING, PendingCache(progress, shared=spec.opening.shares_prompt_of)
    if incoming is None:
        return WAITING, None
    if incoming.by_tokens:
        return MIGRATING_IN, None
    progress = CacheReceiveProgress(own.first_block, own.last_block, room)
    return MIGRATING_IN, PendingCache(progress, incoming.leader)


def _outlets_of(spec: SessionSpec, room: int) -> tuple[CacheSendProgress, ...]:
    """Returns one cache send for each overlap with a hop of the decode ring.

    The result is empty without a decode ring, and if the session has room for only one more
    token: that token is sampled by the prefill ring, so nobody needs the caches.
    """
    if spec.side != "prefill" or room <= spec.history + 1:
        return ()
    return outlets_of(spec.session_id, spec.own_hop, spec.opening.decode_route)


def _room(opening: frame_pb2.SessionOpening, limit: int) -> int:
    """Returns the most tokens the session will have, prompt included."""
    if opening.sampling.max_tokens == 0:
        return limit
    whole = opening.prompt_tokens + opening.sampling.max_tokens
    if len(opening.token_ids) >= whole:
        raise InvalidInput("max_tokens", f"{opening.sampling.max_tokens} were generated already")
    return min(whole, limit)


def _batcher_for(
    hop: common_pb2.Hop, agent_id: str, batchers: Sequence[PartitionBatcher]
) -> PartitionBatcher:
    """Returns the batcher that runs a hop; of several, the one with the fewest blocks.

    Raises:
        PartitionLost: No batcher runs these blocks.
        Overloaded: None of those that do has enough free block slots.
    """
    fitting = [
        batcher
        for batcher in batchers
        if not batcher.retired
        and batcher.key.model == (hop.model, hop.model_version)
        and batcher.key.last_block == hop.last_block
        and hop.first_block in batcher.executor.layout.entry_blocks
    ]
    if not fitting:
        raise not_loaded(hop, agent_id)
    wanted = hop.last_block - hop.first_block
    free = [batcher for batcher in fitting if batcher.executor.free_block_slots >= wanted]
    if not free:
        have = max(batcher.executor.free_block_slots for batcher in fitting)
        raise Overloaded(f"{have} block slots are free on {agent_id}, {wanted} are needed")
    return max(free, key=lambda batcher: batcher.key.first_block)


def check_rows(session: Session, event: RowsArrived) -> None:
    """Checks hidden states that came from the previous hop.

    Raises:
        InvalidInput: They leave a gap, repeat a position, have another hidden size, are too many,
            or belong to guesses that this session cannot have.
    """
    position, rows = event.position, event.rows
    if not session.expected <= position <= session.expected + len(session.drafted):
        raise InvalidInput("position", f"{position}; {session.expected} comes next")
    if len(rows) == 0 or rows.shape[1] != session.batcher.executor.table.hidden_size:
        raise InvalidInput("payload", f"has the shape {list(rows.shape)}")
    if position + len(rows) > session.limit:
        raise InvalidInput("tokens", f"{position + len(rows)}; at most {session.limit} are kept")
    sampler = session.sampler
    if event.drafts.tokens and sampler is not None and not sampler.parameters.takes_drafts:
        raise InvalidInput("draft_token_ids", "the parameters of this session exclude guesses")


def check_token(session: Session, position: int, token_id: int) -> None:
    """Checks a token that came from the last hop.

    A further token of the same step may follow one that was guessed.

    Raises:
        InvalidInput: It leaves a gap, repeats a position, is unknown to the model or one too many.
    """
    expected = len(session.tokens)
    follows_guess = session.cached == expected - 1 and (
        session.tokens[-1:] == list(session.drafted[:1])
    )
    if position != expected or not (session.cached == expected or follows_guess):
        raise InvalidInput("position", f"{position}; {expected} comes next")
    if token_id >= session.batcher.executor.table.vocabulary_size:
        raise InvalidInput("token_id", f"{token_id} is not in the vocabulary")
    if position >= session.limit:
        raise InvalidInput("position", f"{position}; at most {session.limit} tokens are kept")
