"""What the compose files promise, checked without an engine."""

from __future__ import annotations

import importlib.util
import json
import re
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from catenary_agent.settings import AgentSettings
from catenary_gateway.settings import GatewaySettings
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.lifecycle import STOP_TIMEOUT_S
from catenary_services.settings import ProcessSettings
from catenary_services.telemetry.metrics import Metrics
from catenaryd.enrolment.role_tokens import read_secret

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "compose"
OURS = ("gateway", "scheduler-0", "scheduler-1", "agent", "agent-gpu")
ONE_SHOTS = ("setup", "models")
WITHOUT_SHELL = ("otel-collector",)
"""Images that hold one program and nothing to probe it with."""
NOT_SETTINGS = {"CATENARY_AUTHORITY"}
"""Read by compose/image/start_agent.py, which has the agent certified there."""
NAME = re.compile(r"\b(?:catenary|gen_ai)_[a-z0-9_]+")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def services(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = document["services"]
    return found


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of all samples that a process exports."""
    names = set()
    for family in Metrics().registry.collect():
        suffixes = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_sum", "_count"),
            "gauge": ("",),
        }[family.type]
        names |= {family.name + suffix for suffix in suffixes}
    return names


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / "image" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return float(match[1])


def test_there_is_no_version_and_every_profile_is_known(
    document: dict[str, Any], services: dict[str, dict[str, Any]]
) -> None:
    assert "version" not in document
    profiles = {name for each in services.values() for name in each.get("profiles", ())}
    assert profiles == {"gpu", "obs"}


def test_every_lasting_service_is_watched_limited_and_confined(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, each in services.items():
        assert each["mem_limit"], name
        assert each["pids_limit"], name
        assert each["init"] is True, name
        assert each["read_only"] is True, name
        assert each["cap_drop"] == ["ALL"], name
        assert each["security_opt"] == ["no-new-privileges:true"], name
        assert re.fullmatch(r"[1-9][0-9]+:[0-9]+", each["user"]), name
        if name in ONE_SHOTS:
            assert each["restart"] == "no", name
            continue
        assert each["restart"] == "unless-stopped", name
        assert ("test" in each["healthcheck"]) == (name not in WITHOUT_SHELL), name
        assert "stop_grace_period" in each, name


def test_each_role_is_a_user_of_its_own(services: dict[str, dict[str, Any]]) -> None:
    roles = {"scheduler-0": "scheduler", "scheduler-1": "scheduler", "agent-gpu": "agent"}
    roles |= {"setup": "authority"}
    users = {(each["user"], roles.get(name, name)) for name, each in services.items()}
    ours = [user for user, role in users if role not in ("tempo", "otel-collector")]
    assert len(ours) == len(set(ours))


def test_no_two_processes_share_a_private_key(services: dict[str, dict[str, Any]]) -> None:
    """Keys are made in memory of one container; what is shared between containers holds none."""
    for name in OURS:
        each = services[name]
        folder = each["environment"]["CATENARY_TLS_KEY_FILE"].rpartition("/")[0]
        assert any(mount.startswith(f"{folder}:") for mount in each["tmpfs"]), name
        mounted = {volume.split(":")[0] for volume in each["volumes"]}
        assert not mounted & {"authority", "certs-redis"}, name
        assert mounted <= {"keys", "models", "agent-models", "/catenary/run"}, name
    holders = {
        name
        for name, each in services.items()
        if any(volume.startswith("authority:") for volume in each.get("volumes", ()))
    }
    assert holders == {"setup", "authority"}


def test_each_process_has_the_token_of_its_role_alone(services: dict[str, dict[str, Any]]) -> None:
    tokens = {
        name: {secret for secret in each.get("secrets", ()) if secret.endswith("_token")}
        for name, each in services.items()
    }
    for name in OURS:
        assert tokens[name] == {f"{name.partition('-')[0]}_token"}, name
    assert len(tokens["authority"]) == 3
    assert not any(tokens[name] for name in services if name not in (*OURS, "authority"))


def test_one_variable_opens_the_cluster_and_nothing_else_does(
    services: dict[str, dict[str, Any]],
) -> None:
    opened = yaml.safe_load((FOLDER / "compose.insecure.yaml").read_text())["services"]
    assert set(opened) == set(OURS)
    for name in OURS:
        before, after = services[name]["environment"], opened[name]["environment"]
        assert "CATENARY_INSECURE" not in before
        assert after["CATENARY_INSECURE"] == "true"
        tls = {variable for variable in before if variable.startswith("CATENARY_TLS_")}
        assert {variable for variable, value in after.items() if value == ""} >= tls
    assert "CATENARY_INSECURE:+:compose.insecure.yaml" in (FOLDER / "cluster").read_text()


def test_processes_have_time_to_drain_and_stop(services: dict[str, dict[str, Any]]) -> None:
    usual = ProcessSettings.model_fields["drain_timeout_s"].default
    for name in OURS:
        assert seconds(services[name]["stop_grace_period"]) > usual + STOP_TIMEOUT_S
        said = services[name]["environment"]["CATENARY_DRAIN_TIMEOUT_S"]
        assert said == f"${{CATENARY_DRAIN_TIMEOUT_S:-{usual:g}}}"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gateway", GatewaySettings),
        ("scheduler-0", SchedulerSettings),
        ("scheduler-1", SchedulerSettings),
        ("agent", AgentSettings),
        ("agent-gpu", AgentSettings),
    ],
)
def test_every_variable_is_a_setting_of_its_process(
    services: dict[str, dict[str, Any]], name: str, settings: type[ProcessSettings]
) -> None:
    known = {f"CATENARY_{field.upper()}" for field in settings.model_fields} | NOT_SETTINGS
    given = {each for each in services[name]["environment"] if each.startswith("CATENARY_")}
    assert given <= known


def test_variables_of_the_images_are_settings() -> None:
    known = {
        f"CATENARY_{field.upper()}"
        for settings in (GatewaySettings, SchedulerSettings, AgentSettings)
        for field in settings.model_fields
    }
    text = (FOLDER / "Dockerfile").read_text()
    assert set(re.findall(r"\bCATENARY_[A-Z_]+(?==)", text)) <= known


def test_what_a_service_waits_for_is_there(services: dict[str, dict[str, Any]]) -> None:
    for name, each in services.items():
        for other, how in each.get("depends_on", {}).items():
            finished = other in ONE_SHOTS
            wanted = "service_completed_successfully" if finished else "service_healthy"
            assert how["condition"] == wanted, f"{name} -> {other}"
            assert finished or "test" in services[other]["healthcheck"]


def test_everything_mounted_and_every_secret_is_declared(
    document: dict[str, Any], services: dict[str, dict[str, Any]]
) -> None:
    made = set(re.findall(r"[a-z]+(?:_[a-z]+)+", (FOLDER / "make-secrets").read_text()))
    assert set(document["secrets"]) <= made
    for name, each in services.items():
        assert set(each.get("secrets", ())) <= set(document["secrets"]), name
        for volume in each.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("/"):
                assert ":" not in volume  # of this container alone
            elif source.startswith("."):
                assert (FOLDER / source).exists(), volume
            else:
                assert source in document["volumes"], volume


def test_agents_see_no_models_but_those_they_have_fetched(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, each in services.items():
        mounts = [volume.split(":")[:2] for volume in each.get("volumes", ()) if ":" in volume]
        mounted = {mount[0]: mount[1] for mount in mounts}
        if name.startswith("agent"):
            assert mounted["agent-models"] == "/catenary/models"
            assert "models" not in mounted
            assert "models" not in each["depends_on"], name


def test_redis_never_evicts_and_keeps_an_append_only_file(
    services: dict[str, dict[str, Any]],
) -> None:
    flags = dict(line.removeprefix("--").split(" ", 1) for line in services["redis"]["command"])
    assert flags["maxmemory-policy"] == "noeviction"
    assert (flags["appendonly"], flags["appendfsync"]) == ("yes", "everysec")
    assert flags["port"] == "0"
    assert flags["aclfile"] == "/catenary/redis/users.acl"


def test_only_endpoints_and_pages_for_people_are_published(
    services: dict[str, dict[str, Any]], document: dict[str, Any]
) -> None:
    published = {name for name, each in services.items() if each.get("ports")}
    assert published == {"gateway", "grafana", "prometheus"}
    for name in published:
        assert all(
            each.startswith("${CATENARY_BIND:-127.0.0.1}:") for each in services[name]["ports"]
        )
    assert document["networks"]["internal"] == {"internal": True}
    outside = {name for name, each in services.items() if "edge" in each.get("networks", ())}
    assert outside == published


def test_foreign_images_are_pinned(services: dict[str, dict[str, Any]]) -> None:
    for name, each in services.items():
        if "build" not in each:
            assert re.search(r":v?\d+\.\d+\.\d+", each["image"]), name


def test_every_variable_of_the_compose_files_is_explained() -> None:
    used = {"CATENARY_INSECURE"}  # of compose/cluster
    for name in ("compose.yaml", "compose.local.yaml"):
        used |= set(re.findall(r"\$\{([A-Z_]+)", (FOLDER / name).read_text()))
    explained = set(re.findall(r"^#([A-Z_]+)=", (FOLDER / ".env.example").read_text(), re.M))
    assert used == explained


def test_defaults_in_the_example_are_those_of_the_compose_file() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    example = (FOLDER / ".env.example").read_text()
    for name, value in re.findall(r"^#([A-Z_]+)=(.*)$", example, re.M):
        assert set(re.findall(rf"\$\{{{name}:-([^}}]*)\}}", text)) <= {value}, name


def test_alerts_and_dashboard_ask_for_metrics_that_exist(exported: set[str]) -> None:
    texts = [
        rule["expr"]
        for group in yaml.safe_load((FOLDER / "obs/alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    dashboard = json.loads((FOLDER / "obs/grafana/dashboards/catenary.json").read_text())
    texts += [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    asked = {name for text in texts for name in NAME.findall(text)}
    assert len(asked) > 20
    assert asked <= exported


def test_labels_asked_for_are_those_of_the_metric() -> None:
    labels = {
        family.name: set(getattr(family, "_labelnames", ()))
        for family in Metrics().registry.collect()
    }
    assert labels  # the registry is what `exported` reads, too
    known = {"job", "instance", "le"} | _all_labels()
    alerts = (FOLDER / "obs/alerts.yaml").read_text()
    dashboard = (FOLDER / "obs/grafana/dashboards/catenary.json").read_text()
    for group in re.findall(r"by \(([a-z_, ]+)\)", alerts + dashboard):
        assert {name.strip() for name in group.split(",")} <= known, group


def _all_labels() -> set[str]:
    from catenary_services.telemetry.metric_table import declared_metrics

    return {label for metric in declared_metrics().values() for label in metric.labels}


def test_collector_pipelines_use_what_is_configured() -> None:
    config = yaml.safe_load((FOLDER / "obs/collector.yaml").read_text())
    for name, pipeline in config["service"]["pipelines"].items():
        for kind in ("receivers", "processors", "exporters"):
            assert pipeline[kind], name
            assert set(pipeline[kind]) <= set(config[kind]), f"{name} {kind}"
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(":4317")


@pytest.mark.parametrize(
    ("name", "replica"),
    [
        ("catenary-agent-3.catenary_internal", ("agent", 3)),
        ("my_project_agent_12.my_project_internal", ("agent", 12)),
        ("catenary-agent-gpu-2.catenary_internal", ("agent-gpu", 2)),
        ("catenary_agent-gpu_2.catenary_internal", ("agent-gpu", 2)),
        ("5ab3f1c0d2e4", None),
        ("agent", None),
    ],
)
def test_an_agent_is_called_by_the_number_of_its_replica(
    name: str, replica: tuple[str, int] | None
) -> None:
    assert script("start_agent").replica_of(name) == replica


def test_an_agents_settings_follow_from_its_name() -> None:
    environment = {"CATENARY_AUTHORITY": "authority:8006", "CATENARY_DEVICE": "cuda"}
    start = script("start_agent")
    start.settings_of("catenary-agent-gpu-2.x", environment)
    command = start.command_of(environment)
    assert environment == {"CATENARY_AGENT_ID": "agent-gpu-2", "CATENARY_DEVICE": "cuda:1"}
    assert command[:4] == ["catenaryd", "enrol", "agent", "agent-gpu-2"]
    assert command[-3:] == ["--", "catenaryd", "agent"]
    assert start.command_of(environment) == ["catenaryd", "agent"]
    given = {"CATENARY_AGENT_ID": "mine"}
    script("start_agent").settings_of("pod-0", given)
    assert given == {"CATENARY_AGENT_ID": "mine"}


def test_secrets_are_made_once_and_closed_to_others(tmp_path: Path) -> None:
    copy = tmp_path / "make-secrets"
    copy.write_bytes((FOLDER / "make-secrets").read_bytes())
    subprocess.run(["sh", str(copy)], check=True)
    first = {file.name: file.read_text() for file in (tmp_path / "secrets").iterdir()}
    subprocess.run(["sh", str(copy)], check=True)
    again = {file.name: file.read_text() for file in (tmp_path / "secrets").iterdir()}
    assert first == again
    assert len(set(first.values())) == len(first) == 9
    for role in ("gateway", "scheduler", "agent"):
        assert len(read_secret(tmp_path / "secrets" / f"{role}_token")) == 48
    assert all(len(text.strip()) >= 35 for text in first.values())
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700


def test_a_clear_message_where_no_engine_answers(tmp_path: Path) -> None:
    copy = tmp_path / "cluster"
    copy.write_bytes((FOLDER / "cluster").read_bytes())
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("docker", "docker-compose"):
        (tools / name).write_text(
            '#!/bin/sh\n[ "$1" = compose ] && exit 0\n[ "$1" = buildx ] && exit 1\nexit 1\n'
        )
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["sh", str(copy), "up"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{tools}:/usr/bin:/bin", "DOCKER_HOST": "unix:///nowhere.sock"},
    )
    assert done.returncode == 1
    assert "no Docker engine answers at unix:///nowhere.sock" in done.stderr


def test_dependencies_are_listed_without_the_project(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "image" / "requirements_of.py"), "platform"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    names = {re.split(r"[\[<>=]", line)[0] for line in done.stdout.split()}
    assert {"grpcio", "redis", "numpy", "highspy"} <= names
    assert not {"torch", "onnxruntime"} & names
