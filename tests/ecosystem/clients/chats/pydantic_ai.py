"""Pydantic AI, a framework for agents."""

from __future__ import annotations

from typing import Any, Literal

from features import API_KEY, BASE_URL, CHAT_MODEL, EMBEDDING_MODEL, feature, report
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, Embedder, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{BASE_URL}/v1", api_key=API_KEY)
model = OpenAIChatModel(CHAT_MODEL, provider=provider)
SHORT: Any = {"temperature": 0.0, "max_tokens": 8}
LONG: Any = {"temperature": 0.0, "max_tokens": 200}
QUESTION = "What will the weather be like in Paris?"


class Weather(BaseModel):
    """What the weather is like."""

    city: Literal["Bern", "Paris", "Oslo"]
    celsius: bool


class Anything(BaseModel):
    """Any object."""

    model_config = ConfigDict(extra="allow")


@feature("Agent.run with instructions")
async def run() -> None:
    agent = Agent(model, instructions="Be kind.", model_settings=SHORT)
    answer = await agent.run(QUESTION)
    assert answer.output
    assert answer.usage.output_tokens == 8


@feature("Agent.run_stream")
async def run_stream() -> None:
    agent = Agent(model, model_settings=SHORT)
    async with agent.run_stream(QUESTION) as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True)]
    assert "".join(pieces)


@feature("ToolOutput, the default for classes")
async def by_tool() -> None:
    agent = Agent(model, output_type=ToolOutput(Weather), model_settings=LONG)
    assert isinstance((await agent.run(QUESTION)).output, Weather)


@feature("NativeOutput")
async def native() -> None:
    agent = Agent(model, output_type=NativeOutput(Weather), model_settings=LONG)
    assert isinstance((await agent.run(QUESTION)).output, Weather)


@feature(
    "PromptedOutput",
    partly="the answer is a JSON object; that its fields are those of the class is up to the "
    "model, as this form shows it the schema as text",
)
async def prompted() -> None:
    agent = Agent(model, output_type=PromptedOutput(Anything), model_settings=LONG)
    assert isinstance((await agent.run(QUESTION)).output, Anything)


@feature("OpenAIResponsesModel")
async def responses() -> None:
    other = OpenAIResponsesModel(CHAT_MODEL, provider=provider)
    assert (await Agent(other, model_settings=SHORT | {"max_tokens": 16}).run(QUESTION)).output
    agent = Agent(other, output_type=Weather, model_settings=LONG)
    assert isinstance((await agent.run(QUESTION)).output, Weather)


@feature("Embedder")
async def embeddings() -> None:
    embedder = Embedder(OpenAIEmbeddingModel(EMBEDDING_MODEL, provider=provider))
    answer = await embedder.embed_documents(["a cat sat on the mat", "the dog"])
    assert [len(each) for each in answer.embeddings] == [32, 32]


report("pydantic-ai-slim")
