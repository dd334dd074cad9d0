"""Requests that not even an empty worker could serve as they ask (reading R3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from catenary_scheduler.dispatch.placing.best_fit import PlacementRequest
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND


@dataclass(frozen=True, slots=True)
class ObjectiveViolation:
    """An objective that cannot be kept, and by how much.

    Attributes:
        constraint: "b", "c" or "e" of Aladdin's section 4.1.
        field: The field of the request that asks for it.
        needed: The least possible value, on the best worker.
        allowed: The largest allowed value.
        unit: Unit of both values.
    """

    constraint: str
    field: str
    needed: float
    allowed: float
    unit: str

    @property
    def message(self) -> str:
        """One sentence for the client."""
        return (
            f"{self.field}: an empty worker needs {self.needed:.4g} {self.unit}, "
            f"and {self.allowed:.4g} {self.unit} are allowed (constraint {self.constraint})"
        )

    def details(self) -> dict[str, str]:
        """Returns the facts of the violation by name."""
        return {
            "constraint": self.constraint,
            "field": self.field,
            "needed": f"{self.needed:.6g}",
            "allowed": f"{self.allowed:.6g}",
            "unit": self.unit,
        }


def fault_of(
    workers: Sequence[Worker], decode: Sequence[Worker], placement_request: PlacementRequest
) -> ObjectiveViolation | None:
    """Returns the first constraint that fails on every worker, were it empty; None if none does.

    Args:
        workers: Workers that may run the prompt, and without a split phase also the rest.
        decode: Workers that may run the rest in a split phase; else none.
        placement_request: The request.
    """
    if not workers:
        return None
    unit = NANOSECONDS_PER_MILLISECOND
    prompt = min(worker.lines.prefill(placement_request.prompt_tokens) for worker in workers)
    if placement_request.first_token_ns and prompt > placement_request.first_token_ns:
        return ObjectiveViolation(
            "c",
            "first_token_objective",
            prompt / unit,
            placement_request.first_token_ns / unit,
            "ms",
        )
    generating = decode or workers
    tokens = placement_request.prompt_tokens + placement_request.predicted_tokens
    step = min(worker.lines.decode(1, tokens) for worker in generating)
    if placement_request.per_token_ns and step > placement_request.per_token_ns:
        return ObjectiveViolation(
            "b", "per_token_objective", step / unit, placement_request.per_token_ns / unit, "ms"
        )
    for worker in generating:
        if worker.lines.cache(tokens) <= worker.limits.cache_capacity:
            return None
    needed = min(worker.lines.cache(tokens) for worker in generating)
    most = max(worker.limits.cache_capacity for worker in generating)
    return ObjectiveViolation("e", "prompt", needed, most, "tokens of cache")
