"""A real cluster of two agents that serves a small model of every kind, and what callers know of it."""

from __future__ import annotations

import os
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_agent.encoders.importing import EncoderOptions, import_encoder
from catenary_agent.preparing import cutting
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenary_services.security.keys import add_key
from cluster_harness import RunningCluster, running_cluster
from fault_cluster import IMAGES, shared_models
from small_models.jail_here import run_here
from small_models.text_models import WORDS, write_encoder, write_words
from small_models.tiny_tokenizer import END, MORE, TEMPLATE, tiny_tokenizer
from tiny_language_models import random_model, worker_in_this_process

CHATS, SENTENCES, JUDGE = (ModelKey(name, "1") for name in ("tiny", "sentences", "judge"))
CONTEXT = 128
PREFIX = "ctn-fuzz-"
REGION = "picture"
"""A region of shared memory with an input of the image model, whose numbers no JSON has to hold."""
_POOLED = {"1_Pooling__config": {"pooling_mode_mean_tokens": True}}
_MODULES = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


@dataclass(frozen=True)
class FuzzedCluster:
    """A running cluster with two keys: of a caller, who may not change it, and of an operator."""

    cluster: RunningCluster
    caller: str
    operator: str
    picture_bytes: int

    def request(self, method: str, path: str, key: str, body: bytes | None = None) -> bytes:
        headers = {"Authorization": f"Bearer {key}"}
        asked = urllib.request.Request(self.cluster.http + path, body, headers, method=method)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return bytes(answer.read())


@contextmanager
def fuzzed_cluster(folder: Path) -> Iterator[FuzzedCluster]:
    """Makes the models, starts the cluster, and ends it with the block."""
    folder.mkdir(parents=True)
    repository = ModelRepository(folder / "models")
    with (folder / "making.log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        blocks = _make_models(repository)
    names = tuple(key.name for key in blocks)
    keys = folder / "keys.json"
    caller, operator = (
        add_key(keys, name, scopes)
        for name, scopes in (("caller", ["infer", "view"]), ("operator", ["admin", "infer"]))
    )
    gateway = {
        "api_keys_file": str(keys),
        "shared_memory_prefix": PREFIX,
        # Nearly all requests are bad, and none is to be refused for that.
        "bad_requests_per_s": 1e6,
    }
    plan = {"models": [_placement(key, count) for key, count in blocks.items()]}
    shared = Path("/dev/shm") / f"{PREFIX}{os.getpid()}"
    size = 3 * 224 * 224 * 4
    try:
        shared.write_bytes(bytes(size))
        with running_cluster(
            folder, models=names, placement=plan, agents=2, config={"gateway": gateway}
        ) as cluster:
            fuzzed = FuzzedCluster(cluster, caller, operator, size)
            region = f'{{"key": "{shared.name}", "byte_size": {size}}}'.encode()
            path = f"/v2/systemsharedmemory/region/{REGION}/register"
            fuzzed.request("POST", path, caller, region)
            yield fuzzed
    finally:
        with suppress(FileNotFoundError):
            shared.unlink()


def _make_models(repository: ModelRepository) -> dict[ModelKey, int]:
    """Makes the models, and returns the number of blocks of each."""
    images = ModelKey(IMAGES, "1")
    source = ModelRepository(shared_models()).folder(images)
    shutil.copytree(source, repository.folder(images), copy_function=os.link)
    scratch = repository.root.parent / "sources"
    with pytest.MonkeyPatch.context() as patch, worker_in_this_process():
        patch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)
        patch.setattr("catenary_agent.preparing.prepare.run_jailed", run_here)
        patch.setattr("catenary_agent.encoders.importing.run_jailed", run_here)
        write_words(repository)
        sentences = write_encoder(scratch / "sentences", modules=_MODULES, **_POOLED)
        judge = write_encoder(scratch / "judge", labels=1)
        two = EncoderOptions(blocks=2)
        chat = _write_chat_model(scratch / "tiny")
        return {
            images: repository.block_table(images).blocks,
            WORDS: prepare_model(repository, WORDS, blocks=2).blocks,
            SENTENCES: import_encoder(repository, sentences, SENTENCES, two).blocks,
            JUDGE: import_encoder(repository, judge, JUDGE, two).blocks,
            CHATS: import_decoder(
                repository, chat, CHATS, ImportOptions(session_tokens=CONTEXT)
            ).blocks,
        }


def _write_chat_model(folder: Path) -> Path:
    """Writes a model with a token for every byte, so that grammars can be kept to."""
    from transformers import PreTrainedTokenizerFast

    model = random_model("llama3")
    model.resize_token_embeddings(MORE)
    model.config.update({"bos_token_id": 0, "eos_token_id": END, "pad_token_id": 2})
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return folder


def _placement(key: ModelKey, blocks: int) -> dict[str, Any]:
    middle = max(1, blocks // 2)
    parts = [
        {"blocks": [0, middle], "agents": ["agent-0"]},
        {"blocks": [middle, blocks], "agents": ["agent-1"]},
    ]
    if key == CHATS:
        hops = [{"blocks": part["blocks"], "agent": part["agents"][0]} for part in parts]
        return {"name": key.name, "chains": [{"capacity": 8, "hops": hops}]}
    pipelines = [{"batch": 4, "partitions": parts}]
    return {"name": key.name, "slo_ms": 20_000, "pipelines": pipelines}
