"""LlamaIndex, by its packages for servers with OpenAI's API."""

from typing import Literal

from features import API_KEY, BASE_URL, CHAT_MODEL, EMBEDDING_MODEL, feature, report
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SERVED = {"api_base": f"{BASE_URL}/v1", "api_key": API_KEY, "max_retries": 0}
CHATS = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
model = OpenAILike(model=CHAT_MODEL, temperature=0, max_tokens=8, **CHATS, **SERVED)
longer = OpenAILike(model=CHAT_MODEL, temperature=0, max_tokens=100, **CHATS, **SERVED)
QUESTION = "What will the weather be like in Paris?"
ASKED = [ChatMessage(role="system", content="Be kind."), ChatMessage(role="user", content=QUESTION)]


class Weather(BaseModel):
    """What the weather is like."""

    city: Literal["Bern", "Paris", "Oslo"]
    celsius: bool


def show_weather(city: Literal["Bern", "Paris", "Oslo"]) -> str:
    """Shows the weather of a city."""
    return f"18 in {city}"


@feature("OpenAILike: chat, achat, complete")
async def chat() -> None:
    assert model.chat(ASKED).message.content
    assert (await model.achat(ASKED)).message.content
    assert model.complete(QUESTION).text


@feature("stream_chat, stream_complete")
def stream() -> None:
    whole = model.chat(ASKED).message.content
    assert "".join(str(piece.delta) for piece in model.stream_chat(ASKED)) == whole
    assert "".join(str(piece.delta) for piece in model.stream_complete(QUESTION))


@feature("chat_with_tools, predict_and_call, with tool_required")
def tools() -> None:
    tool = FunctionTool.from_defaults(show_weather)
    answer = longer.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call, *_) = longer.get_tool_calls_from_response(answer)
    assert call.tool_name == "show_weather"
    done = longer.predict_and_call([tool], user_msg=QUESTION, tool_required=True)
    assert "18 in" in str(done)


@feature("structured_predict, as_structured_llm")
def structured() -> None:
    prompt = PromptTemplate("What will the weather be like in {city}?")
    assert isinstance(longer.structured_predict(Weather, prompt, city="Paris"), Weather)
    assert isinstance(longer.as_structured_llm(Weather).chat(ASKED).raw, Weather)


@feature("completions (is_chat_model=False)")
def completions() -> None:
    other = OpenAILike(model=CHAT_MODEL, temperature=0, max_tokens=4, **SERVED)
    whole = other.complete("The sky is").text
    assert "".join(str(piece.delta) for piece in other.stream_complete("The sky is")) == whole


@feature("OpenAILikeEmbedding")
def embeddings() -> None:
    made = OpenAILikeEmbedding(model_name=EMBEDDING_MODEL, **SERVED)
    assert len(made.get_query_embedding("a cat")) == 32
    assert len(made.get_text_embedding_batch(["a cat sat on the mat", "the dog"])) == 2


report("llama-index-llms-openai-like")
