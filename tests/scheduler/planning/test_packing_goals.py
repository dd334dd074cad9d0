"""What sessions are moved for: model.yaml, deployments, settings and plan documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from catenary_scheduler.agents.deployments import Deployment
from catenary_scheduler.planning import parse_placement, placement_document
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.values.codec import decode_document, encode_document
from catenary_scheduler.storage.values.stored import DeploymentSpec
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.domain.packing import PACKING_GOALS, PackingGoal, packing_goal
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from scheduling_cases.sized_decoders import block_table

LLM = ModelKey("llm", "1")
MANIFEST = ModelManifest(LLM, "decoder", "model.safetensors", 10**9, 4, True)
TABLE = block_table(2)


def deployment(
    *,
    spec: PackingGoal | None,
    manifest: PackingGoal | None,
    usual: PackingGoal,
    decoder: bool = True,
) -> Deployment:
    table = DecoderTable.__new__(DecoderTable) if decoder else None
    return Deployment(
        DeploymentSpec(packing=spec),
        replace(MANIFEST, packing=manifest),
        TABLE,
        table,
        usual_packing=usual,
    )


@pytest.mark.parametrize("goal", PACKING_GOALS)
def test_a_manifest_is_read_as_it_was_written(goal: PackingGoal, tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    repository.write_manifest(replace(MANIFEST, packing=goal))
    assert repository.manifest(LLM).packing == goal


def test_a_manifest_that_does_not_say_leaves_it_to_the_cluster(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    repository.write_manifest(MANIFEST)
    assert repository.manifest(LLM).packing is None


def test_a_bare_off_of_yaml_is_off(tmp_path: Path) -> None:
    folder = tmp_path / "llm" / "1"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text("platform: decoder\nfile: m\npacking: off\n")
    assert ModelRepository(tmp_path).manifest(LLM).packing == "off"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("platform: decoder\nfile: m\npacking: tight\n", "llm:1/model.yaml.packing"),
        ("platform: decoder\nfile: m\npacking: true\n", "llm:1/model.yaml.packing"),
        ("platform: onnxruntime_onnx\nfile: m\npacking: pack\n", "llm:1/model.yaml.packing"),
    ],
)
def test_a_goal_there_is_not_names_its_key(tmp_path: Path, text: str, field: str) -> None:
    folder = tmp_path / "llm" / "1"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=field):
        ModelRepository(tmp_path).manifest(LLM)


def test_a_deployment_beats_the_manifest_and_that_the_cluster() -> None:
    assert deployment(spec="off", manifest="pack", usual="balance").packing == "off"
    assert deployment(spec=None, manifest="pack", usual="balance").packing == "pack"
    assert deployment(spec=None, manifest=None, usual="balance").packing == "balance"
    assert deployment(spec=None, manifest=None, usual="pack", decoder=False).packing == "off"


def test_a_deployment_outlives_the_leader_and_old_records_are_read() -> None:
    spec = DeploymentSpec(5, 2, 3, "balance")
    assert decode_document(encode_document(spec), DeploymentSpec) == spec
    before = decode_document('{"slo_ns": 5, "max_batch": 2, "partitions": 3}', DeploymentSpec)
    assert before == DeploymentSpec(5, 2, 3)


def settings(**said: Any) -> SchedulerSettings:
    return SchedulerSettings(insecure=True, **said)


def test_packing_is_usual_only_where_agents_can_go() -> None:
    assert settings().packing_goal() == "off"
    assert settings(max_agents=4).packing_goal() == "pack"
    assert settings(max_agents=4, packing="off").packing_goal() == "off"
    assert settings(max_agents=4, packing=False).packing_goal() == "off"
    assert settings(packing="balance").packing_goal() == "balance"
    with pytest.raises(ValidationError, match="packing"):
        settings(packing="tight")


def document(**said: Any) -> dict[str, object]:
    chain = {"capacity": 1, "hops": [{"agent": "a", "blocks": [0, 2]}]}
    return {"models": [{"name": "llm", "chains": [chain], **said}]}


@pytest.mark.parametrize("goal", PACKING_GOALS)
def test_a_plan_is_read_as_it_was_written(goal: PackingGoal) -> None:
    placement = parse_placement(document(packing=goal))
    assert placement.models[0].packing == goal
    assert parse_placement(placement_document(placement)) == placement


def test_a_plan_that_does_not_say_moves_nobody_and_a_wrong_one_names_its_key() -> None:
    assert parse_placement(document()).models[0].packing == "off"
    with pytest.raises(InvalidInput, match=r"models\[0\].packing"):
        parse_placement(document(packing="tight"))
    pipeline = {"batch": 1, "partitions": [{"blocks": [0, 2], "agents": ["a"]}]}
    with pytest.raises(InvalidInput, match="packing"):
        parse_placement({"models": [{"name": "m", "pipelines": [pipeline], "packing": "pack"}]})


@pytest.mark.parametrize("value", ["", "on", True, None, 1])
def test_what_is_no_goal_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="here"):
        packing_goal(value, "here")
