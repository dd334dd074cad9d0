"""The dashboard of a real gateway: who may look, what is cached, which headers go with it."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc
import pytest

from catenary_gateway.dashboard import files, local_facts
from catenary_gateway.dashboard.answers import DocumentCache
from catenary_gateway.dashboard.api import AGE_HEADER
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc, common_pb2, scheduler_pb2
from catenary_services.security.keys import add_key
from certificates import Certificates
from gateway_harness import GATEWAY, Down, Stage, stage
from scheduling_cases import large_cluster

ROUTES = ("status", "plan", "timelines", "requests", "sessions", "history", "models", "trace")
ONE_ROW = {"inputs": [{"name": "in_0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def browser(place: Stage) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{place.http}") as session:
        yield session


async def asked(session: aiohttp.ClientSession, kind: str, **how: Any) -> tuple[int, Any]:
    async with session.get(f"/dashboard/v1/{kind}", **how) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


@pytest.fixture
def counted(running: Stage) -> Counter[str]:
    """Lets the scheduler answer as one of a large cluster; counts its calls."""
    calls: Counter[str] = Counter()

    def count(method: str, answer: Any) -> Any:
        def answered(request: object) -> object:
            calls[method] += 1
            return answer(request)

        return answered

    running.scheduler.answers = {
        method: count(method, answer) for method, answer in large_cluster.answers().items()
    }
    return calls


async def test_every_route_answers_what_admin_answers(
    running: Stage, counted: Counter[str]
) -> None:
    async with browser(running) as session, grpc.aio.insecure_channel(running.admin) as channel:
        async with session.post("/v2/models/toy/infer", json={**ONE_ROW, "id": "me"}) as sent:
            assert sent.status == 200
        stub = admin_pb2_grpc.AdminStub(channel)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        found = {kind: await asked(session, kind) for kind in ROUTES}
    assert {kind: code for kind, (code, _) in found.items()} == dict.fromkeys(ROUTES, 200)
    shown = found["status"][1]
    assert [agent["agent_id"] for agent in shown["agents"]] == [a.agent_id for a in status.agents]
    assert shown["live_reservations"] == status.live_reservations
    assert shown["models"][3]["chains"][0]["sessions"] == status.models[3].chains[0].sessions
    assert found["plan"][1]["promises"][0]["binds"] == large_cluster.plan().promises[0].binds
    assert len(found["timelines"][1]["resources"]) == 60
    assert len(found["sessions"][1]["sessions"]) == 57
    assert found["trace"][1]["request_id"] == "me"
    local = found["requests"][1]
    assert [request["request_id"] for request in local["requests"]] == ["me"]
    assert local["gateway"]["gateway_id"] == GATEWAY
    toy = local["gateway"]["models"]["toy:1"]
    assert (toy["arrived"], toy["good"], toy["attainment_ratio"]) == (1, 1, 1.0)
    assert 0.9 < toy["p50_ns"] / found["trace"][1]["total_ns"] < 1.1
    ((age_s, *ended),) = toy["history"]
    assert (age_s <= 5, ended) == (True, [1, 0, 0])
    assert found["history"][1]["columns"] == ["age", "good", "late", "refused", "tokens", "p99_ns"]
    offers = {each["name"]: each for each in found["models"][1]["models"]}
    assert offers["toy"]["inputs"] == [{"name": "in_0", "datatype": "FP32", "shape": [-1, 4]}]
    assert (offers["toy"]["generates"], offers["cold"]["ready"]) == (False, False)
    assert found["models"][1]["needs_key"] is False


async def test_the_last_hour_is_told_in_steps_that_are_over(
    running: Stage, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with browser(running) as session:
        async with session.post("/v2/models/toy/infer", json=ONE_ROW) as sent:
            assert sent.status == 200
        later_ns = time.monotonic_ns() + 30 * 10**9
        monkeypatch.setattr(local_facts, "time", SimpleNamespace(monotonic_ns=lambda: later_ns))
        code, hour = await asked(session, "history")
    assert (code, hour["gateway_id"], hour["step_s"]) == (200, GATEWAY, 10)
    assert 30 <= hour["covered_s"] < 90
    ((age, *counts, p99_ns),) = hour["models"]["toy:1"]
    assert (1 <= age <= 3, counts) == (True, [1, 0, 0, 0])
    assert 0 < p99_ns < 10**10


async def test_class_names_are_those_of_the_models_files(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    (repository / "toy" / "1").mkdir(parents=True)
    (repository / "toy" / "1" / "labels.txt").write_text("tench\ngoldfish\n")
    async with stage(tmp_path, model_repository=repository) as place, browser(place) as session:
        code, found = await asked(session, "classes?model=toy&version=1")
        assert (code, found) == (200, {"names": ["tench", "goldfish"]})
        assert await asked(session, "classes?model=pair") == (200, {"names": []})
        assert (await asked(session, "classes?model=nobody"))[0] == 404


async def test_a_story_is_that_of_the_session_or_request_that_was_named(
    running: Stage, counted: Counter[str]
) -> None:
    session_id = (1 << 62) + 7  # a browser's numbers would round it
    async with browser(running) as session:
        async with session.post("/v2/models/toy/infer", json={**ONE_ROW, "id": "rows"}) as sent:
            assert sent.status == 200
        code, story = await asked(session, f"story?session_id={session_id}")
        assert code == 200, story
        assert story["changes"][2]["session_id"] == str(session_id)
        assert story["changes"][7]["why"] == f"to {session_id + 1}"
        code, trace = await asked(session, "trace?request_id=rows")
        assert (code, trace["has_story"]) == (200, False)
        code, said = await asked(session, "story?request_id=rows")
        assert (code, "did not generate text" in said["error"]) == (400, True)
    assert counted["GetStory"] == 1


async def test_ten_pages_cost_the_scheduler_one_call_of_each_kind(
    running: Stage, counted: Counter[str]
) -> None:
    async with browser(running) as session:
        kinds = [kind for kind in ROUTES if kind not in ("trace", "requests", "history", "models")]
        await asyncio.gather(*(asked(session, kind) for kind in kinds for _ in range(10)))
    assert counted == {"GetStatus": 1, "GetPlan": 1, "GetTimelines": 1, "ListSessions": 1}


async def test_an_answer_says_its_age_and_is_never_kept_elsewhere(
    running: Stage, counted: Counter[str]
) -> None:
    async with browser(running) as session:
        async with session.get("/dashboard/v1/status") as response:
            await response.read()
            assert int(response.headers[AGE_HEADER]) >= 0
            assert response.headers["Cache-Control"] == "no-store"
            assert response.headers["Content-Encoding"] == "gzip"
        plain = {"Accept-Encoding": "identity"}
        async with session.get("/dashboard/v1/status", headers=plain) as response:
            assert "Content-Encoding" not in response.headers
            assert json.loads(await response.read())["epoch"] == 4


async def test_the_page_and_its_assets_are_public_and_hold_to_their_origin(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.json"
    add_key(keys, "ci", ["infer"])
    async with stage(tmp_path, wait=False, api_keys_file=keys) as place, browser(place) as session:
        for path in ("/", "/dashboard/assets/app.js", "/dashboard/assets/style.css"):
            async with session.get(path) as response:
                assert response.status == 200
                headers, body = response.headers, await response.read()
            policy = headers["Content-Security-Policy"]
            assert "default-src 'self'" in policy
            assert "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Cache-Control"] == "no-cache"
            again = {"If-None-Match": headers["ETag"]}
            async with session.get(path, headers=again) as response:
                assert (response.status, await response.read()) == (304, b"")
                assert response.headers["Content-Security-Policy"] == policy
            assert body
        for path in (
            "/dashboard/assets/api.py",
            "/dashboard/assets/..%2fapi.py",
            "/dashboard/assets/%2e%2e/api.py",
            "/dashboard/assets/",
        ):
            async with session.get(path) as response:
                assert response.status == 404, path


async def test_the_page_is_sent_compressed_to_those_who_take_it(running: Stage) -> None:
    async with aiohttp.ClientSession(f"http://{running.http}", auto_decompress=False) as session:
        sizes = Counter[str]()
        for name in files.load():
            for encoding in ("gzip", "identity"):
                path, taken = f"/dashboard/assets/{name}", {"Accept-Encoding": encoding}
                async with session.get(path, headers=taken) as response:
                    body = await response.read()
                    assert response.headers["Vary"] == "Accept-Encoding"
                    assert response.headers.get("Content-Encoding", "identity") == encoding
                plain = gzip.decompress(body) if encoding == "gzip" else body
                assert plain == files.load()[name].body
                sizes[encoding] += len(body)
    assert sizes["gzip"] < 0.5 * sizes["identity"]


async def test_data_needs_the_scope_view_or_admin(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = {scope: add_key(file, scope, [scope]) for scope in ("infer", "view", "admin", "*")}
    async with stage(tmp_path, wait=False, api_keys_file=file) as place, browser(place) as session:
        for kind in ROUTES:
            code, body = await asked(session, kind)
            assert code == 401, kind
            assert "API key" in body["error"]
            assert (await asked(session, kind, headers=bearer("ctn_wrong")))[0] == 401
            assert (await asked(session, f"{kind}?key={keys['view']}"))[0] == 401
            code, body = await asked(session, kind, headers=bearer(keys["infer"]))
            assert (code, "view" in body["error"]) == (403, True)
        for scope in ("view", "admin", "*"):
            assert (await asked(session, "requests", headers=bearer(keys[scope])))[0] == 200
        async with session.get("/dashboard/v1/status") as response:
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert "Content-Security-Policy" in response.headers


async def test_behind_tls_nothing_is_shown_without_keys(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    context = ssl.create_default_context(cafile=str(certificates.ca_file))
    tls = certificates.settings("gateway", GATEWAY)
    async with (
        stage(tmp_path, wait=False, **tls) as place,
        aiohttp.ClientSession(f"https://{place.http}") as session,
    ):
        async with session.get("/", ssl=context) as response:
            assert response.status == 200
        code, body = await asked(session, "requests", ssl=context)
        assert (code, "api_keys_file" in body["error"]) == (403, True)


async def test_without_a_scheduler_the_gateway_still_tells_what_it_knows(
    running: Stage, counted: Counter[str]
) -> None:
    await running.scheduler.stop()
    async with browser(running) as session:
        async with asyncio.timeout(30):
            while (await asked(session, "status"))[0] == 200:
                await asyncio.sleep(0.05)
        code, body = await asked(session, "status")
        assert (code, bool(body["error"])) == (503, True)
        code, body = await asked(session, "requests")
        assert (code, body["gateway"]["gateway_id"]) == (200, GATEWAY)


async def test_what_is_asked_wrongly_is_the_callers_mistake(
    running: Stage, counted: Counter[str]
) -> None:
    async with browser(running) as session:
        for wrong in (
            "timelines?seconds=0",
            "timelines?seconds=x",
            "trace?request_id=nobody",
            f"trace?request_id={'a' * 300}",
            "story",
            "story?session_id=x",
            "story?session_id=0",
            f"story?session_id={1 << 63}",
            "story?request_id=nobody",
            "story?session_id=5&request_id=nobody",
        ):
            assert (await asked(session, wrong))[0] == 400, wrong
        async with session.post("/dashboard/v1/status") as response:
            assert response.status == 405
    assert counted["GetTimelines"] == 0


async def test_a_gateway_may_be_told_to_have_no_dashboard(tmp_path: Path) -> None:
    async with stage(tmp_path, wait=False, dashboard=False) as place, browser(place) as session:
        for path in ("/", "/dashboard/v1/requests", "/dashboard/assets/app.js"):
            async with session.get(path) as response:
                assert response.status == 404


async def test_admin_lists_recent_requests_newest_first(running: Stage) -> None:
    async with browser(running) as session, grpc.aio.insecure_channel(running.admin) as channel:
        for name in ("one", "two", "three"):
            async with session.post("/v2/models/toy/infer", json={**ONE_ROW, "id": name}) as sent:
                assert sent.status == 200
        stub = admin_pb2_grpc.AdminStub(channel)
        found = (await stub.ListRequests(admin_pb2.ListRequestsRequest(limit=2))).requests
        assert [each.request_id for each in found] == ["three", "two"]
        assert {(each.model, each.outcome) for each in found} == {("toy:1", "OK")}
        assert 0 < found[0].total_ns < 10**9
        assert found[0].ended_ago_ns <= found[1].ended_ago_ns
        assert len((await stub.ListRequests(admin_pb2.ListRequestsRequest())).requests) == 3


async def test_admin_says_which_share_of_a_models_requests_was_in_time(running: Stage) -> None:
    models = [admin_pb2.ModelStatus(name=name, version="1") for name in ("toy", "pair")]
    answer = admin_pb2.GetStatusResponse(models=models)
    running.scheduler.answers["GetStatus"] = lambda _: answer
    async with browser(running) as session, grpc.aio.insecure_channel(running.admin) as channel:
        async with session.post("/v2/models/toy/infer", json=ONE_ROW) as sent:
            assert sent.status == 200
        status = await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())
    assert [model.attainment_ratio for model in status.models] == [1.0, -1.0]


async def test_what_was_refused_counts_everywhere_and_what_clients_did_wrong_nowhere(
    running: Stage,
) -> None:
    answer = admin_pb2.GetStatusResponse(models=[admin_pb2.ModelStatus(name="toy", version="1")])
    running.scheduler.answers["GetStatus"] = lambda _: answer
    wrong = {"inputs": [{**ONE_ROW["inputs"][0], "shape": [1, 5], "data": [1, 2, 3, 4, 5]}]}

    def reject(submit: scheduler_pb2.SubmitRequest) -> list[Down]:
        failure = common_pb2.Failure(reason="SLO_UNATTAINABLE", message="too late")
        rejected = scheduler_pb2.RejectRequest(request_id=submit.request_id, failure=failure)
        return [Down(reject=rejected)]

    async with browser(running) as session, grpc.aio.insecure_channel(running.admin) as channel:

        async def infer(model: str, body: dict[str, Any]) -> int:
            async with session.post(f"/v2/models/{model}/infer", json=body) as sent:
                return sent.status

        serves = running.scheduler.script
        assert await infer("toy", ONE_ROW) == 200
        assert await infer("toy", wrong) == 400
        assert await infer("nobody", ONE_ROW) == 404
        running.scheduler.script = reject
        assert [await infer("toy", ONE_ROW) for _ in range(3)] == [503] * 3
        running.scheduler.script = serves
        status = await admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        _, local = await asked(session, "requests")
    (model,) = status.models
    outcomes = model.outcomes
    assert (outcomes.good, outcomes.late, outcomes.refused, outcomes.client) == (1, 0, 3, 1)
    assert (outcomes.seconds, model.attainment_ratio) == (300, 0.25)
    toy, unnamed = local["gateway"]["models"]["toy:1"], local["gateway"]["unnamed"]
    assert (toy["arrived"], toy["good"], toy["refused"]) == (4, 1, 3)
    assert (toy["errors"], toy["client_errors"]) == ({"SLO_UNATTAINABLE": 3}, {"INVALID_INPUT": 1})
    assert (unnamed["arrived"], unnamed["client_errors"]) == (0, {"MODEL_NOT_FOUND": 1})


def test_the_cache_is_younger_than_the_interval_at_which_pages_ask() -> None:
    assert DocumentCache().max_age_ns < 10**9
