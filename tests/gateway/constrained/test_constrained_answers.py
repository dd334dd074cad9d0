"""Answers that must have a form, through the `openai` client and gRPC, at a real gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import grpc.aio
import openai
import pydantic
import pytest

from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenary_services.grammar.vocabulary import TokenVocabulary
from generation_harness import Session, TextStage, answering, text_stage
from small_models.tiny_tokenizer import END, tiny_tokenizer, tokens_of

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = '{"name":"Ann","age":41}'


class Person(pydantic.BaseModel):
    name: str
    age: int


async def saying_json(session: Session) -> None:
    """Says the answer as far as the grammar lets it, as an agent does."""
    vocabulary = TokenVocabulary(tiny_tokenizer().to_str(), 259, (END,))
    matcher = vocabulary.matcher(session.opening.sampling.grammar)
    matcher.accept(tokens_of(ANSWER))
    assert matcher.allowed()[END]
    await session.say(ANSWER, finish="stop")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[TextStage]:
    async with text_stage(tmp_path) as started:
        started.agent.script = saying_json
        yield started


def client_of(stage: TextStage) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{stage.http}/v1", api_key="any", max_retries=0, timeout=60.0
    )


async def test_answers_are_parsed_into_the_class_they_were_asked_for(running: TextStage) -> None:
    async with client_of(running) as client:
        for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
            answer = await parse(**ASKED, response_format=Person)
            assert answer.choices[0].message.parsed == Person(name="Ann", age=41)
            assert answer.choices[0].finish_reason == "stop"
        async with client.chat.completions.stream(**ASKED, response_format=Person) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Person(name="Ann", age=41)


async def test_messages_are_parsed_into_the_class_they_were_asked_for(running: TextStage) -> None:
    made = anthropic.AsyncAnthropic(base_url=running.http, api_key="any", max_retries=0)
    async with made as client:
        answer = await client.messages.parse(**ASKED, max_tokens=64, output_format=Person)
        assert answer.parsed_output == Person(name="Ann", age=41)
        for form, field in (
            ({"type": "json_schema", "schema": {"not": {}}}, "output_config.format: "),
            ({"type": "text"}, "output_config.format.type: "),
            ({"type": "json_schema"}, "output_config.format.schema: "),
        ):
            with pytest.raises(anthropic.BadRequestError) as raised:
                await client.messages.create(
                    **ASKED, max_tokens=64, extra_body={"output_config": {"format": form}}
                )
            assert raised.value.body["error"]["message"].startswith(field)


async def test_every_field_reaches_the_agent_in_chats_and_completions(running: TextStage) -> None:
    schema = Person.model_json_schema()
    described = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    for fields in (
        {"response_format": described},
        {"response_format": {"type": "json_object"}},
        {"guided_json": schema},
        {"guided_regex": r"\{.*\}"},
        {"guided_choice": ["no", ANSWER]},
        {"guided_grammar": f"root ::= {json.dumps(ANSWER)}\n"},
        {"structured_outputs": {"json": schema}},
    ):
        async with client_of(running) as client:
            chat = await client.chat.completions.create(**ASKED, extra_body=fields)
            assert chat.choices[0].message.content == ANSWER
            completion = await client.completions.create(
                model="tiny", prompt="a", max_tokens=64, extra_body=fields
            )
            assert completion.choices[0].text == ANSWER


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"guided_json": {"not": {}}}, "guided_json", 'Unimplemented keys: ["not"]'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "string", "format": "odd"}},
                }
            },
            "response_format",
            "Unknown format: odd",
        ),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "unknown name"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "contradicts"),
        (
            {"guided_grammar": "start: " + "(" * 2000 + '"a"' + ")" * 2000},
            "guided_grammar",
            "too deeply nested",
        ),
    ],
)
async def test_what_cannot_be_kept_to_is_refused_by_its_field(
    running: TextStage, fields: dict[str, object], param: str, says: str
) -> None:
    async with client_of(running) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(**ASKED, extra_body=fields)
    assert (raised.value.param, raised.value.code) == (param, "invalid_input")
    assert says in raised.value.message
    assert not running.agent.frames


async def test_a_stop_text_ends_an_answer_before_its_form_does(running: TextStage) -> None:
    async with client_of(running) as client:
        answer = await client.chat.completions.create(
            **ASKED, response_format={"type": "json_object"}, stop=[","]
        )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        '{"name":"Ann"',
        "stop",
    )


async def test_grammars_come_over_grpc_as_they_are(running: TextStage) -> None:
    async def generate(grammar: str, answer: str = "") -> str:
        request = generation_pb2.GenerateRequest(
            model="tiny",
            prompt="ab",
            sampling=generation_pb2.SamplingParameters(grammar=grammar),
            generated_token_ids=tokens_of(answer),
        )
        async with grpc.aio.insecure_channel(running.grpc) as channel:
            call = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60)
            return "".join([response.text async for response in call])

    for grammar in (
        json.dumps({"grammars": [{"json_schema": Person.model_json_schema()}]}),
        f"start: {json.dumps(ANSWER)}",
    ):
        assert await generate(grammar) == ANSWER
    for wrong in ("start: nothing", "x" * 65_537):
        with pytest.raises(grpc.aio.AioRpcError, match="grammar") as raised:
            await generate(wrong)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    running.agent.script = answering
    assert await generate('start: "abHello!"', "ab") == "Hello!"
    with pytest.raises(grpc.aio.AioRpcError, match="grammar") as raised:
        await generate('start: "abHello!"', "x")
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
