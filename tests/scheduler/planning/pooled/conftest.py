from __future__ import annotations

import pytest

from reference_data import reference
from scheduler.planning.pooled.dataset import Dataset, load_dataset


@pytest.fixture(scope="session")
def ppipe() -> Dataset:
    return load_dataset(reference("ppipe"))
