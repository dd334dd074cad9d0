"""What is remembered of how a plan was made: for people, and for comparing it with the next."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from services.domain.ids import ModelKey

POOLED, EVEN, HAND, CHAINS = "pooled", "even", "hand", "chains"


@dataclass(frozen=True, slots=True)
class PlanNotes:
    """Who made a plan, why, and what it promises."""

    planner: str
    cause: str
    fallback: str = ""
    """Why it was made from sizes alone though the pooled planner was wanted, if it was."""
    lines: tuple[str, ...] = ()
    """The pooled planner's own words."""
    remarks: tuple[str, ...] = ()
    """Estimates it rests on, agents it leaves idle, and what else one should know."""
    shares: dict[ModelKey, float] = field(default_factory=dict)
    """Of the load, that it was made for."""
    throughput_rps: dict[ModelKey, float] = field(default_factory=dict)
    """That it promises."""
    chain_lines: tuple[str, ...] = ()
    """The chain planner's words, where models generate text."""
    latency_ns: dict[ModelKey, float] = field(default_factory=dict)
    """Of a batch of the slowest pipeline, as the pooled planner computed it."""
    binding: tuple[str, ...] = ()
    """What keeps the pooled planner from promising more."""

    def in_words(self) -> list[str]:
        """Returns one sentence a line."""
        if self.planner == HAND:
            return [f"It was given from outside: {self.cause}."]
        if self.planner == CHAINS:
            return [f"The chain planner made it because {self.cause}.", *self.chain_lines]
        if self.planner == EVEN:
            said = [f"It replicates whole models where memory allows, made because {self.cause}."]
            if self.fallback:
                said.append(f"The pooled planner was not used: {self.fallback}.")
            return [*said, *self.remarks, *self.chain_lines]
        shares = ", ".join(f"{model} {share:.0%}" for model, share in sorted(self.shares.items()))
        return [
            f"The pooled planner made it because {self.cause}.",
            f"It was made for these shares of the load: {shares}.",
            *self.lines,
            *self.remarks,
            *self.chain_lines,
        ]

    def as_record(self) -> str:
        """Returns the JSON Redis keeps."""
        return json.dumps(
            {
                "planner": self.planner,
                "cause": self.cause,
                "fallback": self.fallback,
                "lines": self.lines,
                "remarks": self.remarks,
                "shares": [[*model, share] for model, share in self.shares.items()],
                "throughput_rps": [[*model, rps] for model, rps in self.throughput_rps.items()],
                "chain_lines": self.chain_lines,
                "latency_ns": [[*model, each] for model, each in self.latency_ns.items()],
                "binding": self.binding,
            }
        )

    @classmethod
    def of_record(cls, text: str) -> PlanNotes:
        """Reads `as_record`.

        Raises:
            ValueError: it is not one.
        """
        try:
            record = json.loads(text)
            return cls(
                planner=str(record["planner"]),
                cause=str(record["cause"]),
                fallback=str(record["fallback"]),
                lines=tuple(map(str, record["lines"])),
                remarks=tuple(map(str, record["remarks"])),
                shares=_by_model(record["shares"]),
                throughput_rps=_by_model(record["throughput_rps"]),
                chain_lines=tuple(map(str, record.get("chain_lines", ()))),
                latency_ns=_by_model(record.get("latency_ns", ())),
                binding=tuple(map(str, record.get("binding", ()))),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the notes of a plan: {error!r}") from error


def _by_model(entries: Any) -> dict[ModelKey, float]:
    return {ModelKey(str(name), str(version)): float(value) for name, version, value in entries}
