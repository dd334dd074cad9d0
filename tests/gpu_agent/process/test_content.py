"""Agent processes whose copy of a model is not what it should be."""

from __future__ import annotations

import json
import shutil

import pytest

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.content.record import RECORD_FILE
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository

TINY = ModelKey("tiny", "1")


@pytest.fixture
def own(bench, tmp_path) -> ModelRepository:
    """A copy of the model, without what was cached of it; the agents of this test use it."""
    bench.repository.record_content(TINY)
    shutil.copytree(
        bench.repository.root, tmp_path / "own", ignore=shutil.ignore_patterns(".parts")
    )
    bench.repository = ModelRepository(tmp_path / "own")
    return bench.repository


def alter(repository: ModelRepository) -> None:
    file = repository.model_file(TINY)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


async def test_what_was_loaded_is_told_with_its_digest(bench, own):
    scheduler = await bench.scheduler()
    agent = await bench.agent(scheduler.port)
    await scheduler.order_when_there(
        load_partition=bench.load(0, 4, content_digest=own.content_digest(TINY))
    )
    [loaded] = await scheduler.wait_for("partition_loaded")
    assert loaded.content_digest == own.content_digest(TINY)
    assert agent.hello().partitions[0].content_digest == loaded.content_digest


async def test_weights_with_a_byte_altered_are_not_loaded_and_named(bench, own):
    alter(own)
    scheduler = await bench.scheduler()
    agent = await bench.agent(scheduler.port)
    await scheduler.order_when_there(load_partition=bench.load(0, 2))
    [failed] = await scheduler.wait_for("partition_failed")
    assert failed.failure.reason == "CONTENT_MISMATCH"
    assert "tiny:1/model.onnx on" in failed.failure.message
    assert not agent.hello().partitions


async def test_another_copy_than_was_ordered_is_not_loaded(bench, own):
    right = own.content_digest(TINY)
    alter(own)
    (own.folder(TINY) / RECORD_FILE).unlink()
    table = own.folder(TINY) / "blocks.json"
    old = own.block_table  # the table of the altered file, as somebody would have cut it
    table.write_text(table.read_text().replace(_hash_in(table), own.model_hash(TINY)))
    assert old(TINY).blocks == 4
    scheduler = await bench.scheduler()
    await bench.agent(scheduler.port)
    await scheduler.order_when_there(load_partition=bench.load(0, 2, content_digest=right))
    [failed] = await scheduler.wait_for("partition_failed")
    assert failed.failure.reason == "CONTENT_MISMATCH"
    assert failed.content_digest == own.content_digest(TINY) != right
    for digest in (right, failed.content_digest):
        assert digest[:12] in failed.failure.message


async def test_a_partition_is_not_taken_for_one_of_other_content(bench, own):
    scheduler = await bench.scheduler()
    await bench.agent(scheduler.port)
    await scheduler.order_when_there(load_partition=bench.load(0, 2))
    await scheduler.wait_for("partition_loaded")
    await scheduler.order(load_partition=bench.load(0, 2, content_digest="f" * 64))
    [failed] = await scheduler.wait_for("partition_failed")
    assert failed.failure.reason == "CONTENT_MISMATCH"
    unload = scheduler_pb2.UnloadPartition(key=bench.key(0, 2))
    await scheduler.order(unload_partition=unload)
    await scheduler.order(load_partition=bench.load(0, 2, content_digest=own.content_digest(TINY)))
    [_, again] = await scheduler.wait_for("partition_loaded", 2)
    assert again.content_digest == own.content_digest(TINY)


async def test_a_torn_part_is_built_anew(bench, own):
    scheduler = await bench.scheduler()
    first = await bench.agent(scheduler.port)
    await scheduler.order_when_there(load_partition=bench.load(0, 2))
    await scheduler.wait_for("partition_loaded")
    await first.stop()
    [part] = (own.folder(TINY) / ".parts").glob("*/part.onnx")
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    await bench.agent(scheduler.port, agent_id="a-1")
    await scheduler.wait_for("hello", 2)
    await scheduler.order(load_partition=bench.load(0, 2))
    await scheduler.wait_for("partition_loaded", 2)
    assert not scheduler.of("partition_failed")
    assert len(part.read_bytes()) == len(whole)


async def test_a_device_that_computes_otherwise_takes_no_traffic(bench, own):
    scheduler = await bench.scheduler()
    for number, name in enumerate(("a-0", "a-1"), 1):  # the second is compared with the first
        await bench.agent(scheduler.port, agent_id=name, canary="on")
        await scheduler.wait_for("hello", number)
        await scheduler.order(load_partition=bench.load(0, 2))
        await scheduler.wait_for("partition_loaded", number)
    [file] = (own.folder(TINY) / ".canaries").iterdir()
    said = json.loads(file.read_text())
    said["answers"] = [[1.01 * value + 0.1 for value in each] for each in said["answers"]]
    file.write_text(json.dumps(said))
    odd = await bench.agent(scheduler.port, agent_id="a-2", canary="on")
    await scheduler.wait_for("hello", 3)
    await scheduler.order(load_partition=bench.load(0, 2))
    [failed] = await scheduler.wait_for("partition_failed")
    assert failed.failure.reason == "CANARY_FAILED"
    assert not odd.hello().partitions
    await bench.agent(scheduler.port, agent_id="a-3")  # not asked to compare
    await scheduler.wait_for("hello", 4)
    await scheduler.order(load_partition=bench.load(0, 2))
    await scheduler.wait_for("partition_loaded", 3)


def _hash_in(table) -> str:
    return str(json.loads(table.read_text())["model_hash"])
