"""GuideLLM, unmodified, completes a short run against `catenaryd up`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from catenary_services.models.model_repository import ModelRepository
from cluster_harness import ROOT, running_cluster
from language_model import install

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

MODEL = "smollm2-135m"
GUIDELLM = ROOT / ".venv-tools" / "bin" / "guidellm"
REQUESTS = 8


@pytest.mark.skipif(not GUIDELLM.exists(), reason="`make test-system` installs .venv-tools")
def test_guidellm_completes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = install(tmp_path / "models")
    folder = ModelRepository(tmp_path / "models").folder(key)
    report = tmp_path / "guidellm.json"
    with running_cluster(tmp_path, models=(MODEL,)) as cluster:
        run = subprocess.run(
            [
                str(GUIDELLM),
                "run",
                "--backend",
                f"kind=openai_http,target={cluster.http},model={MODEL}",
                "--profile",
                "kind=concurrent,streams=2",
                "--constraint",
                f"kind=max_requests,count={REQUESTS}",
                "--tokenizer",
                f"kind=huggingface_auto,model={folder}",
                "--data",
                "kind=synthetic_text,prompt_tokens=48,output_tokens=16",
                "--output",
                f"kind=json,path={report}",
                "--disable-console-interactive",
            ],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    benchmark = json.loads(report.read_text())["benchmarks"][0]
    totals = benchmark["metrics"]["request_totals"]
    with capsys.disabled():
        first = benchmark["metrics"]["time_to_first_token_ms"]["successful"]["median"]
        between = benchmark["metrics"]["inter_token_latency_ms"]["successful"]["median"]
        print(f"\nguidellm: {totals}, first token {first:.0f} ms, then {between:.1f} ms per token")
    assert totals["successful"] == REQUESTS
    assert totals["errored"] == 0
