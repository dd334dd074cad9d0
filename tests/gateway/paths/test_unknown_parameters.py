"""Every path refuses and ignores what the table of parameters says, and ignores what it does not know."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from catenary_gateway.openai_http.description.route_table import HttpRoute, ReadBody
from catenary_gateway.openai_http.parameters import PARAMETERS
from catenary_gateway.openai_http.parameters.parameter import ParameterKind
from catenary_gateway.openai_http.paths import ROUTES
from generation_harness import TextStage
from shared_helpers.encoder_agent import shortest_body

WITH_BODIES = [route for route in ROUTES if route.body is not None]
SOMETHING = {"an": "object that no parameter takes for nothing"}


def body_for(route: HttpRoute) -> dict[str, Any]:
    return shortest_body(route.path)


async def answer_to(stage: TextStage, route: HttpRoute, **more: object) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stage.http}{route.path}", json=body_for(route) | more) as answer,
    ):
        return answer.status, await answer.json()


def message_of(document: dict[str, Any]) -> str:
    return str(document["error"]["message"])


@pytest.mark.parametrize("kind", [ParameterKind.REFUSED, ParameterKind.IGNORED])
async def test_each_path_does_what_the_table_says(running: TextStage, kind: ParameterKind) -> None:
    for route in WITH_BODIES:
        rows = [e for e in PARAMETERS if e.kind is kind and route.parameters in e.paths]
        if kind is ParameterKind.IGNORED:
            unknown = {each.name: SOMETHING for each in rows} | {"never_heard_of": SOMETHING}
            status, document = await answer_to(running, route, **unknown)
            assert status == 200, (route.path, document)
            continue
        status, document = await answer_to(running, route, **{each.name: None for each in rows})
        assert status == 200, (route.path, document)
        for each in rows:
            status, document = await answer_to(running, route, **{each.name: SOMETHING})
            assert status == 400, (route.path, each.name)
            assert message_of(document) == f"{each.name}: {each.text}"


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/responses", {"truncation": "disabled", "n": 1, "background": False}),
        ("/v1/messages", {"thinking": {"type": "disabled"}, "repetition_penalty": 1.0}),
        ("/v1/embeddings", {"add_special_tokens": True, "truncate_prompt_tokens": -1}),
        ("/tokenize", {"tools": [], "mm_processor_kwargs": {}}),
    ],
)
async def test_what_asks_for_nothing_is_no_reason_to_refuse(
    running: TextStage, path: str, given: dict[str, object]
) -> None:
    route = next(each for each in ROUTES if each.path == path)
    status, document = await answer_to(running, route, **given)
    assert status == 200, document


def test_what_a_body_has_is_not_refused_or_ignored() -> None:
    for route in WITH_BODIES:
        if not isinstance(route.body, ReadBody):
            treated = {each.name for each in PARAMETERS if route.parameters in each.paths}
            assert not treated & set(route.names), route.path


def test_every_path_of_the_table_is_served() -> None:
    served = {route.parameters for route in ROUTES}
    assert {path for each in PARAMETERS for path in each.paths} <= served
