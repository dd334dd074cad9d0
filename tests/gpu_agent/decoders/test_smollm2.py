"""SmolLM2-135M over chains of executors answers as `transformers.generate`, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import PartitionKey
from catenary_services.models.model_repository import ModelRepository
from language_model import KEY, shared_models
from small_models.decoder_ring import DecoderRing
from small_models.prompts import PROMPTS

pytestmark = pytest.mark.timeout(600)  # the first test of all imports the model

TOKENS = 12
CHATS = (0, 6, 25, 29)
"""Of `PROMPTS`: 37 to 60 tokens with the template."""


@pytest.fixture(scope="module")
def repository() -> ModelRepository:
    return shared_models()


@pytest.fixture(scope="module")
def chats(repository: ModelRepository) -> dict[int, list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(repository.folder(KEY))
    return {
        number: tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPTS[number]}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for number in CHATS
    }


@pytest.fixture(scope="module")
def expected(repository: ModelRepository, chats: dict[int, list[int]]) -> dict[int, list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # two on cores that others use are slower than one
    model: Any = AutoModelForCausalLM.from_pretrained(repository.folder(KEY), dtype=torch.float32)
    answers = {}
    for number, chat in chats.items():
        ids = torch.tensor([chat])
        # The end-of-text token occurs in the prompt: without a mask it would count as padding.
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
        answers[number] = made[0, len(chat) :].tolist()
    return answers


@pytest.fixture(params=[(), (14,), (10, 20), (5, 12, 18, 24)], ids=str)
def ring(request: pytest.FixtureRequest, repository: ModelRepository) -> Iterator[DecoderRing]:
    edges = [0, *request.param, 30]
    device = Device.parse("cpu")
    made = DecoderRing(
        [
            load_decoder(
                repository, PartitionKey(KEY, a, b), device, CacheLayout(4 * (b - a), 128, (a,))
            )
            for a, b in pairwise(edges)
        ]
    )
    yield made
    made.close_all()


def test_greedy_answers_are_those_of_transformers(
    ring: DecoderRing, chats: dict[int, list[int]], expected: dict[int, list[int]]
) -> None:
    """Prompts come in chunks of 16, so that they end at different steps and mix with decoding."""
    answers = ring.generate(chats, TOKENS, chunk=16)
    assert {n: answer[: len(expected[n])] for n, answer in answers.items()} == expected
    assert sum(len(answer) for answer in expected.values()) > 3 * TOKENS
