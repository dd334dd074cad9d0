"""Renders the chart with the real helm and reads what comes out."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "catenary"
EXAMPLES = ROOT / "deploy" / "helm" / "examples"
TOOLS = ROOT / ".venv-deploy" / "bin"
VALUE_FILES = ("", *sorted(path.name for path in EXAMPLES.glob("*.yaml")))
"""The empty one stands for the chart's own values."""

Document = dict[str, Any]


def helm() -> str:
    """Returns the binary; skips the test where there is none."""
    found = shutil.which("helm", path=f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("needs helm; `make deploy-check` brings it")
    return found


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs helm and returns what became of it."""
    return subprocess.run(
        [helm(), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@cache
def rendered_text(values: str, *more: str) -> str:
    """Returns what the chart makes of a file of `EXAMPLES` and helm arguments."""
    files = ["-f", str(EXAMPLES / values)] if values else []
    done = run_helm("template", "cat", str(CHART), "-n", "prod", *files, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(values: str, *more: str) -> list[Document]:
    """Returns the same as documents."""
    return [each for each in yaml.safe_load_all(rendered_text(values, *more)) if each]


def of_kind(documents: list[Document], kind: str) -> dict[str, Document]:
    """Returns the documents of one kind by name."""
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def pod_templates(documents: list[Document]) -> dict[str, Document]:
    """Returns the pod templates of our own processes, by the name of their controller."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in documents
        if each["kind"] in ("Deployment", "StatefulSet")
        and each["spec"]["template"]["spec"]["containers"][0]["name"] not in ("redis", "authority")
    }


def all_pods(documents: list[Document]) -> dict[str, Document]:
    """Returns the specs of all pods, by the name of their controller."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in documents
        if each["kind"] in ("Deployment", "StatefulSet")
    }


def settings_file(documents: list[Document]) -> Document:
    """Returns the catenary.yaml that the pods read."""
    maps = of_kind(documents, "ConfigMap")
    return dict(yaml.safe_load(maps["cat-catenary"]["data"]["catenary.yaml"]))
