"""Whatever a body says, the answer is never an error of the server, and nothing stays held."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_gateway.openai_http.description.route_table import HttpRoute, ReadBody
from catenary_gateway.openai_http.paths import ROUTES
from generation_harness import TextStage
from shared_helpers.encoder_agent import all_paths_stage

WITH_BODIES = [route for route in ROUTES if route.body is not None]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        ["", "tiny", "sentences", "judge", "user", "text", "message", "auto", "\ud800"]
    )
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "format", "input", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
TEXT = st.sampled_from(["a", "the cat", ""])
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny", "sentences", "shortened", "judge", "classes", "toy"]),
    "input": TEXT | st.lists(TEXT, max_size=3),
    "messages": st.just([{"role": "user", "content": "hi"}]),
    "prompt": TEXT,
    "max_tokens": st.integers(1, 9),
    "text_1": TEXT,
    "text_2": st.lists(TEXT, max_size=3),
    "query": TEXT,
    "documents": st.lists(TEXT, max_size=3),
    "tokens": st.lists(st.integers(0, 300), max_size=4),
}


def names_of(route: HttpRoute) -> list[str]:
    body = route.body
    assert body is not None
    return body.names() if isinstance(body, ReadBody) else list(body.__struct_fields__)


@st.composite
def bodies(draw: st.DrawFn, names: list[str]) -> dict[str, Any]:
    """A body with likely values, of which some are replaced by any."""
    body = {name: draw(LIKELY[name]) for name in names if name in LIKELY}
    changed = draw(st.lists(st.sampled_from([*names, "unheard_of"]), max_size=3))
    return body | {name: draw(VALUES) for name in changed}


class Door:
    """A gateway on an event loop of its own, for tests that try many bodies."""

    def __init__(self, root: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._stage = all_paths_stage(root, bad_requests_per_s=1e6)
        self.stage: TextStage = self.run(self._stage.__aenter__())
        self._session = self.run(self._open())

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60.0)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        return self.run(self._post(path, json.dumps(body).encode()))

    async def _post(self, path: str, data: bytes) -> tuple[int, str]:
        async with self._session.post(f"{self.stage.http}{path}", data=data) as answer:
            return answer.status, await answer.text()

    def close(self) -> None:
        self.run(self._session.close())
        self.run(self._stage.__aexit__(None, None, None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    made = Door(tmp_path_factory.mktemp("door"))
    yield made
    made.close()  # which fails if anything is still held


@pytest.mark.parametrize("route", WITH_BODIES, ids=lambda route: route.path)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_is_answered_with_an_error_of_the_server(
    door: Door, route: HttpRoute, data: st.DataObject
) -> None:
    body = data.draw(bodies(names_of(route)))
    status, text = door.post(route.path, body)
    assert status in (200, 400, 404), (body, text)
