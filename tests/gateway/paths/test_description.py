"""`/openapi.json` and `/docs` say what is there; pages of other origins call where they may."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from catenary_gateway.openai_http.calls.bodies import SamplingBody
from catenary_gateway.openai_http.completion_request import chat_of, completion_of
from catenary_gateway.openai_http.description.openapi import _KNOWN_FORMS
from catenary_gateway.openai_http.description.route_table import HttpRoute, ReadBody
from catenary_gateway.openai_http.parameters import PARAMETERS
from catenary_gateway.openai_http.parameters.parameter import ParameterKind
from catenary_gateway.openai_http.paths import ROUTES
from catenary_services.security.keys import add_key
from generation_harness import TextStage
from shared_helpers.encoder_agent import all_paths_stage

PAGE = "https://page.example"


async def document_of(stage: TextStage) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{stage.http}/openapi.json") as answer,
    ):
        assert answer.status == 200
        return await answer.json()


async def test_every_route_of_the_server_is_in_the_description(running: TextStage) -> None:
    paths = (await document_of(running))["paths"]
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in running.gateway._http._runner.app.router.routes()
        if route.method != "HEAD" and route.resource is not None
    }
    own = {
        (method, path)
        for method, path in served
        if not path.startswith("/dashboard") and path not in ("/", "/docs", "/openapi.json")
    }
    described = {(method, path) for path, place in paths.items() for method in place}
    assert described == own
    assert len(own) > 20
    assert all(
        place[method]["summary"].endswith(".") for place in paths.values() for method in place
    )


async def test_the_fields_of_bodies_are_those_that_are_checked(running: TextStage) -> None:
    schemas = (await document_of(running))["components"]["schemas"]
    for route in ROUTES:
        if isinstance(route.body, type):
            assert set(schemas[route.body.__name__]["properties"]) == set(
                route.body.__struct_fields__
            )
    for name, read in (("ChatCompletionsBody", chat_of), ("CompletionsBody", completion_of)):
        properties = schemas[name]["properties"]
        assert {"model", "temperature", "stream", "seed", "logit_bias"} <= set(properties)
        body = next(
            route.body
            for route in ROUTES
            if isinstance(route.body, ReadBody) and route.body.read is read
        )
        assert set(body.names()) == set(properties)
    references = re.findall(r'"#/components/schemas/(\w+)"', msgspec.json.encode(schemas).decode())
    assert set(references) <= set(schemas)


def test_forms_are_told_of_no_field_that_is_never_read() -> None:
    read = {name for r in ROUTES if isinstance(r.body, ReadBody) for name in r.body.names()}
    assert set(_KNOWN_FORMS) <= read
    assert set(SamplingBody.__struct_fields__) <= read


@pytest.mark.parametrize("route", [r for r in ROUTES if isinstance(r.body, ReadBody)])
def test_the_table_of_parameters_has_what_is_read(route: HttpRoute) -> None:
    taken = {
        each.name
        for each in PARAMETERS
        if each.kind is ParameterKind.TAKEN and route.parameters in each.paths
    }
    assert set(route.names) <= taken


async def test_the_page_needs_no_script_and_nothing_from_elsewhere(running: TextStage) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{running.http}/docs") as answer,
    ):
        page = await answer.text()
        policy = answer.headers["Content-Security-Policy"]
    assert answer.content_type == "text/html"
    assert "default-src 'none'" in policy
    assert "script" not in page
    assert not re.search(r"(?:src|href)=\S*//", page)
    for route in ROUTES:
        assert f"{route.method} {route.path}<" in page


async def test_the_description_needs_no_key_and_the_rest_does(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "mine", ["infer"])
    async with all_paths_stage(tmp_path, api_keys_file=tmp_path / "keys.json") as stage:
        await document_of(stage)
        async with aiohttp.ClientSession() as session:
            for route in ROUTES:
                path = route.path.replace("{model}", "tiny").replace("{response_id}", "r")
                async with session.request(
                    route.method, f"{stage.http}{path}", data=b"{}" if route.body else None
                ) as answer:
                    assert answer.status == 401, route


ASK = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


async def asked(stage: TextStage, method: str, path: str, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{stage.http}{path}", headers=headers) as answer,
    ):
        return answer.status, answer.headers


async def test_no_page_of_another_origin_may_call_unless_it_is_set(running: TextStage) -> None:
    status, headers = await asked(running, "OPTIONS", "/v1/models", **ASK)
    assert status == 405
    assert "Access-Control-Allow-Origin" not in headers
    _, headers = await asked(running, "GET", "/v1/models", Origin=PAGE)
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(("origins", "allowed"), [([PAGE], PAGE), (["*"], "*")])
async def test_pages_of_allowed_origins_ask_and_call(
    tmp_path: Path, origins: list[str], allowed: str
) -> None:
    add_key(tmp_path / "keys.json", "mine", ["infer"])
    settings = {"cors_origins": origins, "api_keys_file": tmp_path / "keys.json"}
    async with all_paths_stage(tmp_path, **settings) as stage:
        wanted = {"Access-Control-Request-Headers": "authorization,content-type"}
        for path in ("/v1/chat/completions", "/v2/models/toy/infer", "/tokenize"):
            status, headers = await asked(stage, "OPTIONS", path, **ASK, **wanted)
            assert status == 204
            assert headers["Access-Control-Allow-Origin"] == allowed
            assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert "POST" in headers["Access-Control-Allow-Methods"]
            assert "Access-Control-Allow-Credentials" not in headers
        # Errors are to be read as well.
        status, headers = await asked(stage, "GET", "/v1/models", Origin=PAGE)
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, allowed)
        for path in ("/", "/dashboard/v1/status"):
            _, headers = await asked(stage, "GET", path, Origin=PAGE)
            assert "Access-Control-Allow-Origin" not in headers
        if allowed == PAGE:
            assert (await asked(stage, "GET", "/v1/models", Origin=PAGE))[1]["Vary"] == "Origin"
            other = {**ASK, "Origin": "https://other.example"}
            status, headers = await asked(stage, "OPTIONS", "/v1/models", **other)
            assert status == 405
            assert "Access-Control-Allow-Origin" not in headers
