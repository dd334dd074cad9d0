"""`catenaryd pull`, as a command: what it prints, and what a wrong word is answered with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_harness import environment
from shared_helpers.model_mirror import ModelMirror, model_mirror

for _module in ("torch", "transformers"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")


def pull(
    mirror: ModelMirror, folder: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    own = {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": mirror.url, **variables}
    return subprocess.run(
        [sys.executable, "-m", "catenaryd", "pull", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**environment(), **own},
        timeout=280,
    )


def test_a_model_is_pulled_by_the_hubs_own_variables(tmp_path: Path) -> None:
    from catenary_agent.decoders.synthetic.random_models import RandomModel, write_random_model

    write_random_model(tmp_path / "made", RandomModel("tiny", 0, "bfloat16", 0))
    with model_mirror() as mirror:
        commit = mirror.add_folder("org/tiny", tmp_path / "made")
        mirror.token = "hf_right"
        source = "hf:org/tiny@main"
        wrong = pull(mirror, tmp_path, source, HF_TOKEN="hf_wrong")
        assert (wrong.returncode, wrong.stdout) == (1, "")
        (line,) = wrong.stderr.splitlines()
        assert line.startswith("hf:org/tiny ")
        right = pull(mirror, tmp_path, source, "--target", "gpu", "--json", HF_TOKEN="hf_right")
        assert right.returncode == 0, right.stderr
        facts = json.loads(right.stdout)
        assert (facts["model"], facts["version"], facts["known"]) == ("tiny", "1", False)
        assert (facts["source"], facts["revision"]) == ("hf:org/tiny", commit)
        told = right.stderr.splitlines()
        assert "to fetch" in told[0]
        assert any(each.endswith("fetched (100%)") for each in told)
        offline = pull(mirror, tmp_path, source, "--json", HF_HUB_OFFLINE="1")
        assert json.loads(offline.stdout)["known"] is True
    assert (tmp_path / ".catenary" / "models" / "tiny" / "1" / "content.json").exists()
    gone = pull(mirror, tmp_path, "hf:org/other")
    assert gone.returncode == 1
    (line,) = gone.stderr.splitlines()
    assert "the hub does not answer" in line
