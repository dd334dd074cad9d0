"""The frames of one step: one per next agent, and one of tokens per gateway and first agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from catenary_agent.generation.frames.cache_wire import put_opening
from catenary_agent.generation.frames.peers import Priority, SessionFrame
from catenary_agent.kv.arrays import to_bfloat16
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

BFLOAT16 = "BF16"
"""The name of bfloat16 in a header; without a name, rows are float32."""

_Part = TypeVar("_Part", "RowsOut", "TokenOut")


@dataclass(slots=True)
class StepFrame(SessionFrame):
    """Hidden states of several sessions, addressed to one next agent.

    The payload is row-major `[sum of tokens, hidden]`, float32 or bfloat16; a chunk of 64 rows is
    copied in about 20 microseconds.
    """

    KIND = frame_pb2.FRAME_KIND_SESSION_STEP
    rows: list[RowsOut]
    left: Callable[[int], None] | None = None
    """Called exactly once with the session of rows that others may overtake, when the frame has
    left or was given up. A frame with such rows has no others."""
    is_narrow: bool = False

    @property
    def nbytes(self) -> int:
        nbytes = sum(each.rows.nbytes for each in self.rows)
        return nbytes // 2 if self.is_narrow else nbytes

    @property
    def priority(self) -> Priority:
        return Priority.RINGS if self.rows[0].turn is None else Priority.PROMPTS

    @property
    def turn(self) -> tuple[int, int]:
        turn = self.rows[0].turn
        return (0, 0) if turn is None else (turn.due_ns, turn.opened_ns)

    def narrow(self) -> None:
        self.is_narrow = True

    def settle(self) -> None:
        if self.left is not None:
            self.left(self.rows[0].spec.session_id)

    @property
    def session_ids(self) -> tuple[int, ...]:
        return tuple(each.spec.session_id for each in self.rows)

    def fill(self, view: memoryview) -> None:
        if not self.nbytes:  # nothing but openings
            return
        dtype = np.uint16 if self.is_narrow else np.float32
        target = np.frombuffer(view, dtype).reshape(-1, self.rows[0].rows.shape[1])
        start = 0
        for each in self.rows:
            rows = to_bfloat16(each.rows) if self.is_narrow else each.rows
            target[start : start + len(rows)] = rows
            start += len(rows)

    def describe(self, header: frame_pb2.FrameHeader, agent_id: str) -> None:
        if self.is_narrow:
            header.rows_datatype = BFLOAT16
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
    left: Callable[[int], None] | None = None,
) -> Iterable[tuple[str, SessionFrame]]:
    """Yields each frame of a step with its receiver; frames that keep a ring going come first.

    Rows that others may overtake have frames of their own, and `left` is called as each settles.
    """
    agents: dict[str, list[TokenOut]] = {}
    gateways: dict[str, list[TokenOut]] = {}
    for token in tokens:
        for agent in _agents_for(token):
            agents.setdefault(agent, []).append(token)
        gateways.setdefault(token.spec.opening.gateway_id, []).append(token)
    yield from _frames_of_rows(rows, left)
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


def _frames_of_rows(
    rows: Sequence[RowsOut], left: Callable[[int], None] | None
) -> Iterable[tuple[str, SessionFrame]]:
    following: dict[str, list[RowsOut]] = {}
    waiting: list[RowsOut] = []
    for row in rows:
        if row.turn is None:
            following.setdefault(row.spec.next_agent, []).append(row)
        else:
            waiting.append(row)
    for peer, parts in following.items():
        for few in _by_headers(parts, lambda row: row.opens):
            yield peer, StepFrame(few)
    for row in waiting:
        yield row.spec.next_agent, StepFrame([row], left)


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
