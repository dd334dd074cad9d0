"""Machines with copies of the models of their own, some of which are not what the others have.

Every agent has a repository of its own. Of the two that classify photographs, one has a byte of the
weights altered; of the chain that generates text, one agent has an altered copy without a record,
so that its copy is whole by itself and another. Neither serves, both are named, and what the rest
answers is right. Once the copies are mended, both serve.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import catenary
from catenary.types import AgentInfo, ClusterStatus
from catenary_services.content.record import RECORD_FILE
from catenary_services.domain.ids import ModelKey
from catenaryd.demo.demo_models import preprocess, sample_photographs
from fault_cluster import IMAGES, TEXTS, fault_cluster, shared_models, until_status

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

IMAGE_FILE = Path(IMAGES) / "1" / "model.onnx"
TEXT_FILE = Path(TEXTS) / "1" / "onnx-fp32" / "model.onnx.data"
AGENTS = tuple(f"agent-{number}" for number in range(5))
PROMPT = [(7 * i) % 150 + 3 for i in range(9)]


def own_copies(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the settings of agents with repositories of their own, and real devices."""
    source = shared_models()
    overrides: dict[str, dict[str, Any]] = {}
    for name in AGENTS:
        copy = folder / "machines" / name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".parts"))
        overrides[name] = {"model_repository": copy, "device": "cpu"}
    return overrides


def alter(file: Path) -> None:
    """Changes one byte in the middle, where weights are."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def agent_of(status: ClusterStatus, name: str) -> AgentInfo:
    return next(each for each in status.agents if each.agent_id == name)


def refusals(agent: AgentInfo) -> list[str]:
    return [each.why for each in agent.impairments if each.kind == "cannot_load"]


def odd_ones(status: ClusterStatus) -> set[str]:
    return {each.agent_id for each in status.agents if refusals(each)}


def hosting(status: ClusterStatus) -> set[str]:
    return {each.agent_id for each in status.agents if each.partitions}


async def answers(client: catenary.AsyncClient) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns what a photograph and a prompt are answered with, several times alike."""
    image = preprocess(sample_photographs()["chelsea"])
    rows = [(await client.infer(IMAGES, {"image": image}))["logits"] for _ in range(4)]
    texts = [
        (await client.generate(TEXTS, PROMPT, max_tokens=12, ignore_eos=True)).token_ids
        for _ in range(3)
    ]
    for row in rows[1:]:
        np.testing.assert_allclose(row, rows[0], rtol=1e-3, atol=1e-3)
    assert texts[1:] == texts[:-1]
    return rows[0], texts[0]


async def test_agents_with_other_weights_serve_nothing_until_their_copies_are_mended(
    tmp_path: Path,
) -> None:
    overrides = own_copies(tmp_path)
    machines = tmp_path / "machines"
    alter(machines / "agent-1" / IMAGE_FILE)
    alter(machines / "agent-3" / TEXT_FILE)
    (machines / "agent-3" / TEXTS / "1" / RECORD_FILE).unlink()
    wait = ("agent-0", "agent-4")
    async with (
        fault_cluster(tmp_path, overrides=overrides, wait=wait) as cluster,
        cluster.client() as client,
    ):
        status = await until_status(
            client, lambda found: odd_ones(found) == {"agent-1", "agent-3"}, 60.0
        )
        assert {"agent-1", "agent-3"}.isdisjoint(hosting(status))
        said = refusals(agent_of(status, "agent-1"))[0]
        assert f"{ModelKey(IMAGES, '1')}/model.onnx on" in said
        said = refusals(agent_of(status, "agent-3"))[0]
        assert f"{ModelKey(TEXTS, '1')}" in said
        before = await answers(client)
        for name, file in (("agent-1", IMAGE_FILE), ("agent-3", TEXT_FILE)):
            shutil.rmtree(machines / name / file.parts[0])
            shutil.copytree(
                shared_models() / file.parts[0],
                machines / name / file.parts[0],
                ignore=shutil.ignore_patterns(".parts"),
            )
        status = await until_status(
            client,
            lambda found: not odd_ones(found) and hosting(found) == set(AGENTS),
            120.0,
        )
        after = await answers(client)
        np.testing.assert_allclose(after[0], before[0], rtol=1e-3, atol=1e-3)
        assert after[1] == before[1]
