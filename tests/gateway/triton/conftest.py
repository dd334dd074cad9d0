from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog

from gateway_harness import Stage, stage
from shared_helpers.triton_clients import FORMS, TritonClient, triton_client


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Undoes what a test sets of the log, which is that of the whole process."""
    was_set, before, level = structlog.is_configured(), structlog.get_config(), logging.root.level
    yield
    if was_set:
        structlog.configure(**before)
    else:
        structlog.reset_defaults()
    logging.root.setLevel(level)


@pytest.fixture
def prefix() -> str:
    """What names of shared memory objects of this test begin with."""
    return f"ctn-{uuid.uuid4().hex[:12]}-"


@pytest.fixture
async def sharing(tmp_path: Path, prefix: str) -> AsyncIterator[Stage]:
    """A gateway that accepts shared memory, and knows the classes of one model."""
    repository = tmp_path / "models"
    (repository / "toy" / "1").mkdir(parents=True)
    (repository / "toy" / "1" / "labels.txt").write_text("tench\ngoldfish\nshark\n")
    async with stage(tmp_path, shared_memory_prefix=prefix, model_repository=repository) as started:
        # Answers wait a second for names, which a busy machine may not have read by then.
        await started.gateway._extensions._class_names.of("toy", "1", 60.0)
        yield started


@pytest.fixture(params=list(FORMS))
async def client(request: pytest.FixtureRequest, sharing: Stage) -> AsyncIterator[TritonClient]:
    async with triton_client(request.param, sharing.grpc, sharing.http) as connected:
        yield connected
