"""What is made for a release beside the package: digests of images, bills of materials."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from deploy import pin_images, sbom
from deployed.chart import ROOT


def fake_docker(folder: Path, says: str) -> None:
    folder.mkdir()
    docker = folder / "docker"
    docker.write_text(f"#!/bin/sh\n{says}\n")
    docker.chmod(0o755)


def test_every_foreign_image_gets_the_digest_of_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_docker(tmp_path / "bin", f"[ $4 != x ] && echo sha256:{'a1' * 32}")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for name in ("compose.yaml", "Dockerfile"):
        shutil.copy(ROOT / "compose" / name, tmp_path / name)
    base = pin_images.pin(tmp_path)
    assert base == f"python:3.11-slim@sha256:{'a1' * 32}"
    pinned = yaml.safe_load((tmp_path / pin_images.PINNED).read_text())["services"]
    assert set(pinned) == {"redis", "otel-collector", "tempo", "prometheus", "grafana"}
    assert all("@sha256:" in each["image"] for each in pinned.values())


@pytest.mark.parametrize("says", ["exit 1", "echo sha256:short", "echo nothing; exit 0"])
def test_what_is_no_digest_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    fake_docker(tmp_path / "bin", says)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(SystemExit, match="redis:7: the registry gave no digest"):
        pin_images.digest_of("redis:7")


@pytest.mark.system
def test_bills_name_every_pinned_package(tmp_path: Path) -> None:
    if not sbom.TOOL.exists():
        pytest.skip("needs cyclonedx-bom; `make deploy-check` brings it")
    files = sbom.write(tmp_path)
    assert len(files) == len(sbom.LISTS)
    bill = json.loads(files[0].read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "catenary"
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pins = {tuple(line.split("==")) for line in lines if "==" in line and line[0] != "#"}
    named = {(each["name"], each["version"]) for each in bill["components"]}
    assert {(name, version.partition(" ")[0]) for name, version in pins} <= named
    again = sbom.write(tmp_path / "again")
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files]
