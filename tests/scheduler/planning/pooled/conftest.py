from __future__ import annotations

import pytest

from catenary_scheduler.planning.pooled.dataset import PlanningDataset, load_dataset
from reference_data import reference


@pytest.fixture(scope="session")
def ppipe() -> PlanningDataset:
    return load_dataset(reference("ppipe"))
