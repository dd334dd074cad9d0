"""Log probabilities over rings of agents are those of `transformers`, of answers and of prompts.

SmolLM2 in float32, over two agents, with ONNX Runtime and with PyTorch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

import catenary
from cluster_harness import running_cluster
from language_model import folder_of, install, ring_placement

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

MODEL = "smollm2-135m"
TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 5,
    "Cafés in Zürich 😀 open at nine.",
]
TOKENS = 12
TOP = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scored") / "models"
    install(root)
    return root


@pytest.fixture(scope="module")
def transformers_model(models: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folder_of(models)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("decoder", ["onnx", "torch"])
async def test_a_ring_scores_prompts_and_answers_as_transformers_does(
    tmp_path: Path, models: Path, transformers_model: tuple[Any, Any], decoder: str
) -> None:
    model, tokenizer = transformers_model
    (tmp_path / "models").symlink_to(models)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    facts: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.9}
    with running_cluster(
        tmp_path,
        models=(MODEL,),
        placement={"models": [ring_placement(30, agents=2, sessions=8)]},
        config={"agent": {"threads": 1, "decoder": decoder}},
        agents=2,
    ) as cluster:
        async with catenary.AsyncClient(cluster.grpc, timeout_s=180.0) as client:
            calls = [
                client.generate(
                    MODEL, prompt, seed=seed, logprobs=TOP, prompt_logprobs=TOP, **facts
                )
                for prompt in prompts
                for seed in (3, 4)
            ]
            results = await asyncio.gather(*calls)
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.http}/v1", api_key="any", timeout=180
        ) as http:
            answer = await http.completions.create(
                model=MODEL, prompt=TEXTS, n=2, seed=3, logprobs=TOP, echo=True, **facts
            )
    for index, result in enumerate(results):
        prompt = prompts[index // 2]
        known = [*prompt, *result.token_ids]
        scored = [*result.prompt_logprobs, *result.logprobs]
        assert [each.token_id for each in scored] == known[1:]
        agree(scored, model, known)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, result in zip(answer.choices, results, strict=True):
        text = TEXTS[choice.index // 2]
        assert choice.text == text + result.text
        found = choice.logprobs
        assert found is not None
        assert found.token_logprobs[0] is None
        scored = [*result.prompt_logprobs, *result.logprobs]
        numbers = found.token_logprobs[1:]
        # The token that ends an answer is no part of its text.
        assert numbers == pytest.approx([each.logprob for each in scored][: len(numbers)], abs=1e-4)
        assert len(scored) - len(numbers) == (result.finish_reason == "stop")
        assert found.text_offset == sorted(found.text_offset)
        assert found.text_offset[len(prompts[choice.index // 2])] == len(text)
    assert len({choice.text for choice in answer.choices}) == len(answer.choices)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


def agree(scored: Sequence[catenary.TokenLogprobs], model: Any, known: list[int]) -> None:
    """Compares what was said of all tokens but the first with `transformers`."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([known])).logits[0].double()
    expected = torch.log_softmax(logits, 1)
    for at, each in enumerate(scored):
        row = expected[at]
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
        assert [value for _, value in each.top] == pytest.approx(
            row.topk(TOP).values.tolist(), abs=1e-4
        )
        for token, value in each.top:
            assert value == pytest.approx(float(row[token]), abs=1e-4)
