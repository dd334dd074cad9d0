from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.planning.survival import is_served_without, survival_of
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.plan import Chain, ChainHop, ModelPlan, Pipeline, Stage

CATS = ModelKey("cats", "1")


def pooled(*pipelines: list[str]) -> ModelPlan:
    """Pools as words of one-letter agents: `["ab", "c"]` is a pipeline of two pools."""
    made = []
    for number, pools in enumerate(pipelines):
        stages = tuple(
            Stage(PartitionKey(CATS, at, at + 1), tuple(AgentId(a) for a in pool), (1,), 0)
            for at, pool in enumerate(pools)
        )
        made.append(Pipeline(f"p{number}", 1, stages))
    return ModelPlan(CATS, 1, tuple(made))


def chained(*chains: tuple[str, str]) -> ModelPlan:
    made = tuple(
        Chain(
            f"c{number}",
            tuple(
                ChainHop(AgentId(a), PartitionKey(CATS, at, at + 1), at, at + 1)
                for at, a in enumerate(agents)
            ),
            1,
            1,
            role=role,  # type: ignore[arg-type]
        )
        for number, (agents, role) in enumerate(chains)
    )
    return ModelPlan(CATS, 1, (), chains=made)


SERVERS = {AgentId(a): ServerId(s) for a, s in {"a": "x", "b": "x", "c": "y", "d": "y"}.items()}


def test_pools_of_two_survive_an_agent_and_perhaps_a_server() -> None:
    assert survival_of(pooled(["ab"]), SERVERS).in_words() == (
        "survives the loss of any one agent, not that of server x"
    )
    assert survival_of(pooled(["ac"]), SERVERS).in_words() == (
        "survives the loss of any one agent, and of any one server"
    )


def test_a_pool_of_one_is_fragile() -> None:
    survival = survival_of(pooled(["ab", "c"]), SERVERS)
    assert survival.is_fragile
    assert survival.in_words() == "does not survive the loss of c"
    both = survival_of(pooled(["a", "c"]), SERVERS)
    assert both.in_words() == "does not survive the loss of a or c"


def test_a_second_pipeline_or_chain_is_a_way_around() -> None:
    assert not survival_of(pooled(["a", "b"], ["c"]), SERVERS).is_fragile
    assert not survival_of(chained(("ab", "mixed"), ("c", "mixed")), SERVERS).is_fragile
    assert survival_of(chained(("ab", "mixed"), ("bc", "mixed")), SERVERS).agents == ("b",)


def test_prompts_and_answers_need_each_other() -> None:
    split = chained(("a", "prefill"), ("b", "decode"), ("c", "decode"))
    assert survival_of(split, SERVERS).agents == ("a",)


POOLS = st.lists(st.text("abcd", min_size=1, max_size=3), min_size=1, max_size=3)


@given(st.lists(POOLS, min_size=1, max_size=3), st.sets(st.sampled_from("abcd")))
def test_what_is_said_of_a_loss_is_what_one_finds_by_trying(
    pipelines: list[list[str]], lost: set[str]
) -> None:
    model = pooled(*pipelines)
    left = [["".join(set(pool) - lost) for pool in pipeline] for pipeline in pipelines]
    assert is_served_without(model, {AgentId(a) for a in lost}) == any(map(all, left))
    survival = survival_of(model, SERVERS)
    for one in set("".join("".join(p) for p in pipelines)):
        assert (one in survival.agents) != is_served_without(model, {AgentId(one)})
