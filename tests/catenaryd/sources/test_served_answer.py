"""`catenary deploy hf:..` to a served answer: a mirror, a real cluster, and the real commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import catenary
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from cluster_harness import RunningCluster, environment, running_cluster
from shared_helpers.model_mirror import ModelMirror, model_mirror
from tiny_language_models import greedy, write_folder

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

pytestmark = pytest.mark.timeout(900)
PROMPT, TOKENS = "w11 w57 w101 w23", 12
IDS = [11, 57, 101, 23]


@pytest.fixture(scope="module")
def mirror() -> Iterator[ModelMirror]:
    with model_mirror() as made:
        made.token = "hf_of_the_cluster"
        yield made


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, mirror: ModelMirror
) -> Iterator[RunningCluster]:
    """A cluster without models, whose hub is the mirror."""
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", mirror.url)
        patch.setenv("HF_TOKEN", mirror.token)
        patch.setenv("HF_HOME", str(folder / "hub"))
        with running_cluster(folder / "data", models=(), agents=2) as running:
            yield running


def command(
    cluster: RunningCluster, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs `catenary` as somebody who knows nothing of the hub but the model's name."""
    own = {"CATENARY_TARGET": cluster.grpc, "CATENARY_ADMIN_TARGET": cluster.admin}
    clean = {k: v for k, v in environment().items() if not k.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", "catenary", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**clean, **own},
        timeout=600,
    )


def test_a_model_of_a_hub_is_served_by_one_verb_and_answers_as_its_own_library(
    cluster: RunningCluster, mirror: ModelMirror, tmp_path: Path
) -> None:
    model = write_folder(tmp_path / "published", "qwen3")
    commit = mirror.add_folder("org/tiny-qwen", tmp_path / "published")
    found = command(cluster, tmp_path, "deploy", "hf:org/tiny-qwen", "--session-tokens", "100")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("plan-")
    assert found.stderr.splitlines()[0].startswith(f"hf:org/tiny-qwen@{commit[:12]}: ")
    with catenary.Client(cluster.grpc, admin_target=cluster.admin) as client:
        answer = client.generate("tiny-qwen", PROMPT, max_tokens=TOKENS)
        assert list(answer.token_ids) == greedy(model, IDS, TOKENS)
    repository = ModelRepository(cluster.data_dir / "models")
    source = repository.source(ModelKey("tiny-qwen", "1"))
    assert source is not None
    assert (source.source, source.revision) == ("hf:org/tiny-qwen", commit)
    again = command(cluster, tmp_path, "pull", "hf:org/tiny-qwen", "--json")
    assert json.loads(again.stdout)["known"] is True


def test_an_onnx_file_of_this_machine_is_served_undeployed_and_gone(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    _write_graph(tmp_path / "net.onnx")
    found = command(cluster, tmp_path, "deploy", "./net.onnx", "--slo-ms", "5000")
    assert found.returncode == 0, found.stderr
    rows = np.array([[1.0, -2.0, 3.0, -4.0]], np.float32)
    with catenary.Client(cluster.grpc, admin_target=cluster.admin) as client:
        answer = client.infer("net", {"x": rows})
        assert np.allclose(answer.outputs["y"], np.maximum(rows, 0))
        gone = command(cluster, tmp_path, "undeploy", "net")
        assert gone.stdout == "net:1 is served no longer\n"
        with pytest.raises(catenary.ModelNotFoundError):
            client.infer("net", {"x": rows})
    assert ModelRepository(cluster.data_dir / "models").resolve("net") == ModelKey("net", "1")


def test_a_wrong_source_is_one_sentence(cluster: RunningCluster, tmp_path: Path) -> None:
    for source, text in (
        ("hf:org/nothing", "hf:org/nothing does not exist, or needs a token"),
        ("net9", "did you mean"),
        ("gs://bucket/model", "needs the library gcsfs"),
    ):
        if source.startswith("gs:") and _has("gcsfs"):
            continue
        found = command(cluster, tmp_path, "deploy", source)
        assert found.returncode == 1
        assert text in found.stderr.splitlines()[-1]
        assert "Traceback" not in found.stderr


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def _write_graph(path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(made, path)
