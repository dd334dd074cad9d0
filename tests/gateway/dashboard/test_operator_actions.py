"""Orders given on the dashboard: who may, what arrives at the scheduler, what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from catenary_gateway.dashboard.actions import ACTIONS, MOST_BODY_BYTES
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import InvalidInput
from catenary_services.security.keys import add_key
from gateway_harness import Stage, stage

ACTIONS_PATH = "/dashboard/v1/actions"


@dataclass
class Operated:
    """A gateway with keys, and a session to it."""

    place: Stage
    session: aiohttp.ClientSession
    keys: dict[str, str]

    async def order(
        self, name: str, given: object, *, scope: str = "admin", **how: Any
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.keys[scope]}"} if scope else {}
        path = f"{ACTIONS_PATH}/{name}"
        async with self.session.post(path, headers=headers, json=given, **how) as response:
            return response.status, await response.json()


@asynccontextmanager
async def operated(tmp_path: Path) -> AsyncIterator[Operated]:
    file = tmp_path / "keys.json"
    keys = {scope: add_key(file, scope, [scope]) for scope in ("infer", "view", "admin")}
    async with (
        stage(tmp_path, api_keys_file=file) as place,
        aiohttp.ClientSession(f"http://{place.http}") as session,
    ):
        place.scheduler.answers = {
            "GetStatus": lambda _: admin_pb2.GetStatusResponse(),
            "DrainAgent": lambda request: admin_pb2.DrainAgentResponse(
                drained=request.agent_id == "agent-0"
            ),
            "Replan": lambda _: admin_pb2.ReplanResponse(plan_id="plan-2", changed=True),
        }
        yield Operated(place, session, keys)


async def test_an_order_reaches_the_scheduler_with_the_operators_key(tmp_path: Path) -> None:
    async with operated(tmp_path) as it:
        assert await it.order("drain", {"agent_id": "agent-0"}) == (200, {"drained": True})
        assert await it.order("drain", {"agent_id": "agent-1"}) == (200, {"drained": False})
        assert (await it.order("replan", {}))[1]["plan_id"] == "plan-2"
        code, answer = await it.order("deploy", {"model": "toy", "version": "2"})
        assert (code, answer) == (200, {"plan_id": "with toy:2"})
        assert it.place.scheduler.presented == [f"Bearer {it.keys['admin']}"] * 4


async def test_the_key_of_an_order_is_not_sent_with_what_follows_on_the_connection(
    tmp_path: Path,
) -> None:
    async with operated(tmp_path) as it:
        presented: list[str] = []

        def status(_: object) -> admin_pb2.GetStatusResponse:
            presented.append(it.place.scheduler.presented_to_look)
            return admin_pb2.GetStatusResponse()

        it.place.scheduler.answers["GetStatus"] = status
        await it.order("replan", {})
        view = {"Authorization": f"Bearer {it.keys['view']}"}
        async with it.session.get("/dashboard/v1/status", headers=view) as response:
            assert response.status == 200
        assert presented == [""]


@pytest.mark.parametrize(("scope", "code"), [("", 401), ("infer", 403), ("view", 403)])
async def test_an_order_needs_the_scope_admin(tmp_path: Path, scope: str, code: int) -> None:
    async with operated(tmp_path) as it:
        given, answer = await it.order("drain", {"agent_id": "agent-0"}, scope=scope)
        assert (given, bool(answer["error"])) == (code, True)
        headers = {"Authorization": f"Bearer {it.keys[scope]}"} if scope else {}
        async with it.session.get(ACTIONS_PATH, headers=headers) as response:
            assert response.status == code
        key = it.keys["admin"]
        async with it.session.post(f"{ACTIONS_PATH}/replan?key={key}", json={}) as response:
            assert response.status == 401
        assert it.place.scheduler.presented == []


async def test_without_keys_there_are_no_orders(running: Stage) -> None:
    async with aiohttp.ClientSession(f"http://{running.http}") as session:
        async with session.get(ACTIONS_PATH) as response:
            assert response.status == 403
            assert "api_keys_file" in (await response.json())["error"]
        async with session.post(f"{ACTIONS_PATH}/deploy", json={"model": "toy"}) as response:
            assert response.status == 403
    assert running.scheduler.presented == []


async def test_the_page_learns_which_orders_there_are(tmp_path: Path) -> None:
    async with operated(tmp_path) as it:
        headers = {"Authorization": f"Bearer {it.keys['admin']}"}
        async with it.session.get(ACTIONS_PATH, headers=headers) as response:
            assert response.headers["Cache-Control"] == "no-store"
            listed = (await response.json())["actions"]
    assert set(listed) == set(ACTIONS)
    assert listed["deploy"]["required"] == ["model"]
    assert all(each["effect"].endswith(".") for each in listed.values())


async def test_what_is_ordered_wrongly_is_refused_with_the_fields_name(tmp_path: Path) -> None:
    async with operated(tmp_path) as it:
        for name, given, field in (
            ("drain", {}, "agent_id"),
            ("drain", {"agent_id": ""}, "agent_id"),
            ("drain", {"agent_id": 7}, "agent_id"),
            ("drain", {"agent_id": "a" * 600}, "agent_id"),
            ("replan", {"force": "yes"}, "force"),
            ("deploy", {"model": "toy", "slo_ns": "1"}, "slo_ns"),
            ("deploy", ["toy"], "body"),
        ):
            code, answer = await it.order(name, given)
            assert (code, answer["error"].partition(":")[0]) == (400, field), (name, given)
        code, _ = await it.order("deploy", {"model": "a" * MOST_BODY_BYTES})
        assert code == 413
        assert (await it.order("explode", {}))[0] == 404
        assert it.place.scheduler.presented == []


async def test_the_schedulers_refusal_is_told(tmp_path: Path) -> None:
    async with operated(tmp_path) as it:

        def refuse(_: object) -> object:
            raise InvalidInput("agent_id", "no such agent")

        it.place.scheduler.answers["DrainAgent"] = refuse
        code, answer = await it.order("drain", {"agent_id": "agent-9"})
        assert (code, answer["error"]) == (400, "agent_id: no such agent")
        await it.place.scheduler.stop()
        code, answer = await it.order("replan", {})
        assert (code, "scheduler" in json.dumps(answer)) == (503, True)


def test_every_order_has_the_fields_that_its_request_has() -> None:
    for action in ACTIONS.values():
        request = action.request_of(dict.fromkeys((*action.required, *action.optional), "x"))
        assert {each.name for each, _ in request.ListFields()} == {
            *action.required,
            *action.optional,
        }
