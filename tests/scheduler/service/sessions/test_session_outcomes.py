"""Sessions are told of where chains are tuned, with their arrivals and lengths, once answered."""

from __future__ import annotations

from catenary_scheduler.dispatch.events import (
    RequestCancelled,
    RequestCompleted,
    SessionProgress,
    SessionRequested,
)
from catenary_scheduler.runtime.session_outcomes import SessionOutcomes
from catenary_scheduler.scaling import ModelScaling, ScalingPolicy
from catenary_services.domain.ids import GatewayId, ModelKey, RequestId

LLM = ModelKey("llm", "1")
S = 10**9


def request(number: int) -> RequestId:
    return RequestId(GatewayId("g"), number)


def test_only_what_was_answered_is_told_with_its_arrival_and_lengths() -> None:
    told: list[tuple[ModelKey, int, int, int]] = []

    def answered(model: ModelKey, arrived_ns: int, prompt_tokens: int, tokens: int) -> None:
        told.append((model, arrived_ns, prompt_tokens, tokens))

    scaling = ModelScaling(LLM, ScalingPolicy())
    outcomes = SessionOutcomes(lambda _: scaling, lambda _: None, answered)
    for number, arrived in ((1, 2 * S), (2, None), (3, None)):
        asked = SessionRequested(request(number), LLM, 40 + number, 99, 1 << 60, arrived_ns=arrived)
        outcomes.on_event(asked, 3 * S)
    outcomes.on_event(
        RequestCompleted(request(2), SessionProgress(request(2), 17, S, 2 * S)), 9 * S
    )
    outcomes.on_event(
        RequestCompleted(request(1), SessionProgress(request(1), 5, S, 2 * S)), 10 * S
    )
    outcomes.on_event(RequestCancelled(request(3)), 10 * S)
    assert told == []  # noted until the next tick
    outcomes.tick(11 * S)
    assert told == [(LLM, 3 * S, 42, 17), (LLM, 2 * S, 41, 5)]
    assert len(outcomes) == 0
