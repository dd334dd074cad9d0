"""Scale-in beside packing: what packing frees goes, what it cannot free stays."""

from __future__ import annotations

from catenary_scheduler.dispatch.events import Scale
from catenary_scheduler.scaling import ModelScaling, ModelWorkers, WorkerStatistics, next_to_go
from catenary_services.domain.ids import AgentId, ModelKey
from scheduling_cases.virtual_load import LENGTHS, LINES, OBJECTIVES

S = 10**9
MODEL = ModelKey("llm", "1")


def after(scaling: ModelScaling, workers: int, packed: list[int], since_s: int) -> list[Scale]:
    """Returns the orders of some seconds, in which packing has sessions on so many workers."""
    orders = []
    for second, in_use in enumerate(packed):
        facts = WorkerStatistics(
            workers=workers,
            sessions=0,
            slots=8 * workers,
            lines=LINES,
            objectives=OBJECTIVES,
            most=8,
            expected=LENGTHS,
            packed=in_use,
        )
        order = scaling.decide(facts, (since_s + second) * S)
        if order is not None:
            orders.append(order)
            workers = order.workers
    return orders


def test_a_worker_goes_only_when_packing_has_done_without_it_for_a_while() -> None:
    scaling = ModelScaling(MODEL)
    assert after(scaling, 4, [4] * 100, 100) == []  # nobody comes, and caches fill all four
    orders = after(scaling, 4, [3] * 100, 200)
    assert [order.workers for order in orders] == [3]
    orders = after(scaling, 3, [1] * 200, 300)
    assert [order.workers for order in orders] == [2, 1]


def test_packing_that_goes_up_and_down_takes_no_worker_away_and_brings_it_back() -> None:
    scaling = ModelScaling(MODEL)
    assert after(scaling, 3, [2, 3] * 150, 100) == []


def test_packing_alone_asks_for_no_worker() -> None:
    scaling = ModelScaling(MODEL)
    assert after(scaling, 2, [2] * 100, 100) == []
    assert after(scaling, 1, [0] * 100, 300) == []


def test_who_was_emptied_goes_first_and_then_who_has_least_to_move() -> None:
    agents = [AgentId(f"agent-{number}") for number in range(3)]
    workers_of_models = {MODEL: ModelWorkers([{agent} for agent in agents], 2)}
    assert next_to_go(workers_of_models, {agents[1]: 900, agents[2]: 40}, agents) == agents[0]
    assert (
        next_to_go(workers_of_models, {agents[0]: 5000, agents[1]: 900, agents[2]: 4000}, agents)
        == (agents[1])
    )
