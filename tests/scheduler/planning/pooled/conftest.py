from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler.planning.pooled.dataset import Dataset, load_dataset

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="session")
def ppipe() -> Dataset:
    """The reference data; never part of the project."""
    data = Path(os.environ.get("CATENARY_DATA") or ROOT.parent / "shared" / "data") / "ppipe"
    if not data.is_dir():
        pytest.skip(f"needs the PPipe reference data at {data}: set CATENARY_DATA")
    return load_dataset(data)
