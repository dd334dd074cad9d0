"""What web pages of other origins may change at a gateway, which is nothing unless somebody said so."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from catenary_services.security.keys import add_key
from gateway_harness import stage

PAGE = "http://page.example"


def orders(name: str) -> dict[str, dict[str, object]]:
    """Every path by which the server itself is changed, with a body that it takes."""
    return {
        "/v2/logging": {"log_info": True},
        "/v2/trace/setting": {"trace_rate": "1"},
        "/v2/repository/models/toy/load": {},
        "/v2/repository/models/toy/unload": {},
        f"/v2/systemsharedmemory/region/{name}/register": {"key": name, "byte_size": 1},
        "/v2/systemsharedmemory/unregister": {},
        f"/v2/systemsharedmemory/region/{name}/unregister": {},
        f"/v2/cudasharedmemory/region/{name}/register": {},
        "/v2/cudasharedmemory/unregister": {},
        f"/v2/cudasharedmemory/region/{name}/unregister": {},
    }


@pytest.mark.parametrize("origins", [[], ["*"], ["*", "http://other.example"]])
async def test_a_page_changes_nothing_at_a_gateway_without_keys(
    tmp_path: Path, prefix: str, origins: list[str]
) -> None:
    settings = {"shared_memory_prefix": prefix, "bad_requests_per_s": 1e6}
    async with (
        stage(tmp_path, cors_origins=origins, **settings) as place,
        aiohttp.ClientSession(f"http://{place.http}") as session,
    ):
        # A page whose name was made to lead here (DNS rebinding) can send any header.
        for origin in (PAGE, "null", "*", f"http://{place.http}"):
            for more in ({}, {"Authorization": "Bearer anything"}, {"X-Api-Key": "anything"}):
                headers = {"Origin": origin, "Content-Type": "text/plain", **more}
                for path, body in orders(prefix).items():
                    async with session.post(path, json=body, headers=headers) as answer:
                        assert answer.status == 403, path
                        assert "web pages" in (await answer.json())["error"]
        assert not place.scheduler.presented
        assert not place.scheduler.undeployed
        # What is no page says no origin, and whoever reaches the port may do as before.
        async with session.post("/v2/repository/models/toy/unload") as answer:
            assert answer.status == 200
        async with session.get("/v2/logging", headers={"Origin": PAGE}) as answer:
            assert answer.status == 200


async def test_pages_of_named_origins_change_the_server(tmp_path: Path, prefix: str) -> None:
    origins = ["*", PAGE]
    async with (
        stage(tmp_path, shared_memory_prefix=prefix, cors_origins=origins) as place,
        aiohttp.ClientSession(f"http://{place.http}", headers={"Origin": PAGE}) as session,
    ):
        async with session.post("/v2/repository/models/toy/unload") as answer:
            assert answer.status == 200
        assert place.scheduler.undeployed == ["toy"]


async def test_with_keys_a_page_needs_one_whatever_its_origin(tmp_path: Path, prefix: str) -> None:
    keys = tmp_path / "keys.json"
    given = {name: add_key(keys, name, [name]) for name in ("admin", "infer")}
    settings = {"shared_memory_prefix": prefix, "cors_origins": ["*"], "api_keys_file": keys}
    unload = "/v2/repository/models/toy/unload"
    async with (
        stage(tmp_path, **settings) as place,
        aiohttp.ClientSession(f"http://{place.http}", headers={"Origin": PAGE}) as session,
    ):
        for path, body in orders(prefix).items():
            async with session.post(path, json=body) as answer:
                assert answer.status == 401, path
        for name, status in (("infer", 403), ("admin", 200)):
            headers = {"Authorization": f"Bearer {given[name]}"}
            async with session.post(unload, headers=headers) as answer:
                assert answer.status == status
