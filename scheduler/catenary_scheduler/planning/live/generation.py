"""Costs of a session on an agent, from measurements made when its blocks were loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from catenary_scheduler.planning.chains.problem import Links
from catenary_scheduler.planning.live.links import NO_LINKS, LinkFigures, ServerLinks
from catenary_services.domain.decoder import AllocatedSizes, DecoderTable
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
)
from catenary_services.domain.plan import Agent, ChainHop

_BYTES_PER_SECOND = 10e9
_FLOP_PER_SECOND = 50e9
_FLOP_PER_BYTE = 0.5
"""Operations per byte of a weight (4 bytes, one multiplication and one addition) and token."""
USUAL_FRAME_NS = 1_000_000.0
"""Nanoseconds that one frame takes from agent to agent, all included, if they are in one place."""
_HOP_S = USUAL_FRAME_NS / NANOSECONDS_PER_SECOND
_HIDDEN_VALUE_BYTES = 4
_LONGEST_S = 1_000.0
"""Longest time on a link that is told apart: no session takes a link on which it takes longer."""
_NOTABLE = 1.05
"""Links on which a session takes up to so many times as long as usual count as usual ones."""
_MOST_LINKED = 64
"""Number of agents above which paths over links would take the planner too long."""


@dataclass(frozen=True, slots=True)
class GenerationCost:
    """Measured times of one agent: a pass through all blocks of one partition."""

    prefill_ns: Nanoseconds
    prefill_token_ns: Nanoseconds
    """Nanoseconds per prompt token: a chunk of n takes `prefill_ns + n * prefill_token_ns`."""
    decode_ns: Nanoseconds
    decode_session_ns: Nanoseconds
    """Nanoseconds per session: a step of b > 1 sessions with c cached tokens takes `decode_ns + b *
    decode_session_ns + c * decode_context_token_ns`."""
    decode_context_token_ns: float = 0.0
    decode_lone_ns: Nanoseconds = 0
    """Nanoseconds of a step of one session; 0 if the formula applies to it too."""
    prefill_floor_ns: Nanoseconds = 0
    """Least nanoseconds of a chunk, however short it is."""
    prefill_chunk_tokens: int = 0
    """Largest number of tokens of one chunk; 0 if prompts are not divided."""

    def prefill(self, tokens: float, chunks: float = 1.0) -> float:
        """Returns the nanoseconds that `tokens` prompt tokens take in `chunks` chunks."""
        line_ns = chunks * self.prefill_ns + tokens * self.prefill_token_ns
        return max(chunks * self.prefill_floor_ns, line_ns)

    def prompt(self, tokens: float) -> float:
        """Returns the nanoseconds of a whole prompt that runs alone, chunk after chunk."""
        chunk = self.prefill_chunk_tokens
        if not chunk or tokens <= chunk:
            return self.prefill(tokens)
        return self.prefill(chunk) * tokens / chunk

    def decode(self, sessions: float, context_tokens: float = 0.0) -> float:
        """Returns the nanoseconds of a step of `sessions` sessions with `context_tokens` in all."""
        if sessions == 1 and self.decode_lone_ns:
            return self.decode_lone_ns
        context_ns = context_tokens * self.decode_context_token_ns
        return self.decode_ns + sessions * self.decode_session_ns + context_ns


@dataclass(frozen=True, slots=True)
class SessionShape:
    """Mean lengths of a session, in tokens."""

    prompt_tokens: float = 256.0
    output_tokens: float = 128.0


GenerationTimes = Mapping[tuple[AgentId, PartitionKey], GenerationCost]


class ChainCosts:
    """Times that a mean session of one model takes on the agents of a cluster.

    The time per block of an agent is the mean of the measurements of this model there. An agent
    without measurements counts as slow as the slowest of its class, else as the slowest of all. If
    nothing was measured at all, agents are assumed to read 10 GB/s and to compute 50 GFLOP/s. A
    session is assumed to be alone: more sessions lengthen a step, but on all chains alike. The last
    norm and the projection to the vocabulary count as a number of blocks in proportion to their
    size.

    Frames between agents are assumed to take a millisecond, and what the way between their servers
    was measured to be longer than one in one place.
    """

    def __init__(  # noqa: PLR0913 - what a cost depends on
        self,
        decoder: DecoderTable,
        agents: Sequence[Agent],
        measured: GenerationTimes,
        model: ModelKey,
        shape: SessionShape,
        precision: str = "fp32",
        *,
        links: ServerLinks = NO_LINKS,
    ) -> None:
        self._decoder = decoder
        self._precision = precision
        self._shape = shape
        self._links = links
        self._agents = {agent.agent_id: agent for agent in agents}
        self._block_s: dict[AgentId, float] = {}
        sums: dict[AgentId, list[float]] = {}
        for (agent, key), cost in measured.items():
            if key.model == model:
                sums.setdefault(agent, []).append(self._pass_s(cost) / self._weight(agent, key))
        for agent, times in sums.items():
            self._block_s[agent] = sum(times) / len(times)

    def block_s(self, agent: AgentId) -> float:
        """Returns tau_p, the seconds that a mean session computes in one block."""
        known = self._block_s.get(agent)
        if known is not None:
            return known
        mine = self._agents.get(agent)
        alike = [
            time
            for other, time in self._block_s.items()
            if mine is not None
            and other in self._agents
            and self._agents[other].device_class == mine.device_class
        ]
        return max(alike or self._block_s.values(), default=self._guess_s(agent))

    def communication_s(self, agent: AgentId) -> float:
        """Returns tau_c, the seconds for which a mean session's tokens travel to an agent."""
        mine = self._agents.get(agent)
        return self._travel_s(_HOP_S, mine.link_bytes_per_second if mine is not None else 0)

    def way_s(self, source: AgentId, target: AgentId) -> float:
        """Returns the seconds for which a mean session's tokens travel from agent to agent."""
        sender, receiver = self._agents.get(source), self._agents.get(target)
        if sender is None or receiver is None:
            return self.communication_s(target)
        frame_s = _HOP_S + self._longer_s(source, target)
        return self._travel_s(frame_s, self._links.rate(sender.server, receiver))

    def figures(self, source: AgentId, target: AgentId) -> LinkFigures | None:
        """Returns what was measured of the link between two agents; None if nothing was."""
        sender, receiver = self._agents.get(source), self._agents.get(target)
        if sender is None or receiver is None or sender.server == receiver.server:
            return None
        known = self._links.figures
        return known.get((sender.server, receiver.server)) or known.get(
            (receiver.server, sender.server)
        )

    def links(self, agents: Sequence[AgentId]) -> Links | None:
        """Returns the seconds of a mean session on every link, for the planner of chains.

        Every token that passes a link comes back to where the ring began. So the way back counts
        too, which is exact for chains that pass a slow link once.

        Returns:
            The seconds by sender and receiver; None if no link is notably slower than is assumed,
                or if there are too many.
        """
        if not self._links.figures or len(agents) > _MOST_LINKED:
            return None
        found: dict[tuple[str | None, str | None], float] = {}
        is_slower = False
        for target in agents:
            usual_s = self.communication_s(target)
            found[None, target] = min(usual_s, _LONGEST_S)
            for source in agents:
                if source != target:
                    back_s = self._shape.output_tokens * self._longer_s(target, source)
                    seconds = self.way_s(source, target) + back_s
                    is_slower = is_slower or seconds > _NOTABLE * usual_s
                    found[source, target] = min(seconds, _LONGEST_S)
        return found if is_slower else None

    def service_ns(self, hops: Sequence[ChainHop]) -> Nanoseconds:
        """Returns T_k of a chain in nanoseconds: the sum over its servers, and the model's head."""
        seconds = self.session_s([(hop.agent, hop.blocks) for hop in hops])
        return max(1, round(seconds * NANOSECONDS_PER_SECOND))

    def session_s(self, parts: Sequence[tuple[AgentId, int]]) -> float:
        """Returns T_k of a chain in seconds, given the agents in order and the blocks of each."""
        last = parts[-1][0]
        seconds = self.communication_s(parts[0][0])
        seconds += sum(self.ring_ways_s([agent for agent, _ in parts]).values())
        seconds += sum(self.block_s(agent) * blocks for agent, blocks in parts)
        return seconds + self.block_s(last) * self._head_blocks(last)

    def ring_ways_s(self, agents: Sequence[AgentId]) -> dict[tuple[AgentId, AgentId], float]:
        """Returns the seconds of a session on every way between the agents of a ring.

        From the last agent to the first only tokens travel. What that usually takes counts as the
        way to the first agent, so here it is what the way is longer.
        """
        ways = {(one, other): self.way_s(one, other) for one, other in pairwise(agents)}
        last, first = agents[-1], agents[0]
        back_s = self._shape.output_tokens * self._longer_s(last, first)
        return {**ways, (last, first): back_s} if last != first else ways

    def _travel_s(self, frame_s: float, rate: int) -> float:
        row_bytes = self._decoder.hidden_size * _HIDDEN_VALUE_BYTES
        prompt_s = self._shape.prompt_tokens * row_bytes / rate if rate else 0.0
        return self._shape.output_tokens * frame_s + prompt_s

    def _longer_s(self, source: AgentId, target: AgentId) -> float:
        """Returns by how many seconds a frame takes longer than in one place."""
        sender, receiver = self._agents.get(source), self._agents.get(target)
        if sender is None or receiver is None:
            return 0.0
        return self._links.longer_ns(sender.server, receiver.server) / NANOSECONDS_PER_SECOND

    def _pass_s(self, cost: GenerationCost) -> float:
        shape = self._shape
        step = cost.decode(1, shape.prompt_tokens + shape.output_tokens / 2)
        decode = max(0.0, shape.output_tokens - 1) * step
        return max(1.0, cost.prompt(shape.prompt_tokens) + decode) / NANOSECONDS_PER_SECOND

    def _weight(self, agent: AgentId, key: PartitionKey) -> float:
        """Returns the size of a partition in blocks, the head of the model included."""
        head = self._head_blocks(agent) if key.last_block == self._decoder.blocks else 0.0
        return key.last_block - key.first_block + head

    def _held(self, agent: AgentId) -> AllocatedSizes:
        known = self._agents.get(agent)
        return self._decoder.held_by(known.runtime if known is not None else "", self._precision)

    def _head_blocks(self, agent: AgentId) -> float:
        held = self._held(agent)
        return held.head_bytes / max(1, held.largest_block_bytes)

    def _guess_s(self, agent: AgentId) -> float:
        weights = self._held(agent).largest_block_bytes
        prefill_s = self._shape.prompt_tokens * weights * _FLOP_PER_BYTE / _FLOP_PER_SECOND
        return prefill_s + self._shape.output_tokens * weights / _BYTES_PER_SECOND
