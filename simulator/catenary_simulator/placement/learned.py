"""Length predictors trained on answers before a run."""

from __future__ import annotations

from functools import lru_cache

from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_simulator.placement.workload import LengthPopulation


def trained(learned: LengthPopulation) -> LengthPredictor:
    """Returns a new predictor that has learned these answers, in their order."""
    return LengthPredictor.from_record(_record(learned))


@lru_cache(maxsize=8)
def _record(learned: LengthPopulation) -> dict[str, object]:
    predictor = LengthPredictor()
    for prompt, answer in zip(learned.prompts, learned.answers, strict=True):
        predictor.learn(prompt, answer)
    return predictor.to_record()
