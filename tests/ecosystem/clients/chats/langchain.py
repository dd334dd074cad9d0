"""LangChain, by its package for OpenAI's API."""

from __future__ import annotations

from typing import Literal

from features import API_KEY, BASE_URL, CHAT_MODEL, EMBEDDING_MODEL, feature, report
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

SERVED = {"base_url": f"{BASE_URL}/v1", "api_key": API_KEY, "max_retries": 0}
model = ChatOpenAI(model=CHAT_MODEL, temperature=0, max_tokens=8, **SERVED)
longer = ChatOpenAI(model=CHAT_MODEL, temperature=0, max_tokens=100, **SERVED)
QUESTION = "What will the weather be like in Paris?"


class Weather(BaseModel):
    """What the weather is like."""

    city: Literal["Bern", "Paris", "Oslo"]
    celsius: bool


@tool
def show_weather(city: Literal["Bern", "Paris", "Oslo"], celsius: bool) -> str:
    """Shows the weather of a city."""
    return f"18 in {city}" if celsius else f"64 in {city}"


@feature("ChatOpenAI: invoke, batch, ainvoke")
def invoke() -> None:
    answer = model.invoke([SystemMessage("Be kind."), HumanMessage(QUESTION)])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 8
    assert len(model.batch([QUESTION, "Who are you?"])) == 2


@feature("stream, astream, a chain with a prompt and a parser")
async def stream() -> None:
    whole = (await model.ainvoke(QUESTION)).content
    assert "".join(str(chunk.content) for chunk in model.stream(QUESTION)) == whole
    assert [chunk async for chunk in model.astream(QUESTION)]
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | model | StrOutputParser()
    assert "".join(chain.stream({"question": QUESTION})) == whole


@feature("bind_tools with tool_choice; a ToolMessage sent back")
def tools() -> None:
    for choice in ("any", "show_weather"):
        answer = longer.bind_tools([show_weather], tool_choice=choice).invoke(QUESTION)
        assert answer.tool_calls[0]["name"] == "show_weather"
    results = [show_weather.invoke(call) for call in answer.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    assert model.invoke([HumanMessage(QUESTION), answer, *results]).content


@feature("bind_tools in a stream")
def streamed_tools() -> None:
    bound = longer.bind_tools([show_weather], tool_choice="show_weather", parallel_tool_calls=False)
    whole: AIMessageChunk | None = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    (call,) = whole.tool_calls
    assert call["args"]["city"] in ("Bern", "Paris", "Oslo")


@feature("with_structured_output: json_schema, function_calling")
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        bound = longer.with_structured_output(Weather, method=method)
        assert isinstance(bound.invoke(QUESTION), Weather)


@feature(
    "with_structured_output: json_mode",
    partly="the answer is a JSON object; its fields are up to the model, as this mode does not "
    "send the schema",
)
def json_mode() -> None:
    bound = longer.with_structured_output(method="json_mode")
    assert isinstance(bound.invoke('Answer with this JSON alone: {"city": "Paris"}'), dict)


@feature("logprobs, n, seed, stop")
def sampling() -> None:
    asked = model.bind(logprobs=True, top_logprobs=2, seed=1, stop=["zzz"])
    answer = asked.invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"]) == 8
    several = ChatOpenAI(model=CHAT_MODEL, n=2, max_tokens=4, **SERVED)
    assert len(several.generate([[HumanMessage(QUESTION)]]).generations[0]) == 2


@feature("use_responses_api=True")
def responses() -> None:
    other = ChatOpenAI(model=CHAT_MODEL, temperature=0, use_responses_api=True, **SERVED)
    answer = other.bind(max_output_tokens=16).invoke(QUESTION)
    assert answer.text
    assert isinstance(other.with_structured_output(Weather).invoke(QUESTION), Weather)
    assert "".join(chunk.text for chunk in other.bind(max_output_tokens=16).stream(QUESTION))


@feature("OpenAI (completions)")
def completions() -> None:
    other = OpenAI(model=CHAT_MODEL, temperature=0, max_tokens=4, **SERVED)
    assert "".join(other.stream("The sky is")) == other.invoke("The sky is")


@feature(
    "OpenAIEmbeddings",
    partly="with `check_embedding_ctx_length=False`: else it sends token ids of OpenAI's "
    "vocabulary, which other models do not have",
)
def embeddings() -> None:
    made = OpenAIEmbeddings(model=EMBEDDING_MODEL, check_embedding_ctx_length=False, **SERVED)
    assert len(made.embed_query("a cat sat on the mat")) == 32
    assert len(made.embed_documents(["a cat", "the dog"])) == 2


report("langchain-openai")
