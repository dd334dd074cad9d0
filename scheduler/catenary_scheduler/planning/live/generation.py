"""What a session costs an agent: from what was measured when its blocks were loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
"""Of a weight (4 bytes, one multiplication and one addition) per token."""
_HOP_S = 0.001
"""One frame from agent to agent, all in; where nobody measured it."""
_HIDDEN_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class GenerationCost:
    """Measured on one agent: time of a pass through all blocks of one partition."""

    prefill_ns: Nanoseconds
    prefill_token_ns: Nanoseconds
    """A chunk of n prompt tokens takes `prefill_ns + n * prefill_token_ns`."""
    decode_ns: Nanoseconds
    decode_session_ns: Nanoseconds
    """A step of b > 1 sessions with c tokens cached takes `decode_ns + b * decode_session_ns +
    c * decode_context_token_ns`."""
    decode_context_token_ns: float = 0.0
    decode_lone_ns: Nanoseconds = 0
    """A step of one session; 0: as the line says."""
    prefill_floor_ns: Nanoseconds = 0
    """A chunk takes at least this, however short."""
    prefill_chunk_tokens: int = 0
    """Most tokens of one chunk; 0: prompts run whole."""

    def prefill(self, tokens: float, chunks: float = 1.0) -> float:
        """Returns the time of so many prompt tokens in so many chunks."""
        line_ns = chunks * self.prefill_ns + tokens * self.prefill_token_ns
        return max(chunks * self.prefill_floor_ns, line_ns)

    def prompt(self, tokens: float) -> float:
        """Returns the time of a whole prompt alone, chunk after chunk."""
        chunk = self.prefill_chunk_tokens
        if not chunk or tokens <= chunk:
            return self.prefill(tokens)
        return self.prefill(chunk) * tokens / chunk

    def decode(self, sessions: float, context_tokens: float = 0.0) -> float:
        """Returns the time of one step of so many sessions with so much context in all."""
        if sessions == 1 and self.decode_lone_ns:
            return self.decode_lone_ns
        context_ns = context_tokens * self.decode_context_token_ns
        return self.decode_ns + sessions * self.decode_session_ns + context_ns


@dataclass(frozen=True, slots=True)
class SessionShape:
    """The mean session."""

    prompt_tokens: float = 256.0
    output_tokens: float = 128.0


GenerationTimes = Mapping[tuple[AgentId, PartitionKey], GenerationCost]


class ChainCosts:
    """Times of a mean session of one model on the agents of a cluster.

    An agent's time per block is the mean of what was measured of this model there. One that was
    never measured counts as slow as the slowest of its class, else as the slowest there is; where
    nothing was measured at all it is assumed to read 10 GB/s and to compute 50 GFLOP/s. A session
    is taken as alone: the more share a step, the longer it takes, but on all chains alike. The last
    norm and the projection to the vocabulary count as so many blocks as they are large.
    """

    def __init__(
        self,
        decoder: DecoderTable,
        agents: Sequence[Agent],
        measured: GenerationTimes,
        model: ModelKey,
        shape: SessionShape,
        precision: str = "fp32",
    ) -> None:
        self._decoder = decoder
        self._precision = precision
        self._shape = shape
        self._agents = {agent.agent_id: agent for agent in agents}
        self._block_s: dict[AgentId, float] = {}
        sums: dict[AgentId, list[float]] = {}
        for (agent, key), cost in measured.items():
            if key.model == model:
                sums.setdefault(agent, []).append(self._pass_s(cost) / self._weight(agent, key))
        for agent, times in sums.items():
            self._block_s[agent] = sum(times) / len(times)

    def block_s(self, agent: AgentId) -> float:
        """Returns tau_p: seconds a mean session computes in one block."""
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
        """Returns tau_c: seconds a mean session's tokens travel to an agent, all together."""
        mine = self._agents.get(agent)
        row_bytes = self._decoder.hidden_size * _HIDDEN_VALUE_BYTES
        rate = mine.link_bytes_per_second if mine is not None else 0
        prompt_s = self._shape.prompt_tokens * row_bytes / rate if rate else 0.0
        return self._shape.output_tokens * _HOP_S + prompt_s

    def service_ns(self, hops: Sequence[ChainHop]) -> Nanoseconds:
        """Returns T_k of a chain: the paper's sum over its servers, and the head of the model."""
        seconds = sum(
            self.communication_s(hop.agent) + self.block_s(hop.agent) * hop.blocks for hop in hops
        )
        seconds += self.block_s(hops[-1].agent) * self._head_blocks(hops[-1].agent)
        return max(1, round(seconds * NANOSECONDS_PER_SECOND))

    def _pass_s(self, cost: GenerationCost) -> float:
        shape = self._shape
        step = cost.decode(1, shape.prompt_tokens + shape.output_tokens / 2)
        decode = max(0.0, shape.output_tokens - 1) * step
        return max(1.0, cost.prompt(shape.prompt_tokens) + decode) / NANOSECONDS_PER_SECOND

    def _weight(self, agent: AgentId, key: PartitionKey) -> float:
        """Returns how many blocks a partition is worth."""
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
