"""A tiny data set, and scenarios on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduling_cases.tiny_dataset import write_dataset


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")
