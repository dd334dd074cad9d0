"""What a session must satisfy before it may begin here, and its rows and tokens to go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from catenary_agent.decoders.sampling.sampling import Sampler
from catenary_agent.engine.inbound.intake import not_loaded
from catenary_agent.generation.cache.cache_pushing import outlets_of
from catenary_agent.generation.state.incidents import incident
from catenary_agent.generation.state.session import Awaited, Session
from catenary_agent.kv import CacheIntake
from catenary_services.errors import CatenaryError, InvalidInput, Overloaded
from catenary_services.grpc.sampling_messages import sampling_of_message

if TYPE_CHECKING:
    from catenary_agent.generation.state.events import Opened
    from catenary_agent.generation.state.lane import Lane
    from catenary_agent.generation.state.session import Arriving, Facts, Hidden
    from catenary_agent.kv import CacheOutlet
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2


def try_admit(
    event: Opened, lanes: Sequence[Lane], arriving: Arriving | None = None
) -> Session | CatenaryError:
    """Returns a session that holds its block slots, or why there is none; see `admit`."""
    try:
        return admit(event, lanes, arriving)
    except CatenaryError as error:
        return error
    except Exception:
        for lane in lanes:
            lane.executor.close_session(event.facts.session_id)
        return incident("the session could not be opened")


def admit(event: Opened, lanes: Sequence[Lane], arriving: Arriving | None = None) -> Session:
    """Returns a session that holds its block slots.

    Args:
        event: What is known of it.
        lanes: Those of this agent.
        arriving: Where it comes from, if it moves here.

    Raises:
        PartitionLost: no lane runs these blocks.
        Overloaded: too few block slots are free, which the scheduler's book should have known.
        InvalidInput: the opening contradicts the model or itself.
    """
    facts, opening = event.facts, event.facts.opening
    lane = _lane_for(facts.own_hop, facts.own_hop.agent_id, lanes)
    executor, table = lane.executor, lane.executor.table
    limit = executor.layout.session_tokens
    tokens = list(opening.token_ids)
    if not 0 < opening.prompt_tokens <= len(tokens):
        raise InvalidInput("prompt_tokens", f"{opening.prompt_tokens} of {len(tokens)} tokens")
    if len(tokens) >= limit:
        raise InvalidInput("token_ids", f"{len(tokens)} tokens; a session has at most {limit}")
    if max(tokens) >= table.vocabulary_size:
        raise InvalidInput("token_ids", f"{max(tokens)} is not in the vocabulary")
    if facts.is_last != (facts.own_hop.last_block == table.blocks):
        raise InvalidInput("route", "does not end at the model's last block")
    room = _room(opening, limit)
    sampler = None
    if facts.is_last:
        parameters = sampling_of_message(opening.sampling)
        parameters.check_vocabulary(table.vocabulary_size)
        sampler = Sampler(parameters, tokens, opening.prompt_tokens, table.end_token_ids)
    executor.open_session(facts.session_id, facts.own_hop.first_block, room)
    return Session(
        facts,
        lane,
        room,
        event.arrived,
        tokens=tokens if facts.is_first else [],
        sampler=sampler,
        opened_ns=event.arrived.received_ns,
        expected=len(tokens) if facts.side == "decode" else 0,
        awaited=_awaited_of(facts, room, arriving),
        arriving=arriving,
        outlets=_outlets_of(facts, room),
        introduced=arriving is not None,
    )


def _awaited_of(facts: Facts, room: int, arriving: Arriving | None) -> Awaited | None:
    """Returns what a session waits for whose caches come from elsewhere."""
    own = facts.own_hop
    if facts.side == "decode":
        intake = CacheIntake(own.first_block, own.last_block, facts.history)
        return Awaited(intake, facts.is_first or facts.is_last)
    if arriving is None or arriving.by_tokens:
        return None
    intake = CacheIntake(own.first_block, own.last_block, room)
    return Awaited(intake, word=True, leader=arriving.leader)


def _outlets_of(facts: Facts, room: int) -> tuple[CacheOutlet, ...]:
    """Returns who gets the caches of a prompt; with room for one more token nobody needs them."""
    if facts.side != "prefill" or room <= facts.history + 1:
        return ()
    return outlets_of(facts.session_id, facts.own_hop, facts.opening.decode_route)


def _room(opening: frame_pb2.SessionOpening, limit: int) -> int:
    """Returns the most tokens the session will have."""
    if opening.sampling.max_tokens == 0:
        return limit
    whole = opening.prompt_tokens + opening.sampling.max_tokens
    if len(opening.token_ids) >= whole:
        raise InvalidInput("max_tokens", f"{opening.sampling.max_tokens} were generated already")
    return min(whole, limit)


def _lane_for(hop: common_pb2.Hop, agent_id: str, lanes: Sequence[Lane]) -> Lane:
    """Returns the lane that runs a hop: of several, the tightest that has room."""
    fitting = [
        lane
        for lane in lanes
        if not lane.retired
        and lane.key.model == (hop.model, hop.model_version)
        and lane.key.last_block == hop.last_block
        and hop.first_block in lane.executor.layout.entry_blocks
    ]
    if not fitting:
        raise not_loaded(hop, agent_id)
    wanted = hop.last_block - hop.first_block
    free = [lane for lane in fitting if lane.executor.free_block_slots >= wanted]
    if not free:
        have = max(lane.executor.free_block_slots for lane in fitting)
        raise Overloaded(f"{have} block slots are free on {agent_id}, {wanted} are needed")
    return max(free, key=lambda lane: lane.key.first_block)


def check_rows(session: Session, position: int, rows: Hidden) -> None:
    """Checks hidden states that came from the hop before.

    Raises:
        InvalidInput: a gap, a repetition, another hidden size, or too many tokens.
    """
    if position != session.expected:
        raise InvalidInput("position", f"{position}; {session.expected} comes next")
    if len(rows) == 0 or rows.shape[1] != session.lane.executor.table.hidden_size:
        raise InvalidInput("payload", f"has the shape {list(rows.shape)}")
    if position + len(rows) > session.limit:
        raise InvalidInput("tokens", f"{position + len(rows)}; at most {session.limit} are kept")


def check_token(session: Session, position: int, token_id: int) -> None:
    """Checks a token that came from the last hop.

    Raises:
        InvalidInput: a gap, a repetition, no token of the model, or one too many.
    """
    expected = len(session.tokens)
    if position != expected or session.cached != expected:
        raise InvalidInput("position", f"{position}; {expected} comes next")
    if token_id >= session.lane.executor.table.vocabulary_size:
        raise InvalidInput("token_id", f"{token_id} is not in the vocabulary")
    if position >= session.limit:
        raise InvalidInput("position", f"{position}; at most {session.limit} tokens are kept")
