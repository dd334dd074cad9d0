"""What the protocol does not know is ignored, but for orders and settings, which are refused."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from gateway_harness import Stage

TENSOR = {"name": "in_0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
UNKNOWN = {"never_heard_of": {"a": [1]}}
LOAD, UNLOAD = "/v2/repository/models/toy/load", "/v2/repository/models/toy/unload"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v2/models/toy/infer", {"inputs": [TENSOR], **UNKNOWN}, 200, ""),
        ("/v2/models/toy/infer", {"inputs": [TENSOR | UNKNOWN]}, 200, ""),
        ("/v2/models/toy/infer", {"inputs": [TENSOR], "parameters": UNKNOWN}, 200, ""),
        ("/v2/models/toy/infer", {"inputs": [TENSOR | {"parameters": UNKNOWN}]}, 200, ""),
        (
            "/v2/models/toy/infer",
            {"inputs": [TENSOR], "outputs": [{"name": "out_0", "parameters": UNKNOWN} | UNKNOWN]},
            200,
            "",
        ),
        ("/v2/repository/index", UNKNOWN, 200, ""),
        ("/v2/repository/index", {"ready": 1}, 400, "ready: "),
        (LOAD, UNKNOWN, 200, ""),
        (LOAD, {"parameters": UNKNOWN}, 501, "parameters['never_heard_of']: "),
        (UNLOAD, {"parameters": {"unload_dependents": True}}, 200, ""),
        (UNLOAD, {"parameters": UNKNOWN}, 501, "parameters['never_heard_of']: "),
        ("/v2/trace/setting", {"never_heard_of": "x"}, 400, "'never_heard_of'"),
        ("/v2/logging", {"never_heard_of": True}, 400, "'never_heard_of'"),
    ],
)
async def test_each_call_does_what_the_page_says(
    sharing: Stage, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    async with (
        aiohttp.ClientSession(f"http://{sharing.http}") as session,
        session.post(path, json=body) as answer,
    ):
        document = await answer.json()
        assert answer.status == status, document
        assert not says or says in document["error"]
