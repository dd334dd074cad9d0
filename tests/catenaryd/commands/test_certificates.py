from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from catenary_services.errors import InvalidInput
from catenary_services.security.keys import ApiKeys
from catenary_services.security.x509 import read_certificates
from catenaryd.command_line import cli
from catenaryd.local.local_certificates import LocalCertificates
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster


def certs(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["certs", *map(str, arguments)])


def test_certificates_are_made_once_and_described(tmp_path: Path) -> None:
    wanted = (
        "--out",
        tmp_path,
        "--process",
        "gateway:g,gate.example.org,10.0.0.1",
        "--process",
        "redis:redis",
        "--dns",
        "localhost",
        "--ip",
        "127.0.0.1",
        "--json",
    )
    first, second = (json.loads(certs(*wanted).output) for _ in range(2))
    assert first["authority"]["made"]
    assert not second["authority"]["made"]
    assert [each["made"] for each in first["certificates"]] == [True, True]
    assert [each["made"] for each in second["certificates"]] == [False, False]
    gateway = first["certificates"][0]
    assert gateway["identity"] == "spiffe://catenary/main/gateway/g"
    assert gateway["cert_file"] == str(tmp_path / "gateway-g.pem")
    assert stat.S_IMODE(Path(gateway["key_file"]).stat().st_mode) == 0o600
    assert read_certificates(Path(gateway["cert_file"]))
    everything = json.loads(certs("--out", tmp_path, "--renew", "--json").output)
    assert len(everything["certificates"]) == 2


def test_the_authority_changes_in_three_steps(tmp_path: Path) -> None:
    certs("--out", tmp_path, "--process", "agent:a")
    ca = tmp_path / "ca.pem"
    assert certs("--out", tmp_path, "--authority", "add").exit_code == 0
    assert len(read_certificates(ca)) == 2
    assert "made" in certs("--out", tmp_path, "--authority", "use").output
    assert certs("--out", tmp_path, "--authority", "drop").exit_code == 0
    assert len(read_certificates(ca)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--process", "agent"],
        ["--process", "root:x"],
        ["--process", "agent:a/b"],
        ["--process", "agent:a,gateway.main.catenary.internal"],
        ["--days", "0"],
        ["--authority", "use"],
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    assert isinstance(certs("--out", tmp_path, *arguments).exception, InvalidInput)


def test_a_local_cluster_with_tls_has_an_identity_for_every_process(tmp_path: Path) -> None:
    options = ClusterOptions(agents=2, schedulers=2, tls=True, data_dir=tmp_path)
    children = LocalCluster(options)._settings()
    shown = {name: Path(own["tls_cert_file"]).name for name, (_, own) in children.items()}
    assert shown == {
        "scheduler": "scheduler-scheduler-0.pem",
        "scheduler-1": "scheduler-scheduler-1.pem",
        "gateway": "gateway-gateway-0.pem",
        "agent-0": "agent-agent-0.pem",
        "agent-1": "agent-agent-1.pem",
    }
    assert not any(own["insecure"] for _, own in children.values())
    assert children["gateway"][1]["endpoints_insecure"]
    # What proves an operator is the scheduler's; the endpoints stay as they are configured.
    assert "api_keys_file" not in children["gateway"][1]
    keys = ApiKeys.load(children["scheduler"][1]["api_keys_file"])
    facts = LocalCertificates(tmp_path / "certs").facts()
    secret = Path(facts["api_key_file"])
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert keys.check(secret.read_text().strip()).allows("admin")


def test_another_file_of_keys_is_left_in_force(tmp_path: Path) -> None:
    config = tmp_path / "catenary.yaml"
    config.write_text("scheduler: {api_keys_file: mine.json}")
    options = ClusterOptions(agents=1, tls=True, data_dir=tmp_path, config_file=config)
    assert "api_keys_file" not in LocalCluster(options)._settings()["scheduler"][1]
