"""The chart without values is closed: certificates, keys, passwords, policies; one value opens it."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from catenary_services.security.key_file import digest_of, read_keys
from catenaryd.enrolment.role_tokens import read_secret
from deployed.chart import (
    CHART,
    ROOT,
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

CHECKOV = ROOT / ".venv-checkov" / "bin" / "checkov"
SKIPPED = {
    "CKV_K8S_11": "limits of CPU throttle a process that answers in milliseconds; requests are set",
    "CKV_K8S_15": "pullPolicy IfNotPresent: a tag of ours is never moved; the value can be changed",
    "CKV_K8S_21": "the namespace is that of `helm -n`, which manifests do not repeat",
    "CKV_K8S_43": "who builds the images knows the digest: the value image.digest",
    "CKV_K8S_35": "the one Secret in an environment is KEDA's key, which KEDA reads nowhere else",
}
"""Checks that are left out, each with the reason."""


def secret(documents: list[Document], name: str) -> dict[str, str]:
    data = of_kind(documents, "Secret")[name]["data"]
    return {key: base64.b64decode(text).decode() for key, text in data.items()}


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (*pod["containers"], *pod.get("initContainers", ()))


def mounted(pod: dict[str, Any], container: dict[str, Any], secret_name: str) -> list[str]:
    """Returns the keys of a Secret that a container sees; "*" for all of them."""
    found = []
    names = {each["name"] for each in container["volumeMounts"]}
    for volume in pod["volumes"]:
        source = volume.get("secret", {})
        if volume["name"] in names and source.get("secretName") == secret_name:
            found += [item["key"] for item in source.get("items", [{"key": "*"}])]
    return found


def test_every_process_has_a_certificate_and_asks_for_keys() -> None:
    settings = settings_file(rendered(""))
    for role in ("gateway", "scheduler", "agent"):
        assert settings[role].get("insecure") is None
        assert settings[role]["tls_key_file"] == "/catenary/tls/tls.key"
    for role in ("gateway", "scheduler"):
        assert settings[role]["api_keys_file"] == "/catenary/keys/keys.json"
    assert settings["scheduler"]["redis_url"].startswith("rediss://")
    assert settings["scheduler"]["redis_password_file"] == "/catenary/redis/password"


def test_keys_and_tokens_that_are_made_are_good(tmp_path: Path) -> None:
    documents = rendered("")
    keys = secret(documents, "cat-catenary-keys")
    file = tmp_path / "keys.json"
    file.write_text(keys["keys.json"])
    known = {each.digest: each.scopes for each in read_keys(file)}
    for name, scope in (("api-key", "infer"), ("admin-key", "*"), ("view-key", "view")):
        assert scope in {str(each) for each in known[digest_of(keys[name])]}
        assert len(keys[name]) >= 40
    for role, text in secret(documents, "cat-catenary-tokens").items():
        (tmp_path / role).write_text(text)
        assert read_secret(tmp_path / role) == text
    again = secret(rendered("", "--set", "cluster=other"), "cat-catenary-keys")
    assert not set(keys.values()) & set(again.values())


def test_a_token_is_in_no_container_that_serves_and_each_pod_has_its_own_key() -> None:
    for name, pod in all_pods(rendered("")).items():
        role = pod["containers"][0]["name"]
        if role == "authority":
            continue
        [enrols] = pod["initContainers"]
        assert mounted(pod, enrols, "cat-catenary-tokens") == [role], name
        assert not mounted(pod, pod["containers"][0], "cat-catenary-tokens"), name
        [volume] = [each for each in pod["volumes"] if each["name"] == "tls"]
        assert volume["emptyDir"]["medium"] == "Memory"  # no Secret, no claim: a key of its own
        [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "tls"]
        assert mount["readOnly"], name
        assert enrols["command"][2:4] == [role, "$(POD_NAME)"]
        # Redis reads its certificate when it starts; the others' are renewed.
        assert (enrols.get("restartPolicy") == "Always") == (role != "redis")


def test_keys_themselves_are_in_no_pod() -> None:
    for name, pod in all_pods(rendered("")).items():
        for container in containers(pod):
            assert set(mounted(pod, container, "cat-catenary-keys")) <= {"keys.json"}, name


def test_only_who_must_talk_may() -> None:
    documents = rendered("")
    policies = of_kind(documents, "NetworkPolicy")
    pods = {
        each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        for each in documents
        if each["kind"] in ("Deployment", "StatefulSet")
    }
    talks = {}
    for policy in policies.values():
        chosen = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        peers: set[str] = set()
        for rule in policy["spec"]["ingress"]:
            if "from" not in rule:
                assert [port["port"] for port in rule["ports"]] == ["http", "grpc"]
                peers.add("everybody")
            for peer in rule.get("from", ()):
                peers.add(peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"])
        talks[chosen] = peers
    assert talks.keys() == pods
    assert talks == {
        "gateway": {"everybody", "agent"},
        "scheduler": {"gateway", "agent"},
        "agent": {"gateway", "agent"},
        "redis": {"scheduler"},
        "authority": {"gateway", "scheduler", "agent", "redis"},
    }


def test_redis_asks_for_a_password_and_a_certificate() -> None:
    pod = all_pods(rendered(""))["cat-catenary-redis"]
    command = " ".join(pod["containers"][0]["args"])
    for flag in ("requirepass", "--port 0", "--tls-port 6379", "--tls-auth-clients yes"):
        assert flag in command
    assert "protected-mode no" not in command


def test_names_that_clients_dial_are_in_the_certificates() -> None:
    authority = all_pods(rendered(""))["cat-catenary-authority"]["containers"][0]
    names = {each.split("=", 2)[1]: each for each in authority["command"] if "--name" in each}
    assert "cat-catenary-gateway.prod.svc" in names["gateway"]
    assert "localhost" in names["gateway"]
    url = settings_file(rendered(""))["scheduler"]["redis_url"]
    assert url.split("/")[2].partition(":")[0] in names["redis"].split("=", 2)[2].split(",")


def test_insecure_is_the_one_value_that_opens_it() -> None:
    opened = rendered("insecure.yaml")
    settings = settings_file(opened)
    assert all(settings[role]["insecure"] is True for role in settings)
    assert not of_kind(opened, "NetworkPolicy")
    assert "cat-catenary-keys" not in of_kind(opened, "Secret")
    assert "api_keys_file" not in settings["gateway"]
    assert not any("initContainers" in t["spec"] for t in pod_templates(opened).values())
    for more in ("networkPolicy.enabled=false", "redis.bundled.enabled=false"):
        closed = settings_file(rendered("", "--set", more))
        assert all("insecure" not in closed[role] for role in closed)


def test_the_notes_say_how_to_get_in_and_warn_of_what_is_open() -> None:
    install = ("install", "cat", str(CHART), "--dry-run=client", "-n", "prod")
    closed = run_helm(*install)
    assert closed.returncode == 0, closed.stderr
    assert "get secret cat-catenary-keys" in closed.stdout
    assert "exec cat-catenary-authority-0 -- cat /catenary/authority/ca.pem" in closed.stdout
    assert "WARNING: insecure" not in closed.stdout
    opened = run_helm(*install, "--set", "insecure=true")
    assert "WARNING: insecure" in opened.stdout
    assert "get secret" not in opened.stdout


def test_checkov_finds_nothing(tmp_path: Path) -> None:
    if not CHECKOV.exists():
        pytest.skip("needs checkov; `make deploy-check` brings it")
    for values in ("", "production.yaml"):
        (tmp_path / f"{values or 'usual'}.yaml").write_text(rendered_text(values))
    done = subprocess.run(
        [
            *[str(CHECKOV), "-d", str(tmp_path), "--framework", "kubernetes", "--skip-download"],
            *["--compact", "-o", "json", "--skip-check", ",".join(SKIPPED)],
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = json.loads(done.stdout)
    failed = [
        f"{each['check_id']} {each['check_name']}: {each['resource']}"
        for each in report["results"]["failed_checks"]
    ]
    assert failed == []
    assert report["summary"]["passed"] > 600
