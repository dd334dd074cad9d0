"""The library instructor, which asks for objects of a class."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from features import API_KEY, BASE_URL, CHAT_MODEL, feature, report
from instructor.core.exceptions import IncompleteOutputException
from pydantic import BaseModel, ConfigDict

SERVED = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": "What will the weather be like in Paris?"}]
ASKED: dict[str, Any] = {
    "model": CHAT_MODEL,
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 1,
}
SHORT = ASKED | {"max_tokens": 30}


class Weather(BaseModel):
    """What the weather is like."""

    # Small models would otherwise write more and more properties, which the schema then allows.
    model_config = ConfigDict(extra="forbid")

    city: Literal["Bern", "Paris", "Oslo"]
    celsius: bool


class Anything(BaseModel):
    """Any object."""

    model_config = ConfigDict(extra="allow")


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(SERVED, mode=mode)


@feature("Mode.TOOLS")
def tools() -> None:
    made = client(instructor.Mode.TOOLS).create(**ASKED, response_model=Weather)
    assert isinstance(made, Weather)


@feature("Mode.JSON_SCHEMA")
def json_schema() -> None:
    made = client(instructor.Mode.JSON_SCHEMA).create(**ASKED, response_model=Weather)
    assert isinstance(made, Weather)


@feature(
    "Mode.JSON",
    partly="the answer is a JSON object; that its fields are those of the class is up to the "
    "model, as this mode shows it the schema as text",
)
def json_mode() -> None:
    try:
        made = client(instructor.Mode.JSON).create(**SHORT, response_model=Anything)
        assert isinstance(made, Anything)
    except IncompleteOutputException as error:  # this small model may go on and on
        text = error.last_completion.choices[0].message.content
        assert text.lstrip().startswith("{")


@feature("Mode.RESPONSES_TOOLS")
def responses() -> None:
    asked = {key: value for key, value in ASKED.items() if key != "max_tokens"}
    made = client(instructor.Mode.RESPONSES_TOOLS).create(
        **asked, max_output_tokens=200, response_model=Weather
    )
    assert isinstance(made, Weather)


@feature("from_openai(AsyncOpenAI)")
async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY) as other:
        made = await instructor.from_openai(other).create(**ASKED, response_model=Weather)
    assert isinstance(made, Weather)


report("instructor")
