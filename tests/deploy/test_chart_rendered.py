"""The chart as helm renders it: valid for Kubernetes, and true to the processes it starts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from catenary_agent.settings import AgentSettings
from catenary_gateway.settings import GatewaySettings
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.grpc.probes import LIVE, READY
from catenary_services.settings import ProcessSettings, load_settings
from deployed.chart import (
    CHART,
    ROOT,
    TOOLS,
    VALUE_FILES,
    Document,
    all_pods,
    of_kind,
    pod_templates,
    rendered,
    rendered_text,
    run_helm,
    settings_file,
)

pytestmark = pytest.mark.system

CLASSES: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "agent": AgentSettings,
}


def validate(text: str) -> subprocess.CompletedProcess[str]:
    python = TOOLS / "python"
    if not python.exists():
        pytest.skip("needs the schemas; `make deploy-check` brings them")
    return subprocess.run(
        [str(python), str(ROOT / "deploy" / "validate.py"), "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def roles(documents: list[Document]) -> dict[str, tuple[str, Document]]:
    """Returns role and container of every controller of ours."""
    return {
        name: (template["spec"]["containers"][0]["name"], template["spec"]["containers"][0])
        for name, template in pod_templates(documents).items()
    }


@pytest.mark.parametrize("values", VALUE_FILES)
def test_every_manifest_is_valid(values: str) -> None:
    done = validate(rendered_text(values))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 12


def test_kserve_manifests_are_valid() -> None:
    folder = ROOT / "deploy" / "kserve"
    text = "\n---\n".join(path.read_text() for path in sorted(folder.glob("*.yaml")))
    done = validate(text)
    assert done.returncode == 0, done.stderr


BROKEN = {
    "Deployment": ("spec", "template", "spec", "restartPolicyy"),
    "StatefulSet": ("spec", "servicename"),
    "NetworkPolicy": ("spec", "policyType"),
    "ScaledObject": ("spec", "pollingintervall"),
    "TriggerAuthentication": ("spec", "secretTargetRefs"),
    "PodMonitor": ("spec", "podMetricsEndpoint"),
    "PrometheusRule": ("spec", "group"),
    "Certificate": ("spec", "issuerref"),
}


@pytest.mark.parametrize("kind", [*BROKEN, "ServingRuntime"])
def test_the_check_finds_a_misspelt_field(kind: str) -> None:
    if kind == "ServingRuntime":
        file = ROOT / "deploy/kserve/serving-runtime.yaml"
        document = yaml.safe_load(file.read_text())
        document["spec"]["containers"][0]["imagePullPolice"] = "Always"
        where = "imagePullPolice"
    else:
        document = next(iter(of_kind(rendered("production.yaml"), kind).values()))
        *parents, where = BROKEN[kind]
        part: Any = document
        for name in parents:
            part = part[name]
        part[where] = "x"
    done = validate(yaml.safe_dump(document))
    assert done.returncode == 1
    assert where in done.stderr


def test_helm_has_nothing_to_say_about_it() -> None:
    done = run_helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "gateway.replica=3"], "replica"),
        (["--set", "gateway.settings.max_in_flight_request=3"], "max_in_flight_request"),
        (["--set", "scheduler.settings.plan_margin=2"], "plan_margin"),
        (["--set", "gateway.replicas=0"], "replicas"),
        (["--set", "tls.mode=maybe"], "mode"),
        (["--set", "agents[0].device=gpu0", "--set", "agents[0].name=x"], "device"),
        (["--set", "redis.url=http://redis"], "url"),
        (["--set", "agents=null"], "agents"),
        (["--set", "tls.mode=csi"], "tls.issuer.name"),
        (["--set", "tls.mode=secrets"], "tls.secrets"),
        (["--set", "tls.mode=none"], "mode"),
        (["--set", "insecure=true", "--set", "tls.mode=csi"], "contradicts tls.mode"),
        (["--set", "monitoring.podMonitor.enabled=yes please"], "enabled"),
        (["--kube-version", "1.29.0"], "kubeVersion"),
    ],
)
def test_wrong_values_are_refused_and_named(arguments: list[str], said: str) -> None:
    done = run_helm("template", "cat", str(CHART), *arguments)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize("values", VALUE_FILES)
def test_processes_take_the_settings_they_are_given(
    values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = rendered(values)
    file = tmp_path / "catenary.yaml"
    file.write_text(yaml.safe_dump(settings_file(documents)))
    for name, (role, container) in roles(documents).items():
        variables = {each["name"]: each.get("value", "x") for each in container["env"]}
        with monkeypatch.context() as environment:
            for variable, value in variables.items():
                environment.setenv(variable, value.replace("$(POD_NAME)", f"{name}-0"))
            known = {f"CATENARY_{field.upper()}" for field in CLASSES[role].model_fields}
            assert {v for v in variables if v.startswith("CATENARY_")} <= known
            settings = load_settings(CLASSES[role], file=file, section=role, flags={})
        assert settings.health_port == 8005
        assert settings.metrics_port == 8002
        assert f"{role}_id" in settings.model_fields_set
        assert container["command"][-1] == role


@pytest.mark.parametrize("values", VALUE_FILES)
def test_ports_agree(values: str) -> None:
    documents = rendered(values)
    settings = settings_file(documents)
    services = of_kind(documents, "Service")
    ports = {
        name: {port["name"]: port["port"] for port in service["spec"]["ports"]}
        for name, service in services.items()
    }
    gateway, scheduler = settings["gateway"], settings["scheduler"]
    every = {"http": 8000, "grpc": 8001, "metrics": 8002, "admin": 8003}
    assert ports["cat-catenary-gateway-pods"] == every
    assert every["http"] == gateway["http_port"]
    assert every["grpc"] == gateway["grpc_port"]
    assert every["admin"] == gateway["admin_port"]
    assert ports["cat-catenary-scheduler"]["grpc"] == scheduler["port"]
    assert ports["cat-catenary-scheduler"]["control"] == scheduler["control_port"]
    replicas = of_kind(documents, "StatefulSet")["cat-catenary-scheduler"]["spec"]["replicas"]
    domain = "cat-catenary-scheduler.prod.svc"
    named = [f"cat-catenary-scheduler-{n}.{domain}:{scheduler['port']}" for n in range(replicas)]
    assert gateway["scheduler_addresses"] == settings["agent"]["scheduler_addresses"] == named
    for role, container in roles(documents).values():
        inside = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert inside["health"] == settings[role]["health_port"]
        assert inside["metrics"] == settings[role]["metrics_port"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]["grpc"]
            assert asked["port"] == inside["health"]
            assert asked["service"] == (READY if probe == "readinessProbe" else LIVE)


@pytest.mark.parametrize("values", VALUE_FILES)
def test_pods_have_time_to_drain_and_no_rights_they_do_not_need(values: str) -> None:
    documents = rendered(values)
    settings = settings_file(documents)
    for name, template in pod_templates(documents).items():
        pod, container = template["spec"], template["spec"]["containers"][0]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        drain_s = float(
            variables.get("CATENARY_DRAIN_TIMEOUT_S")
            or settings[container["name"]]["drain_timeout_s"]
        )
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        # Draining, then ten seconds at most to stop (catenary_services.lifecycle).
        least_s = sleep.get("seconds", 0) + drain_s + 10
        assert pod["terminationGracePeriodSeconds"] > least_s, name
        assert not any("hostPort" in port for port in container["ports"])
    users = {}
    for name, pod in all_pods(documents).items():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        users[pod["securityContext"]["runAsUser"]] = pod["containers"][0]["name"]
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
            assert "memory" in container["resources"]["limits"], name
    roles_seen = {pod["containers"][0]["name"] for pod in all_pods(documents).values()}
    assert len(users) == len(roles_seen)  # a user for each role


@pytest.mark.parametrize("values", VALUE_FILES)
def test_agents_keep_what_they_fetch_and_see_no_shared_models(values: str) -> None:
    for name, template in pod_templates(rendered(values)).items():
        pod, container = template["spec"], template["spec"]["containers"][0]
        mounts = {each["name"]: each for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        if container["name"] == "agent":
            assert not mounts["models"].get("readOnly"), name
            assert volumes["models"]["emptyDir"] == {}, name
        elif "models" in mounts:
            assert mounts["models"]["readOnly"], name


@pytest.mark.parametrize("values", VALUE_FILES)
def test_selectors_select_their_own_pods_and_no_others(values: str) -> None:
    documents = rendered(values)
    labels = {name: t["metadata"]["labels"] for name, t in pod_templates(documents).items()}

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, own in labels.items() if selector.items() <= own.items()}

    for document in documents:
        name = document["metadata"]["name"]
        chooses = ("Deployment", "StatefulSet", "PodDisruptionBudget")
        if document["kind"] in chooses and name in labels:
            assert chosen(document["spec"]["selector"]["matchLabels"]) == {name}
        elif document["kind"] == "ScaledObject":
            assert document["spec"]["scaleTargetRef"]["name"] in labels
            assert document["spec"]["triggers"][0]["metadata"]["agentPrefix"] == f"{name}-"


def test_gpus_are_asked_for_and_shared_as_the_values_say() -> None:
    sets = of_kind(rendered("gpu-classes.yaml"), "StatefulSet")
    l4 = sets["cat-catenary-agent-l4"]["spec"]["template"]["spec"]
    assert l4["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "/catenary-agent-gpu:" in f"/{l4['containers'][0]['image']}"
    assert l4["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L4"}
    a100 = sets["cat-catenary-agent-a100"]["spec"]["template"]["spec"]
    variables = {each["name"]: each.get("value") for each in a100["containers"][0]["env"]}
    assert variables["CATENARY_PREFILL_CHUNK_TOKENS"] == "1024"
    assert a100["terminationGracePeriodSeconds"] > 600
    halves = sets["cat-catenary-agent-p4-halves"]["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each.get("value") for each in halves["env"]}
    assert variables["CATENARY_VIRTUAL_LEVEL"] == "2"
    assert variables["CATENARY_DEVICE_ID"] == "$(NODE_NAME)/cuda:0"


def test_the_scheduler_scales_what_keda_scales() -> None:
    documents = rendered("production.yaml")
    scheduler = settings_file(documents)["scheduler"]
    assert scheduler["max_agents"] == 16 + 2
    assert scheduler["min_agents"] == scheduler["expected_agents"] == 2 + 2
    assert scheduler["retire_by_ordinal"] is True
    sets = of_kind(documents, "StatefulSet")
    assert "replicas" not in sets["cat-catenary-agent-l4"]["spec"]  # they are KEDA's
    assert "max_agents" not in settings_file(rendered(""))["scheduler"]


def test_identities_follow_the_convention() -> None:
    documents = rendered("production.yaml")
    for name, template in pod_templates(documents).items():
        role = template["spec"]["containers"][0]["name"]
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        asked = volumes["tls"]["csi"]["volumeAttributes"]
        assert asked["csi.cert-manager.io/uri-sans"] == (
            f"spiffe://catenary/prod/{role}/${{POD_NAME}}"
        ), name
        assert f"{role}.prod.catenary.internal" in asked["csi.cert-manager.io/dns-names"]
    certificates = of_kind(documents, "Certificate")
    assert {each["spec"]["uris"][0] for each in certificates.values()} == {
        f"spiffe://catenary/prod/operator/{name}" for name in ("alice", "ci", "keda")
    }


def test_processes_with_certificates_of_their_own_have_names_that_are_known() -> None:
    """The scheduler takes a hello only from whom the certificate names."""
    documents = rendered("own-certificates.yaml")
    for name, template in pod_templates(documents).items():
        container = template["spec"]["containers"][0]
        role = container["name"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["CATENARY_TLS_CERT_FILE"] == f"/catenary/tls/{role}-$(POD_NAME).pem"
        assert variables[f"CATENARY_{role.upper()}_ID"] == "$(POD_NAME)"
        assert name in of_kind(documents, "StatefulSet")
    assert "cat-catenary-gateway" in of_kind(rendered("production.yaml"), "Deployment")
