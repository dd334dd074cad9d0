from __future__ import annotations

import copy
from typing import Any

import pytest

from catenary_scheduler.planning import (
    Placement,
    PlacementDefaults,
    parse_placement,
    placement_document,
)
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput

DOCUMENT: dict[str, Any] = {
    "models": [
        {
            "name": "lite",
            "version": "2",
            "slo_ms": 12.5,
            "float16_boundaries": False,
            "pipelines": [
                {
                    "batch": 4,
                    "partitions": [
                        {"blocks": [0, 4], "agents": ["agent-0"]},
                        {"blocks": [4, 10], "agents": ["agent-1", "agent-2"]},
                    ],
                }
            ],
        }
    ]
}


def test_a_document_is_read_and_written_back_equal() -> None:
    placement = parse_placement(DOCUMENT)
    assert placement_document(placement) == DOCUMENT
    (model,) = placement.models
    assert model.model == ModelKey("lite", "2")
    assert model.slo_ns == 12_500_000
    assert parse_placement(placement_document(placement)) == placement


def test_what_is_left_out_comes_from_the_defaults_of_the_model() -> None:
    document = copy.deepcopy(DOCUMENT)
    for name in ("version", "slo_ms", "float16_boundaries"):
        del document["models"][0][name]
    own = PlacementDefaults(version="7", slo_ns=5, float16_boundaries=False)
    placement: Placement = parse_placement(document, PlacementDefaults(by_name={"lite": own}))
    (model,) = placement.models
    assert (model.model.version, model.slo_ns, model.float16_boundaries) == ("7", 5, False)
    assert parse_placement(document).models[0].model.version == "1"


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ((), [], "document"),
        (("models",), None, "models"),
        (("models",), [], "models"),
        (("models", 0, "name"), 3, "models[0].name"),
        (("models", 0, "slo_ms"), 0, "models[0].slo_ms"),
        (("models", 0, "slo_ms"), float("nan"), "models[0].slo_ms"),
        (("models", 0, "slo_ms"), "fast", "models[0].slo_ms"),
        (("models", 0, "float16_boundaries"), "yes", "models[0].float16_boundaries"),
        (("models", 0, "colour"), "red", "models[0].colour"),
        (("models", 0, "pipelines", 0, "batch"), 0, "models[0].pipelines[0].batch"),
        (("models", 0, "pipelines", 0, "batch"), True, "models[0].pipelines[0].batch"),
        (
            ("models", 0, "pipelines", 0, "partitions", 0, "blocks"),
            [0],
            "models[0].pipelines[0].partitions[0].blocks",
        ),
        (
            ("models", 0, "pipelines", 0, "partitions", 0, "blocks"),
            [1, 4],
            "models[0].pipelines[0].partitions[0].blocks[0]",
        ),
        (
            ("models", 0, "pipelines", 0, "partitions", 1, "blocks"),
            [5, 10],
            "models[0].pipelines[0].partitions[1].blocks[0]",
        ),
        (
            ("models", 0, "pipelines", 0, "partitions", 1, "blocks"),
            [4, 4],
            "models[0].pipelines[0].partitions[1].blocks[1]",
        ),
        (
            ("models", 0, "pipelines", 0, "partitions", 1, "agents"),
            ["a", "a"],
            "models[0].pipelines[0].partitions[1].agents",
        ),
        (
            ("models", 0, "pipelines", 0, "partitions", 1, "agents"),
            "agent-1",
            "models[0].pipelines[0].partitions[1].agents",
        ),
    ],
)
def test_errors_name_the_field(path: tuple[Any, ...], value: object, field: str) -> None:
    document: Any = copy.deepcopy(DOCUMENT)
    if path:
        parent = document
        for part in path[:-1]:
            parent = parent[part]
        parent[path[-1]] = value
    else:
        document = value
    with pytest.raises(InvalidInput) as caught:
        parse_placement(document)
    assert caught.value.field == field


def test_missing_fields_and_repeated_models_are_named() -> None:
    document = copy.deepcopy(DOCUMENT)
    del document["models"][0]["pipelines"][0]["batch"]
    with pytest.raises(InvalidInput) as caught:
        parse_placement(document)
    assert caught.value.field == "models[0].pipelines[0].batch"
    with pytest.raises(InvalidInput) as caught:
        parse_placement({"models": DOCUMENT["models"] * 2})
    assert caught.value.field == "models[1].name"
