"""One real cluster of text models, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from catenary_agent.encoders.importing import EncoderOptions, import_encoder
from catenary_agent.preparing import cutting
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from cluster_harness import RunningCluster, running_cluster
from small_models.jail_here import run_here
from small_models.text_models import WORDS, write_encoder, write_words

SENTENCES = ModelKey("sentences", "1")
JUDGE = ModelKey("judge", "1")


def halves(blocks: int) -> list[dict[str, object]]:
    middle = max(1, blocks // 2)
    return [
        {"blocks": [0, middle], "agents": ["agent-0"]},
        {"blocks": [middle, blocks], "agents": ["agent-1"]},
    ]


@pytest.fixture(scope="package")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of embeddings."""
    return write_encoder(
        tmp_path_factory.mktemp("encoder"),
        modules=[("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")],
        **{"1_Pooling__config": {"pooling_mode_mean_tokens": True}},
    )


@pytest.fixture(scope="package")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross encoder: a head of one class judges two texts together."""
    return write_encoder(tmp_path_factory.mktemp("judge"), labels=1)


@pytest.fixture(scope="package")
def cluster(
    encoder: Path, judge: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    data_dir = tmp_path_factory.mktemp("texts")
    repository = ModelRepository(data_dir / "models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)
        patch.setattr("catenary_agent.preparing.prepare.run_jailed", run_here)
        patch.setattr("catenary_agent.encoders.importing.run_jailed", run_here)
        write_words(repository)
        tables = {
            WORDS: prepare_model(repository, WORDS, blocks=3),
            SENTENCES: import_encoder(repository, encoder, SENTENCES, EncoderOptions(blocks=4)),
            JUDGE: import_encoder(repository, judge, JUDGE, EncoderOptions(blocks=2)),
        }
    models = [
        {
            "name": key.name,
            "slo_ms": 20_000,
            "pipelines": [{"batch": 4, "partitions": halves(table.blocks)}],
        }
        for key, table in tables.items()
    ]
    names = tuple(key.name for key in tables)
    with running_cluster(data_dir, models=names, placement={"models": models}, agents=2) as running:
        yield running
