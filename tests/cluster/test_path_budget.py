"""How many files of the project one warm request enters, in all processes of a real cluster.

Whoever looks for a fault reads what a request enters; and every file on the way is a hand-over that
costs time. `design` aims at 45 files for a photograph and 70 for a chat. The budgets below are what
is reached: lower them when a path gets shorter, and do not raise them. The chat's was 117 before
answers had calls, forms, log probabilities and company (ADRs 0044 to 0047); the photograph's was 76
while what 16 files of ours do to serve gRPC (ADR 0056) was done in C++, which nobody counts.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import numpy as np
import pytest

import catenary
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster
from deployed.path_trace import PathTracer, RequestPath, traced_environment
from fault_cluster import IMAGES, TEXTS, shared_models

pytestmark = pytest.mark.timeout(600)  # the first test of all imports the models

PHOTOGRAPH_FILES = 91
CHAT_FILES = 132
FEWEST_FILES = 10
"""What every process of the cluster enters at least, in its endpoint alone."""
CHAT_TEMPLATE = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
WARM_UPS = 3
RECORDINGS = 20


@asynccontextmanager
async def _cluster(folder: Path) -> AsyncIterator[LocalCluster]:
    models = folder / "models"
    shutil.copytree(shared_models(), models)
    (models / TEXTS / "1" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    ModelRepository(models).record_content(ModelKey(TEXTS, "1"))
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"models": [_images(models), _texts()]}))
    cluster = LocalCluster(
        ClusterOptions(
            agents=1,
            models=(IMAGES, TEXTS),
            plan_file=plan,
            grpc_port=0,
            http_port=0,
            data_dir=folder,
            extra={"agent": {"threads": 1}},
        )
    )
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


def _images(models: Path) -> dict[str, object]:
    blocks = ModelRepository(models).block_table(ModelKey(IMAGES, "1")).blocks
    partition = {"blocks": [0, blocks], "agents": ["agent-0"]}
    return {"name": IMAGES, "pipelines": [{"batch": 1, "partitions": [partition]}]}


def _texts() -> dict[str, object]:
    hops = [{"agent": "agent-0", "blocks": [0, 6]}]
    return {"name": TEXTS, "chains": [{"capacity": 4, "hops": hops}]}


def _chat(connection: http.client.HTTPConnection) -> None:
    """Asks over HTTP for a streamed answer, and reads all of it."""
    question = {
        "model": TEXTS,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": True,
    }
    body = json.dumps(question)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, text
    assert text.endswith("data: [DONE]\n\n"), text


async def _trace(folder: Path) -> dict[str, RequestPath]:
    async with _cluster(folder) as cluster:
        pids = {name: child.pid for name, child in cluster.children.items() if child.pid}
        tracer = PathTracer(folder, pids)

        def record() -> dict[str, RequestPath]:
            picture = np.zeros((1, 3, 224, 224), np.float32)
            http_door = http.client.HTTPConnection("127.0.0.1", cluster.http_port, timeout=60)
            with catenary.Client(f"127.0.0.1:{cluster.grpc_port}") as client, closing(http_door):
                requests: dict[str, Callable[[], object]] = {
                    "photograph": lambda: client.infer(IMAGES, {"image": picture}),
                    "chat": lambda: _chat(http_door),
                }
                for _ in range(WARM_UPS):
                    for ask in requests.values():
                        ask()
                return {kind: tracer.path_of(ask, RECORDINGS) for kind, ask in requests.items()}

        return await asyncio.to_thread(record)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RequestPath]]:
    folder = tmp_path_factory.mktemp("path")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in traced_environment(folder).items():
            patch.setitem(os.environ, name, value)
        yield asyncio.run(_trace(folder))


@pytest.mark.parametrize(
    ("request_kind", "budget"), [("photograph", PHOTOGRAPH_FILES), ("chat", CHAT_FILES)]
)
def test_a_warm_request_enters_no_more_files_than_its_budget(
    paths: dict[str, RequestPath], request_kind: str, budget: int
) -> None:
    path = paths[request_kind]
    print(f"\n{request_kind}: {path}")
    # A tracer that records nothing keeps every budget.
    assert all(len(path.files(process)) >= FEWEST_FILES for process in path.functions), str(path)
    assert len(path.files()) <= budget, str(path)
