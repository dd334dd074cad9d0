"""Answers and errors of every route are what `/openapi.json` says of them."""

from __future__ import annotations

from typing import Any

import aiohttp
import jsonschema
import pytest
import pytest_asyncio

from fuzzing.likely_values import LIKELY
from generation_harness import TextStage
from shared_helpers.encoder_agent import shortest_body

TEXT = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["the cat"]}
INFER = {"inputs": [TEXT]}
GIVEN = {
    "/v2/models/{model}/infer": INFER,
    "/v2/models/{model}/versions/{version}/infer": INFER,
    "/v2/trace/setting": {"trace_rate": "1"},
}


class Described:
    """The description of a running gateway, by which its answers are judged."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.operations = [
            (method, path, operation)
            for path, place in document["paths"].items()
            for method, operation in place.items()
        ]

    def check(self, operation: Any, answer: aiohttp.ClientResponse, body: Any) -> None:
        said = operation["responses"].get(str(answer.status), operation["responses"]["default"])
        schema = said["content"][answer.content_type]["schema"]
        components = {"components": self.document["components"]}
        jsonschema.Draft202012Validator({**components, **schema}).validate(body)


@pytest_asyncio.fixture(loop_scope="module")
async def described(running: TextStage) -> Described:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{running.http}/openapi.json") as answer,
    ):
        return Described(await answer.json())


def path_of(path: str, response_id: str) -> str:
    named = path.replace("{model}", "sentences").replace("{version}", "1")
    return named.replace("{response_id}", response_id).replace("{region}", "nobody")


async def test_what_is_answered_is_what_is_described(
    running: TextStage, described: Described
) -> None:
    made, seen = "", set()
    async with aiohttp.ClientSession() as session:
        for method, path, operation in described.operations:
            url = running.http + path_of(path, made)
            body = GIVEN.get(path, shortest_body(path)) if method == "post" else None
            async with session.request(method, url, json=body) as answer:
                document = await answer.json()
                described.check(operation, answer, document)
                seen.add(answer.status)
            if path == "/v1/responses":
                made = document["id"]
            is_extra = "sharedmemory" in path or path.endswith(("/load", "/unload"))
            assert answer.status == 200 or is_extra, (method, path, document)
    assert seen >= {200, 501}


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"model": 7}', b"\xff"])
async def test_what_is_refused_is_refused_in_the_form_of_the_path(
    running: TextStage, described: Described, body: bytes
) -> None:
    async with aiohttp.ClientSession() as session:
        for method, path, operation in described.operations:
            if method != "post" or "requestBody" not in operation:
                continue
            async with session.post(running.http + path_of(path, "x"), data=body) as answer:
                document = await answer.json()
                described.check(operation, answer, document)
            if operation["requestBody"]["required"]:
                assert answer.status in (400, 501), (path, document)
        async with session.get(f"{running.http}/v1/models/nobody") as answer:
            assert answer.status == 404
            operation = described.document["paths"]["/v1/models/{model}"]["get"]
            described.check(operation, answer, await answer.json())


def test_the_document_is_one_of_openapi(described: Described) -> None:
    for _, _, operation in described.operations:
        for content in [
            operation.get("requestBody", {}).get("content", {}),
            *(each.get("content", {}) for each in operation["responses"].values()),
        ]:
            for kind, facts in content.items():
                if kind == "application/json":
                    jsonschema.Draft202012Validator.check_schema(facts["schema"])
    for schema in described.document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_the_fuzzer_knows_fields_that_there_are(described: Described) -> None:
    schemas = described.document["components"]["schemas"]
    for name, fields in LIKELY.items():
        assert set(fields) <= set(schemas[name]["properties"]), name
        for field, values in fields.items():
            for value in values:
                schema = {"components": described.document["components"]}
                schema |= schemas[name]["properties"][field]
                jsonschema.Draft202012Validator(schema).validate(value)
