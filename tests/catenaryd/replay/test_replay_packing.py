"""`catenaryd replay packing`: the golden sequences of Mell, and what a case file may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from catenary_scheduler.packing.mell.sizes import LARGE, MEDIUM, SMALL, is_well_filled, kind_of
from catenary_services.errors import InvalidInput
from catenaryd.command_line import cli
from reference_data import reference

ROOT = Path(__file__).resolve().parents[3]
SEQUENTIAL = {"C": 100, "mode": "sequential", "steps": [{"op": ["allocate", 1, 60]}]}
BATCHED = {
    "C": 100,
    "mode": "batched",
    "steps": [{"depart": [], "update": [], "allocate": [[1, 60], [2, 40]]}],
}


def golden() -> list[dict[str, Any]]:
    text = reference("llm/mell_sequences.json").read_text()
    cases: list[dict[str, Any]] = json.loads(text)["cases"]
    return cases


def run(cases: Any, *arguments: str) -> Result:
    text = json.dumps({"cases": cases})
    return CliRunner().invoke(cli, ["replay", "packing", "-", *arguments], input=text)


def answers(cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Returns the steps of cases that do not say what is expected."""
    bare = []
    for case in cases:
        kept: dict[str, Any] = {key: case[key] for key in ("C", "mode", "ops") if key in case}
        if "steps" in case:
            kept["steps"] = [
                {key: value for key, value in step.items() if key != "expect"}
                for step in case["steps"]
            ]
        bare.append(kept)
    outcome = run(bare, "--json")
    assert outcome.exit_code == 0, outcome.exception
    return [result["steps"] for result in json.loads(outcome.stdout)["results"]]


def as_sets(partition: list[list[int]]) -> set[frozenset[int]]:
    return {frozenset(requests) for requests in partition}


def test_every_exact_sequence_ends_in_the_expected_partition_with_as_few_migrations() -> None:
    cases = [case for case in golden() if case["exact"]]
    assert len(cases) >= 18
    for case, steps in zip(cases, answers(cases), strict=True):
        for number, (step, mine) in enumerate(zip(case["steps"], steps, strict=True)):
            expected, where = step["expect"], (case["name"], number)
            assert mine["gpus"] == expected["gpus"], where
            assert as_sets(mine["partition"]) == as_sets(expected["partition"]), where
            assert expected["migrations_min"] <= mine["migrations"] <= expected["migrations"], where


def test_the_other_sequences_keep_the_properties_and_the_bound_after_every_operation() -> None:
    cases = [case for case in golden() if not case["exact"]]
    assert len(cases) >= 4
    for case, steps in zip(cases, answers(cases), strict=True):
        assert len(steps) == len(case["ops"]) == len(case["per_step"])
        sizes: dict[int, int] = {}
        before: dict[int, frozenset[int]] = {}
        for number, (operation, step) in enumerate(zip(case["ops"], steps, strict=True)):
            if operation[0] == "depart":
                del sizes[operation[1]]
            else:
                sizes[operation[1]] = operation[2]
            where = (case["name"], number)
            after = {request: gpu for gpu in as_sets(step["partition"]) for request in gpu}
            assert sorted(request for gpu in step["partition"] for request in gpu) == sorted(sizes)
            assert not broken(step["partition"], sizes, case["C"]), where
            # No request of all these is moved so often that counting groups once would matter.
            assert step["migrations"] <= case["max_item_moves"], where
            assert step["migrations"] >= parted(before, after), where
            bound = 4 / 3 * case["per_step"][number]["lower_bound"] + case["additive"]
            assert step["gpus"] <= bound, where
            before = after


def parted(before: dict[int, frozenset[int]], after: dict[int, frozenset[int]]) -> int:
    """Returns a number of requests that must have moved: those with none of their old fellows."""
    moved = 0
    for gpu in set(before.values()):
        groups = {after[request] for request in gpu if request in after}
        moved += max(0, len(groups) - 1)
    return moved


def broken(partition: list[list[int]], sizes: dict[int, int], capacity: int) -> list[str]:
    """Says which of P1-P5 fail, from sizes alone; each class may have one exception."""
    gpus = [sorted((sizes[request] for request in gpu), reverse=True) for gpu in partition]
    wrong = [f"{gpu} overflows" for gpu in gpus if sum(gpu) > capacity]
    kinds = [[kind_of(size, capacity) for size in gpu] for gpu in gpus]
    of = {
        kind: [gpu for gpu, own in zip(gpus, kinds, strict=True) if own[0] == kind]
        for kind in (1, SMALL, MEDIUM, LARGE)
    }

    def count(gpu: list[int], kind: int) -> int:
        return sum(kind_of(size, capacity) == kind for size in gpu)

    single = [gpu for gpu in of[MEDIUM] if count(gpu, MEDIUM) != 2]
    few = [gpu for gpu in of[SMALL] if count(gpu, SMALL) != 3]
    low = [gpu for gpu in of[1] if not is_well_filled(sum(gpu), capacity)]
    wrong += [f"two {lot}" for lot in (single, few, low) if len(lot) > 1]
    middles = [
        size
        for gpu in of[SMALL] + of[MEDIUM]
        for size in gpu
        if kind_of(size, capacity) in (SMALL, MEDIUM)
    ]
    for gpu in of[LARGE]:
        alone = not count(gpu, SMALL) and not count(gpu, MEDIUM)
        if alone and any(gpu[0] + size <= capacity for size in middles):
            wrong.append(f"something fits beside the L of {gpu}")
    if of[1]:
        full = of[LARGE] + [gpu for gpu in of[MEDIUM] if gpu not in single]
        wrong += [f"{gpu} is poor" for gpu in full if not is_well_filled(sum(gpu), capacity)]
    return wrong


def test_people_get_a_line_for_each_case() -> None:
    outcome = run([SEQUENTIAL, {**BATCHED, "name": "again"}])
    assert outcome.output == (
        "case 0: 1 steps, 0 migrations, 1 GPUs at most and 1 at the end\n"
        "again: 1 steps, 0 migrations, 1 GPUs at most and 1 at the end\n"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"C": 0}, "C: must be 1 or more"),
        ({"mode": "slow"}, "mode: is neither"),
        ({"steps": None}, "ops: is missing"),
        ({"steps": [{"op": ["grow", 1, 2]}]}, "steps[0].op: is no 'allocate'"),
        ({"steps": [{"op": ["allocate", 1]}]}, "steps[0].op: must have 2 numbers"),
        ({"steps": [{"op": ["allocate", 1, 2.5]}]}, "steps[0].op: must have whole numbers"),
        ({"steps": [{"op": ["allocate", 1, 101]}]}, "a session of 101 does not fit a GPU of 100"),
        ({"steps": [{"op": ["allocate", 1, 0]}]}, "a session of 0 does not fit"),
        ({"steps": [{"op": ["depart", 7]}]}, "steps[0].op: departed: session 7 is not known"),
        ({"steps": [{"op": "depart"}]}, "steps[0].op: must be a list"),
        ({"mode": "batched"}, "steps[0].depart: is missing"),
        ({"steps": None, "ops": [3]}, "ops[0]: must be a list"),
        (
            {
                "mode": "batched",
                "steps": [{"depart": [], "update": [], "allocate": [[1, 2], [1, 3]]}],
            },
            "steps[0].allocate: names request 1 twice",
        ),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    outcome = run([SEQUENTIAL, {**SEQUENTIAL, **change}], "--json")
    assert isinstance(outcome.exception, InvalidInput)
    assert outcome.exception.message.startswith("cases[1].")
    assert message in outcome.exception.message
    assert outcome.stdout == ""
