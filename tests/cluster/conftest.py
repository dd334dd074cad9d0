"""One real cluster, shared by the tests of this folder: three agents, three partitions."""

from collections.abc import Iterator

import pytest

from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.plans import demo_placement
from cluster_harness import RunningCluster, running_cluster
from fault_cluster import install_images


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    data_dir = tmp_path_factory.mktemp("cluster")
    key = install_images(data_dir / "models")
    blocks = ModelRepository(data_dir / "models").block_table(key).blocks
    with running_cluster(data_dir, placement=demo_placement(blocks)) as running:
        yield running
