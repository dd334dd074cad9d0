"""The frames of one step: one per next agent, and one of tokens per gateway and first agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from catenary_agent.generation.frames.cache_wire import put_opening
from catenary_agent.generation.frames.peers import SessionFrame
from catenary_protos.catenary.v1 import common_pb2, frame_pb2
from catenary_services.grpc.sampling_messages import message_of_logprobs
from catenary_services.transport.frames import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from catenary_agent.generation.state.events import (
        PrefixOut,
        PromptScoresOut,
        RowsOut,
        TokenOut,
    )

_MOST_OPENINGS_BYTES = MAX_HEADER_BYTES // 2
"""The most bytes of the openings of several sessions in one header, which says more than these."""

_Part = TypeVar("_Part", "RowsOut", "TokenOut")


@dataclass(slots=True)
class StepFrame(SessionFrame):
    """Hidden states of several sessions, addressed to one next agent.

    The payload is row-major float32 `[sum of tokens, hidden]`; a chunk of 64 rows is copied in
    about 20 microseconds.
    """

    KIND = frame_pb2.FRAME_KIND_SESSION_STEP
    rows: list[RowsOut]

    @property
    def nbytes(self) -> int:
        return sum(each.rows.nbytes for each in self.rows)

    @property
    def session_ids(self) -> tuple[int, ...]:
        return tuple(each.spec.session_id for each in self.rows)

    def fill(self, view: memoryview) -> None:
        if not self.nbytes:  # nothing but openings
            return
        target = np.frombuffer(view, np.float32).reshape(-1, self.rows[0].rows.shape[1])
        start = 0
        for each in self.rows:
            target[start : start + len(each.rows)] = each.rows
            start += len(each.rows)

    def describe(self, header: frame_pb2.FrameHeader, agent_id: str) -> None:
        for each in self.rows:
            entry = header.session_rows.add(
                session_id=each.spec.session_id,
                position=each.position,
                tokens=len(each.rows),
                sample=each.sample,
                draft_token_ids=each.drafts.tokens,
                takes_drafts=each.drafts.are_taken,
                token_ids=each.token_ids,
            )
            if each.opens:
                put_opening(entry.opening, each.spec, header.sent_monotonic_ns)
            if each.spec.opening.timed:
                entry.timings.extend(_timings(each, header.sent_monotonic_ns, agent_id))


@dataclass(slots=True)
class TokenFrame(SessionFrame):
    """Tokens of several sessions, addressed to one gateway or one agent; they are in the header."""

    KIND = frame_pb2.FRAME_KIND_SESSION_TOKENS
    tokens: list[TokenOut]
    for_gateway: bool
    prompt_scores: Sequence[PromptScoresOut] = ()
    prefixes: Sequence[PrefixOut] = ()

    @property
    def session_ids(self) -> tuple[int, ...]:
        if self.prefixes:
            return tuple(each.spec.session_id for each in self.prefixes)
        if self.for_gateway:
            scored = [each.spec.session_id for each in self.prompt_scores]
            return (*scored, *(each.spec.session_id for each in self.tokens))
        # A finished session has all its tokens; the scheduler orders its slots there to be freed.
        return tuple(each.spec.session_id for each in self.tokens if not each.finish_reason)

    def describe(self, header: frame_pb2.FrameHeader, agent_id: str) -> None:
        for each in self.tokens:
            entry = header.session_tokens.add(
                session_id=each.spec.session_id,
                position=each.position,
                token_id=each.token_id,
                finish_reason=each.finish_reason,
                takes_drafts=each.takes_drafts and not self.for_gateway,
            )
            if self.for_gateway and each.cached_tokens:
                entry.cached_tokens = each.cached_tokens
            if self.for_gateway and each.scored is not None:
                entry.logprobs.CopyFrom(message_of_logprobs(each.scored))
            if self.for_gateway and each.spec.opening.timed and not each.is_guessed:
                entry.timings.extend(_timings(each, header.sent_monotonic_ns, agent_id))
            if not self.for_gateway and each.spec.side == "prefill":
                put_opening(entry.opening, each.spec, header.sent_monotonic_ns)
        for prefix in self.prefixes:
            header.session_tokens.add(
                session_id=prefix.spec.session_id, cached_tokens=prefix.tokens
            )
        for part in self.prompt_scores:
            header.prompt_logprobs.add(
                session_id=part.spec.session_id,
                position=part.position,
                logprobs=map(message_of_logprobs, part.scored),
            )


def frames_of(
    rows: Sequence[RowsOut],
    tokens: Sequence[TokenOut],
    prompt_scores: Sequence[PromptScoresOut] = (),
    prefixes: Sequence[PrefixOut] = (),
) -> Iterable[tuple[str, SessionFrame]]:
    """Yields each frame of a step with its receiver; frames that keep a ring going come first."""
    following: dict[str, list[RowsOut]] = {}
    for row in rows:
        following.setdefault(row.spec.next_agent, []).append(row)
    agents: dict[str, list[TokenOut]] = {}
    gateways: dict[str, list[TokenOut]] = {}
    for token in tokens:
        for agent in _agents_for(token):
            agents.setdefault(agent, []).append(token)
        gateways.setdefault(token.spec.opening.gateway_id, []).append(token)
    for peer, parts in following.items():
        for few in _by_headers(parts, lambda row: row.opens):
            yield peer, StepFrame(few)
    for prefix in prefixes:
        yield prefix.spec.first_agent, TokenFrame([], for_gateway=False, prefixes=(prefix,))
    for peer, part in agents.items():
        for some in _by_headers(part, lambda token: token.spec.side == "prefill"):
            yield peer, TokenFrame(some, for_gateway=False)
    scores: dict[str, list[PromptScoresOut]] = {}
    for each in prompt_scores:
        scores.setdefault(each.spec.opening.gateway_id, []).append(each)
        gateways.setdefault(each.spec.opening.gateway_id, [])
    for peer, part in gateways.items():
        yield peer, TokenFrame(part, for_gateway=True, prompt_scores=scores.get(peer, ()))


def _by_headers(parts: Sequence[_Part], opens: Callable[[_Part], bool]) -> Iterator[list[_Part]]:
    """Yields the parts of one receiver in lists whose openings fit into a header.

    An opening with a long prompt or grammar is large, and a step may begin many sessions.
    """
    few: list[_Part] = []
    size = 0
    for part in parts:
        more = part.spec.opening.ByteSize() if opens(part) else 0
        if few and size + more > _MOST_OPENINGS_BYTES:
            yield few
            few, size = [], 0
        few.append(part)
        size += more
    yield few


def _agents_for(token: TokenOut) -> Iterable[str]:
    """Returns the agents that need a token: the first one of the ring, unless that is this agent.

    A prefill ring is done with the first token. It goes to the agents of the decode ring that embed
    and sample tokens.
    """
    spec = token.spec
    if spec.side != "prefill":
        return () if spec.is_first else (spec.first_agent,)
    if token.finish_reason:
        return ()
    ring = spec.opening.decode_route
    return dict.fromkeys((ring[0].agent_id, ring[-1].agent_id))


def _timings(out: RowsOut | TokenOut, now: int, agent_id: str) -> list[common_pb2.HopTiming]:
    """Returns the timings of all hops of this step so far; that of this agent is the last."""
    own = out.spec.own_hop
    timing = common_pb2.HopTiming(
        agent_id=agent_id,
        first_block=own.first_block,
        last_block=own.last_block,
        transfer_ns=out.arrived.transfer_ns,
        wait_ns=max(0, out.started_ns - out.arrived.received_ns),
        compute_ns=out.ended_ns - out.started_ns,
        send_ns=now - out.ended_ns,
    )
    return [*out.arrived.timings, timing]
