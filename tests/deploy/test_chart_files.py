"""What can be said of the chart without helm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from catenary_services.telemetry.metric_table import declared_metrics
from deploy import values_schema
from deployed.chart import CHART, EXAMPLES, ROOT


def values() -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def paths_of(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Returns the places in `value` that a schema of strict objects does not know."""
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    unknown = [f"{path}.{key}" for key in value if key not in schema["properties"]]
    for key, item in value.items():
        if key in schema["properties"]:
            unknown += paths_of(item, schema["properties"][key], f"{path}.{key}")
    return unknown


def test_the_schema_is_that_of_the_settings_as_they_are() -> None:
    fresh = values_schema.FILE.read_text() == values_schema.text()
    assert fresh, "settings changed: run `make deploy-schema`"


def test_every_value_stands_in_values_yaml_and_in_the_schema() -> None:
    schema = json.loads(values_schema.FILE.read_text())
    assert paths_of(values(), schema) == []
    assert set(schema["properties"]) - set(values()) == {"global"}


def test_settings_that_the_chart_makes_are_not_offered_twice() -> None:
    definitions = values_schema.schema()["definitions"]
    offered = {name for each in definitions.values() for name in each["properties"]}
    assert not offered & values_schema._OURS
    assert {"max_in_flight_requests", "scale_attainment", "prefill_chunk_tokens"} <= offered


def test_versions_agree_with_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    assert chart["appVersion"] == chart["version"] == found[1]


def test_alerts_ask_for_metrics_that_exist() -> None:
    text = (CHART / "templates" / "monitoring.yaml").read_text()
    asked = set(re.findall(r"catenary_[a-z_]+", " ".join(re.findall(r"expr: (.+)", text))))
    stems = {f"{each.prefix}_{each.name}" for each in declared_metrics().values()}
    assert {name for name in asked if name.removesuffix("_total") not in stems} == set()


def test_kserve_speaks_both_forms_of_the_open_inference_protocol() -> None:
    runtime = yaml.safe_load((ROOT / "deploy/kserve/serving-runtime.yaml").read_text())
    service = yaml.safe_load((ROOT / "deploy/kserve/inference-service.yaml").read_text())
    assert runtime["spec"]["protocolVersions"] == ["v2", "grpc-v2"]
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] == runtime["spec"]["supportedModelFormats"][0]["name"]


def test_no_example_names_a_value_that_is_not_there() -> None:
    schema = json.loads(values_schema.FILE.read_text())
    for file in Path(EXAMPLES).glob("*.yaml"):
        assert paths_of(yaml.safe_load(file.read_text()), schema) == [], file.name
