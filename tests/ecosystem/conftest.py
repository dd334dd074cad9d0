"""One cluster for all clients: a language model, encoders, and models of numbers and of words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from catenary_agent.encoders.importing import EncoderOptions, import_encoder
from catenary_agent.preparing import cutting
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable, ModelManifest
from catenary_services.models.model_repository import ModelRepository
from catenary_services.security.key_file import add_key
from cluster_harness import running_cluster
from language_model import MODEL, install, ring_placement
from small_models.jail_here import run_here
from small_models.text_models import WORDS, write_encoder, write_words

NUMBERS = ModelKey("numbers", "1")
SENTENCES = ModelKey("sentences", "1")
JUDGE = ModelKey("judge", "1")
BLOCKS = 30
SESSIONS = 6
SHARED_MEMORY_PREFIX = "ctn-clients-"


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a user of the running cluster is told, as variables of a client's environment."""
    folder = tmp_path_factory.mktemp("clients")
    repository = ModelRepository(folder / "models")
    tokenizer = repository.folder(install(repository.root))
    keys = folder / "keys.json"
    key = add_key(keys, "clients", ["infer", "view", "admin"])
    tables = small_models(repository, folder)
    pools = [
        {
            "name": model.name,
            "slo_ms": 20_000,
            "pipelines": [{"batch": 4, "partitions": halves(table.blocks)}],
        }
        for model, table in tables.items()
    ]
    chain = ring_placement(BLOCKS, agents=2, sessions=SESSIONS)
    gateway = {"api_keys_file": str(keys), "shared_memory_prefix": SHARED_MEMORY_PREFIX}
    gateway["cors_origins"] = ["https://chats.example"]
    with running_cluster(
        folder,
        models=(MODEL, *(model.name for model in tables)),
        placement={"models": [chain, *pools]},
        config={"gateway": gateway, "scheduler": {"api_keys_file": str(keys)}},
        agents=2,
    ) as cluster:
        yield {
            "BASE_URL": cluster.http,
            "GRPC_ADDRESS": cluster.grpc,
            "API_KEY": key,
            "CHAT_MODEL": MODEL,
            "TOKENIZER": str(tokenizer),
            "EMBEDDING_MODEL": SENTENCES.name,
            "RERANK_MODEL": JUDGE.name,
            "NUMBER_MODEL": NUMBERS.name,
            "WORD_MODEL": WORDS.name,
            "SHARED_MEMORY_PREFIX": SHARED_MEMORY_PREFIX,
        }


def small_models(repository: ModelRepository, folder: Path) -> dict[ModelKey, BlockTable]:
    """Makes the models that are no language models, and cuts them."""
    pooling = {"1_Pooling__config": {"pooling_mode_mean_tokens": True}}
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    encoder = write_encoder(folder / "encoder", modules=modules, **pooling)
    judge = write_encoder(folder / "judge", labels=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)
        patch.setattr("catenary_agent.preparing.prepare.run_jailed", run_here)
        patch.setattr("catenary_agent.encoders.importing.run_jailed", run_here)
        write_numbers(repository)
        write_words(repository)
        return {
            NUMBERS: prepare_model(repository, NUMBERS, blocks=2),
            WORDS: prepare_model(repository, WORDS, blocks=3),
            SENTENCES: import_encoder(repository, encoder, SENTENCES, EncoderOptions(blocks=4)),
            JUDGE: import_encoder(repository, judge, JUDGE, EncoderOptions(blocks=2)),
        }


def write_numbers(repository: ModelRepository) -> None:
    """Writes a model that doubles rows of four numbers, with names for their places."""
    manifest = ModelManifest(NUMBERS, "onnxruntime_onnx", "model.onnx", 10**9, 4, True)
    repository.write_manifest(manifest)
    nodes = [
        helper.make_node("Add", ["x", "x"], ["sum"]),
        helper.make_node("Identity", ["sum"], ["y"]),
    ]
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")
    ]
    graph = helper.make_graph(nodes, "g", tensors[:1], tensors[1:])
    opsets = [helper.make_opsetid("", 20)]
    file = repository.model_file(NUMBERS)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=opsets), file)
    (file.parent / "labels.txt").write_text("north\neast\nsouth\nwest\n")


def halves(blocks: int) -> list[dict[str, Any]]:
    """Cuts a model in two, if it can be, for the two agents."""
    middle = max(1, blocks // 2)
    cuts = [(0, middle), (middle, blocks)] if middle < blocks else [(0, blocks)]
    return [{"blocks": list(cut), "agents": [f"agent-{at}"]} for at, cut in enumerate(cuts)]
