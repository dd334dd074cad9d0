"""The cut algorithm on random graphs, against trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_agent.partitioning.graph import CutGraph, Node
from catenary_agent.preparing.cutting import (
    SMALLEST_BLOCK_NS,
    Candidates,
    best_choice,
    choose_cuts,
)


@st.composite
def graphs(draw: st.DrawFn, largest: int = 9) -> CutGraph:
    """A DAG in topological order; nodes may have two results, outputs may come early."""
    values = [f"in{i}" for i in range(draw(st.integers(1, 2)))]
    inputs = tuple(values)
    nodes = []
    for index in range(draw(st.integers(1, largest))):
        reads = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
        writes = tuple(f"v{index}.{i}" for i in range(draw(st.integers(1, 2))))
        nodes.append(Node(tuple(reads), writes, draw(st.floats(1.0, 9.0)) * SMALLEST_BLOCK_NS))
        values += writes
    outputs = tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)))
    sizes = {value: draw(st.integers(1, 1000)) for value in values}
    bonds = draw(
        st.frozensets(
            st.tuples(st.integers(0, len(nodes) - 1), st.integers(0, len(nodes) - 1)).filter(
                lambda pair: pair[0] < pair[1]
            ),
            max_size=2,
        )
        if len(nodes) > 1
        else st.just(frozenset())
    )
    return CutGraph(
        inputs,
        outputs,
        tuple(nodes),
        sizes,
        bonds,
        draw(st.frozensets(st.sampled_from(values), max_size=1)),
    )


def crossing_by_definition(graph: CutGraph, position: int) -> set[str]:
    before = set(graph.inputs) | {v for node in graph.nodes[:position] for v in node.writes}
    wanted = set(graph.outputs) | {v for node in graph.nodes[position:] for v in node.reads}
    return before & wanted


def run(nodes: tuple[Node, ...], values: dict[str, object]) -> dict[str, object]:
    """Evaluates symbolically: a value is the expression that makes it."""
    known = dict(values)
    for node in nodes:
        arguments = tuple(known[value] for value in node.reads)  # KeyError = not self-contained
        known.update((value, hash((value, arguments))) for value in node.writes)
    return known


@given(graphs())
def test_crossing_sets_are_what_is_known_before_and_wanted_behind(graph: CutGraph) -> None:
    sets = graph.crossing_sets()
    for position in range(1, len(graph.nodes)):
        assert set(sets[position]) == crossing_by_definition(graph, position)
        assert len(set(sets[position])) == len(sets[position])
    assert sets[0] == graph.inputs
    assert sets[-1] == graph.outputs


@given(graphs())
def test_positions_offered_break_no_bond_and_send_nothing_immovable(graph: CutGraph) -> None:
    for position in range(1, len(graph.nodes)):
        allowed = (
            not any(a < position <= b for a, b in graph.bonds)
            and crossing_by_definition(graph, position) != set()
            and not graph.immovable & crossing_by_definition(graph, position)
        )
        assert (position in graph.cut_positions()) == allowed


@given(graphs(), st.integers(1, 5))
def test_parts_need_only_their_boundary_and_together_make_the_whole(
    graph: CutGraph, blocks: int
) -> None:
    edges = [0, *choose_cuts(graph, blocks), len(graph.nodes)]
    sets = graph.crossing_sets()
    whole = run(graph.nodes, {value: value for value in graph.inputs})
    values: dict[str, object] = {value: value for value in graph.inputs}
    for first, last in itertools.pairwise(edges):
        made = run(graph.nodes[first:last], values)
        values = {value: made[value] for value in sets[last]}
    assert values == {value: whole[value] for value in graph.outputs}


@settings(deadline=None)
@given(graphs(), st.integers(1, 5))
def test_the_choice_is_the_best_of_all(graph: CutGraph, blocks: int) -> None:
    candidates = Candidates.of(graph)
    count = min(blocks, len(candidates.positions) + 1)
    chosen = best_choice(candidates, count)
    assert len(chosen) == count - 1
    assert list(chosen) == sorted(set(chosen))
    best = min(
        candidates.objective(cuts)
        for cuts in itertools.combinations(range(len(candidates.positions)), count - 1)
    )
    assert candidates.objective(chosen) == pytest.approx(best)


def chain(costs: list[float], sizes: list[int]) -> CutGraph:
    nodes = [Node((f"v{i}",), (f"v{i + 1}",), cost) for i, cost in enumerate(costs)]
    values = {f"v{i}": size for i, size in enumerate(sizes)}
    return CutGraph(("v0",), (f"v{len(costs)}",), tuple(nodes), values)


def test_equal_costs_are_cut_evenly() -> None:
    assert choose_cuts(chain([1e6] * 12, [10] * 13), 4) == (3, 6, 9)


def test_a_little_imbalance_is_accepted_for_a_much_smaller_cut() -> None:
    sizes = [1000] * 21
    sizes[11] = 10
    assert choose_cuts(chain([1e6] * 20, sizes), 2) == (11,)


def test_a_tiny_model_gets_fewer_blocks() -> None:
    assert len(choose_cuts(chain([SMALLEST_BLOCK_NS / 4] * 10, [1] * 11), 10)) == 1
    assert choose_cuts(chain([1.0], [1, 1]), 10) == ()
