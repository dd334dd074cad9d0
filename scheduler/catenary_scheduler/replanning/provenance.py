"""Records how a plan was made: for people, and to compare it with the next one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from msgspec.structs import asdict

from catenary_scheduler.storage.values.stored import StoredFigure, StoredProvenance
from catenary_services.domain.ids import ModelKey

POOLED, EVEN, HAND, CHAINS = "pooled", "even", "hand", "chains"
_FIGURES = ("shares", "throughput_rps", "latency_ns")
"""The fields that have a number for each model."""


@dataclass(frozen=True, slots=True)
class PlanProvenance:
    """Origin of a plan: who made it, why, and what it promises."""

    planner: str
    cause: str
    fallback: str = ""
    """Reason why it was made from sizes alone though a pooled plan was wanted; else empty."""
    lines: tuple[str, ...] = ()
    """The pooled planner's explanation."""
    remarks: tuple[str, ...] = ()
    """Notes for people: estimates it rests on, agents it leaves idle, and the like."""
    shares: dict[ModelKey, float] = field(default_factory=dict)
    """Share of each model in the load that it was made for."""
    throughput_rps: dict[ModelKey, float] = field(default_factory=dict)
    """Promised throughput of each model in requests per second."""
    chain_lines: tuple[str, ...] = ()
    """The chain planner's explanation, where models generate text."""
    latency_ns: dict[ModelKey, float] = field(default_factory=dict)
    """Latency of a batch of the slowest pipeline of each model, as the pooled planner computed
    it."""
    binding: tuple[str, ...] = ()
    """Constraints that keep the pooled planner from promising more."""
    idle: tuple[str, ...] = ()
    """A sentence on every agent that the plan leaves idle."""

    def in_words(self) -> list[str]:
        """Returns one sentence per line."""
        if self.planner == HAND:
            return [f"It was given from outside: {self.cause}."]
        if self.planner == CHAINS:
            made = f"The chain planner made it because {self.cause}."
            return [made, *self.chain_lines, *self.idle]
        if self.planner == EVEN:
            said = [f"It replicates whole models where memory allows, made because {self.cause}."]
            if self.fallback:
                said.append(f"The pooled planner was not used: {self.fallback}.")
            return [*said, *self.remarks, *self.chain_lines, *self.idle]
        shares = ", ".join(f"{model} {share:.0%}" for model, share in sorted(self.shares.items()))
        return [
            f"The pooled planner made it because {self.cause}.",
            f"It was made for these shares of the load: {shares}.",
            *self.lines,
            *self.remarks,
            *self.chain_lines,
            *self.idle,
        ]

    def stored(self) -> StoredProvenance:
        """Returns the record that Redis keeps; its fields have the names of these."""
        record: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        return StoredProvenance(**{**record, **{name: _figures(record[name]) for name in _FIGURES}})

    @classmethod
    def of(cls, stored: StoredProvenance) -> PlanProvenance:
        record = asdict(stored)
        return cls(**{**record, **{name: _by_model(record[name]) for name in _FIGURES}})


def _figures(by_model: Mapping[ModelKey, float]) -> tuple[StoredFigure, ...]:
    return tuple(StoredFigure(*model, float(value)) for model, value in by_model.items())


def _by_model(figures: Iterable[StoredFigure]) -> dict[ModelKey, float]:
    return {ModelKey(each.name, each.version): each.value for each in figures}
