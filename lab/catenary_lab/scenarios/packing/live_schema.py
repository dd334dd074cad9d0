"""Scenario files of packing on real processes; see `schema` for the others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from catenary_lab.scenarios.schema import Annotatable, Closed, Count, Positive


class HopSpec(Closed):
    """Blocks that an agent processes for the sessions of a chain."""

    agent: int = Field(ge=0, description="Number of the agent.")
    blocks: tuple[Annotated[int, Field(ge=0)], Count] = Field(description="First, and end.")


class LayoutSpec(Closed):
    """The chains of a cluster, and the moves and drains that their sessions go through."""

    label: str = Field(min_length=1, description="Name in tables.")
    chains: list[list[HopSpec]] = Field(
        default_factory=list,
        description="Hops of each; empty: one of each agent, with the whole model.",
    )
    moves: int = Field(
        ge=2, description="Moves of running sessions: half by their caches, half by their tokens."
    )
    drained: int = Field(
        0, ge=0, description="Sessions of an agent that is drained then; 0: none is."
    )

    @model_validator(mode="after")
    def _can_be_drained(self) -> LayoutSpec:
        if self.chains and self.drained:
            raise ValueError("drained: needs the planner's chains, so leave out `chains`")
        return self


class LiveMoves(Annotatable):
    """A real language model whose running sessions move between real agents; only with --live."""

    kind: Literal["live"]
    model: str = Field("smollm2-135m", description="A demo model that generates text.")
    agents: Count = Field(3, description="Number of agents.")
    layouts: list[LayoutSpec] = Field(min_length=1, description="A cluster for each.")
    prompts: Count = Field(12, description="Different ones, each with an undisturbed answer.")
    answer_tokens: Count = Field(96, description="Tokens of each answer.")
    drained_answer_tokens: Count = Field(
        192, description="Tokens of answers while an agent is drained."
    )
    streams: Count = Field(6, description="Answers at a time.")
    abreast: Count = Field(1, description="Moves at a time.")
    session_tokens: Count = Field(512, description="Most tokens of a session.")
    max_batch: Count = Field(12, description="Most sessions of an agent at a time.")
    seed: int = Field(1, ge=0, description="Decides who moves where.")
    most_stall_steps: Positive = Field(
        3.0, description="Target: steps a stream that moves by its caches stands, 99th percentile."
    )
    most_drain_s: Positive = Field(
        2.0, description="Target: time until a drained agent holds nothing."
    )

    @property
    def longest_answer(self) -> int:
        """Number of tokens of the longest answer in the run."""
        return max(self.answer_tokens, self.drained_answer_tokens)

    @model_validator(mode="after")
    def _labels_differ(self) -> LiveMoves:
        labels = [each.label for each in self.layouts]
        if len(set(labels)) < len(labels):
            raise ValueError("layouts: two have the same label")
        return self
