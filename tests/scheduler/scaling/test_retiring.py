"""Agents for workers, and the one that goes first."""

from __future__ import annotations

from catenary_scheduler.scaling import ModelWorkers, agents_wanted, last_of_each, next_to_go
from catenary_services.domain.ids import AgentId, ModelKey

ONE, TWO = ModelKey("one", "1"), ModelKey("two", "1")


def model_workers(wanted: int, *workers: str) -> ModelWorkers:
    """Each worker: its agents, a letter each."""
    return ModelWorkers([{AgentId(agent) for agent in worker} for worker in workers], wanted)


def going(
    workers_of_models: dict[ModelKey, ModelWorkers], sessions: dict[str, int], agents: str
) -> str | None:
    held = {AgentId(agent): count for agent, count in sessions.items()}
    return next_to_go(workers_of_models, held, [AgentId(agent) for agent in agents])


def test_a_worker_takes_as_many_agents_as_the_present_ones_do() -> None:
    assert agents_wanted([model_workers(3, "a")], 0) == 3
    assert agents_wanted([model_workers(3, "ab", "cd")], 0) == 6
    assert agents_wanted([model_workers(1, "ab", "cd")], 1) == 3


def test_agents_of_several_models_add_up_unless_they_are_the_same_ones() -> None:
    assert agents_wanted([model_workers(3, "a"), model_workers(2, "b")], 0) == 5
    assert agents_wanted([model_workers(3, "a", "b"), model_workers(2, "a", "b")], 0) == 3
    assert (
        agents_wanted([model_workers(1, "ab"), model_workers(1, "c"), model_workers(2, "bc")], 2)
        == 6
    )


def test_the_emptiest_agent_goes_and_of_equals_the_last_one() -> None:
    workers_of_models = {ONE: model_workers(2, "a", "b", "c")}
    assert going(workers_of_models, {"a": 3, "b": 1, "c": 2}, "abc") == "b"
    assert going(workers_of_models, {}, "abc") == "c"
    assert next_to_go({}, {}, [AgentId("agent-9"), AgentId("agent-10")]) == "agent-10"


def test_nobody_goes_without_whom_a_model_lacks_a_worker() -> None:
    assert going({ONE: model_workers(3, "a", "b", "c")}, {}, "abc") is None
    assert (
        going({ONE: model_workers(1, "a", "b"), TWO: model_workers(1, "a")}, {"b": 9}, "ab") == "b"
    )
    assert going({ONE: model_workers(3, "a", "b")}, {}, "ab") is None  # even fewer than wanted
    assert going({ONE: model_workers(3, "a", "b")}, {}, "abc") == "c"  # who serves nobody


def test_the_second_agent_of_a_broken_chain_goes_too() -> None:
    assert going({ONE: model_workers(1, "ab", "cd")}, {"a": 1, "b": 1}, "abcd") == "d"
    assert going({ONE: model_workers(1, "ab")}, {"c": 1}, "abc") == "c"


def test_the_last_of_each_set_of_names_is_found() -> None:
    names = ["l4-9", "l4-10", "l4-2", "a100-0", "odd", "even"]
    assert last_of_each(AgentId(name) for name in names) == {"l4-10", "a100-0", "even"}
    assert last_of_each([]) == frozenset()
