"""A gateway that serves a model of text and encoders, with one agent that computes by simple rules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from catenary_gateway.catalog import Catalog, Model
from catenary_protos.catenary.v1 import frame_pb2, scheduler_pb2
from catenary_services.transport.frames import layout, tensor_views
from catenary_services.transport.interface import ReceivedFrame
from gateway_harness import echo, served, spec
from generation_harness import TextAgent, TextStage, answering, generating, text_stage

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "a", "mat", "dog", "."]
SIZE = 8
MOST = 16
SENTENCES, SHORTENED, JUDGE, CLASSES = "sentences", "shortened", "judge", "classes"
"""Encoders: of embeddings, of embeddings that may be cut, of one class, of three."""

_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
_SHORTEST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/messages": {**_CHAT, "max_tokens": 9},
    "/v1/messages/count_tokens": _CHAT,
    "/v1/embeddings": {"model": "sentences", "input": "the cat"},
    "/v1/score": {"model": "judge", "text_1": "the cat", "text_2": "a dog"},
    "/v1/rerank": {"model": "judge", "query": "the cat", "documents": ["a dog"]},
    "/tokenize": {"model": "tiny", "prompt": "hi"},
    "/detokenize": {"model": "tiny", "tokens": [5]},
}
_SAME = {"/score": "/v1/score", "/rerank": "/v1/rerank", "/v2/rerank": "/v1/rerank"}


def word_tokenizer() -> Tokenizer:
    """A tokenizer of words, with the special tokens of BERT."""
    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    made = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def embedding_of(ids: Sequence[int]) -> np.ndarray:
    """The embedding that the agent makes of tokens."""
    turns = np.outer(np.asarray(ids, np.float64), np.arange(1, SIZE + 1))
    return np.cos(turns).sum(axis=0)


def logit_of(ids: Sequence[int], type_ids: Sequence[int]) -> float:
    """The logit that the agent makes of the tokens of a pair."""
    signs = np.where(np.asarray(type_ids) == 1, 1.0, -1.0)
    return float((signs * np.asarray(ids)).sum() / 10)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@dataclass
class EncoderAgent(TextAgent):
    """Generates as `TextAgent` does, and answers rows of tokens by the two rules above."""

    rows: int = 0

    def receive(self, frame: ReceivedFrame) -> None:
        header = frame_pb2.FrameHeader.FromString(frame.header)
        if header.session_rows or header.HasField("move"):
            super().receive(frame)
            return
        payload = bytes(frame.payload)
        frame.release()
        task = asyncio.create_task(self._answer(header, payload))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, header: frame_pb2.FrameHeader, payload: bytes) -> None:
        tokens = {
            k: v.tolist() for k, v in tensor_views(header.tensors, memoryview(payload)).items()
        }
        found = []
        for at, mask in enumerate(tokens["attention_mask"]):
            size = sum(mask)
            ids = tokens["input_ids"][at][:size]
            types = tokens.get("token_type_ids")
            found.append(embedding_of(ids) if types is None else [logit_of(ids, types[at][:size])])
        self.rows += len(found)
        answer = np.array(found, np.float32)
        name = "logits" if "token_type_ids" in tokens else "sentence_embedding"
        tensors, size = layout([(name, "FP32", answer.shape)])
        link = await self.hub.link_to(header.slices[0].gateway_id, 5.0)
        result = frame_pb2.FrameHeader()
        result.CopyFrom(header)
        result.kind = frame_pb2.FRAME_KIND_RESULT
        result.position = 1
        result.timings.add(agent_id=self.agent_id, last_block=1, wait_ns=1000, compute_ns=2000)
        del result.tensors[:]
        result.tensors.extend(tensors)
        slot = await link.export(size, 5.0)
        slot.view[: answer.nbytes] = answer.tobytes()
        await link.push(slot, result.SerializeToString(), 5.0)


def judge_model() -> Model:
    """The model of pairs as a gateway knows it."""
    kinds = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [spec(kind, "INT64", -1, -1) for kind in kinds]
    model = served(JUDGE, inputs, [spec("logits", "FP32", -1, 1)], text_tokens=MOST)
    catalog = Catalog()
    catalog.update(scheduler_pb2.ModelTable(models=[model]))
    return catalog.find(JUDGE, "")


def _encoder(
    root: Path, name: str, output: str, size: int, **config: object
) -> scheduler_pb2.ServedModel:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(VOCABULARY), **config}))
    kinds = ["input_ids", "attention_mask"] + (["token_type_ids"] if output == "logits" else [])
    inputs = [spec(kind, "INT64", -1, -1) for kind in kinds]
    return served(name, inputs, [spec(output, "FP32", -1, size)], text_tokens=MOST)


@asynccontextmanager
async def all_paths_stage(tmp_path: Path, **settings: object) -> AsyncIterator[TextStage]:
    """Starts a gateway that serves models for every path."""
    root = tmp_path / "models"
    served_models = [
        generating(),
        echo("toy", ("FP32", -1, 4)),
        _encoder(root, SENTENCES, "sentence_embedding", SIZE),
        _encoder(root, SHORTENED, "sentence_embedding", SIZE, matryoshka_dimensions=[4, 2]),
        _encoder(root, JUDGE, "logits", 1),
        _encoder(root, CLASSES, "logits", 3),
    ]
    started = text_stage(tmp_path, models=served_models, agent_type=EncoderAgent, **settings)
    async with started as stage:
        stage.agent.script = answering
        yield stage


def shortest_body(path: str) -> dict[str, Any]:
    """A body that a path of these models takes, without what may be left out; {} if it reads none."""
    return _SHORTEST.get(_SAME.get(path, path), {})
