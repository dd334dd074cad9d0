"""The policies that are compared, by name, and what they have learned before a run."""

from __future__ import annotations

from functools import lru_cache

from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_simulator.placement.workload import Lengths

_DISPATCHED = {"jsq": "fewest-sessions"}
"""Names of the literature that mean another policy of the dispatcher's."""


def dispatcher_policy(name: str) -> str:
    """Returns the name of a dispatcher's policy: of "jsq" by sessions, as engines are balanced."""
    return _DISPATCHED.get(name, name)


def trained(learned: Lengths) -> LengthPredictor:
    """Returns a fresh predictor that has seen these answers, in their order."""
    return LengthPredictor.from_record(_record(learned))


@lru_cache(maxsize=8)
def _record(learned: Lengths) -> dict[str, object]:
    predictor = LengthPredictor()
    for prompt, answer in zip(learned.prompts, learned.answers, strict=True):
        predictor.learn(prompt, answer)
    return predictor.to_record()
