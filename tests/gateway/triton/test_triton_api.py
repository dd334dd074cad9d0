"""Every public call of tritonclient does what docs/open-inference-protocol.md says of it."""

from __future__ import annotations

import inspect
import queue
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from cluster_harness import ROOT
from gateway_harness import Stage
from shared_helpers.triton_clients import FORMS, TritonClient, shared_object
from shared_helpers.waiting import until

PAGE = ROOT / "docs/open-inference-protocol.md"
X = np.arange(8, dtype=np.float32).reshape(2, 4)
REGION = {"offset": 0, "byte_size": 64}

Scenario = Callable[[TritonClient, Stage, str], Awaitable[None]]


async def server_live(client: TritonClient, place: Stage, prefix: str) -> None:
    assert await client.call("is_server_live") is True


async def server_ready(client: TritonClient, place: Stage, prefix: str) -> None:
    assert await client.call("is_server_ready") is False, "one model is not ready"


async def model_ready(client: TritonClient, place: Stage, prefix: str) -> None:
    assert await client.call("is_model_ready", "toy", "1") is True
    assert await client.call("is_model_ready", "cold") is False


async def server_metadata(client: TritonClient, place: Stage, prefix: str) -> None:
    told = await client.call("get_server_metadata")
    assert told["name"] == "catenary"
    assert "system_shared_memory" in told["extensions"]
    assert not {"cuda_shared_memory", "sequence", "schedule_policy"} & set(told["extensions"])


async def model_metadata(client: TritonClient, place: Stage, prefix: str) -> None:
    told = await client.call("get_model_metadata", "toy")
    (tensor,) = told["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"]) == ("in_0", "FP32", [-1, 4])


async def model_config(client: TritonClient, place: Stage, prefix: str) -> None:
    told = await client.call("get_model_config", "toy")
    config = told["config"] if client.is_grpc else told
    (tensor,) = config["input"]
    assert (config["max_batch_size"], config["backend"]) == (65_536, "onnxruntime")
    assert (tensor["data_type"], tensor["dims"]) == ("TYPE_FP32", [4])


async def repository_index(client: TritonClient, place: Stage, prefix: str) -> None:
    told = await client.call("get_model_repository_index")
    states = {each["name"]: each["state"] for each in (told["models"] if client.is_grpc else told)}
    assert (states["toy"], states["cold"]) == ("READY", "UNAVAILABLE")


async def load(client: TritonClient, place: Stage, prefix: str) -> None:
    place.scheduler.presented.clear()
    await client.call("load_model", "toy:1")
    assert len(place.scheduler.presented) == 1


async def load_with_config(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("load_model", "toy", config="{}")


async def load_with_files(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("load_model", "toy", config="{}", files={"file:1/model.onnx": b"x"})


async def unload(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("unload_model", "toy")
    await client.call("unload_model", "pair", unload_dependents=True)
    assert place.scheduler.undeployed == ["toy", "pair"]


async def statistics(client: TritonClient, place: Stage, prefix: str) -> None:
    told = await client.call("get_inference_statistics", "toy")
    assert [each["name"] for each in told["model_stats"]] == ["toy"]
    assert len((await client.call("get_inference_statistics"))["model_stats"]) > 5


async def get_traces(client: TritonClient, place: Stage, prefix: str) -> None:
    told = await client.call("get_trace_settings")
    assert set(told["settings"] if client.is_grpc else told) >= {"trace_level", "trace_rate"}


async def update_traces(client: TritonClient, place: Stage, prefix: str) -> None:
    changes = {"trace_rate": "4", "trace_level": ["TIMESTAMPS"]}
    await client.call("update_trace_settings", settings=changes)
    assert place.gateway._tracer.sample_ratio == 0.25


async def trace_tensors(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("update_trace_settings", settings={"trace_level": ["TENSORS"]})


async def trace_to_a_file(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("update_trace_settings", settings={"trace_file": "/tmp/trace"})


async def trace_one_model(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("update_trace_settings", "toy", settings={"trace_rate": "4"})


async def get_log(client: TritonClient, place: Stage, prefix: str) -> None:
    told = await client.call("get_log_settings")
    assert "log_verbose_level" in (told["settings"] if client.is_grpc else told)


async def update_log(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("update_log_settings", {"log_info": True, "log_verbose_level": 0})


async def log_to_a_file(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("update_log_settings", {"log_file": "/tmp/log"})


async def system_memory(client: TritonClient, place: Stage, prefix: str) -> None:
    with shared_object(f"/{prefix}all", 64):
        await client.call("register_system_shared_memory", "all", f"/{prefix}all", 64)
        told = await client.call("get_system_shared_memory_status", "all")
        (region,) = told["regions"].values() if client.is_grpc else told
        assert region == {"name": "all", "key": f"/{prefix}all", **REGION}
        await client.call("unregister_system_shared_memory", "all")
        told = await client.call("get_system_shared_memory_status")
        assert not (told["regions"] if client.is_grpc else told)


async def cuda_memory(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("register_cuda_shared_memory", "gpu", b"AAAA", 0, 64)


async def cuda_status(client: TritonClient, place: Stage, prefix: str) -> None:
    told = await client.call("get_cuda_shared_memory_status")
    assert not (told["regions"] if client.is_grpc else told)


async def cuda_unregister(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("unregister_cuda_shared_memory")


async def infer(client: TritonClient, place: Stage, prefix: str) -> None:
    answer = await client.call("infer", "toy", [client.input("in_0", X)], request_id="me")
    np.testing.assert_array_equal(answer.as_numpy("out_0"), X)


async def infer_in_sequence(client: TritonClient, place: Stage, prefix: str) -> None:
    await client.call("infer", "toy", [client.input("in_0", X)], sequence_id=7)


async def async_infer(client: TritonClient, place: Stage, prefix: str) -> None:
    given = [client.input("in_0", X)]
    if client.form == "http":
        answer = await client.on_thread(
            lambda: client.client.async_infer("toy", given).get_result()
        )
    else:
        answers: queue.Queue[tuple[object, object]] = queue.Queue()
        client.client.async_infer("toy", given, lambda result, error: answers.put((result, error)))
        await until(lambda: not answers.empty(), "it answers")
        answer, error = answers.get()
        assert error is None
    np.testing.assert_array_equal(answer.as_numpy("out_0"), X)


async def stream(client: TritonClient, place: Stage, prefix: str) -> None:
    answers: queue.Queue[tuple[object, object]] = queue.Queue()
    await client.call("start_stream", lambda result, error: answers.put((result, error)))
    given = [client.input("in_0", X)]
    await client.call("async_stream_infer", "toy", given, enable_empty_final_response=True)
    await until(lambda: not answers.empty(), "it answers")
    await client.call("stop_stream")
    answer, error = answers.get()
    assert error is None
    assert answer.get_response().parameters["triton_final_response"].bool_param


async def aio_stream(client: TritonClient, place: Stage, prefix: str) -> None:
    async def requests() -> AsyncIterator[dict[str, object]]:
        for number in range(3):
            yield {
                "model_name": "toy",
                "inputs": [client.input("in_0", X + number)],
                "request_id": str(number),
            }

    got = [each async for each in client.client.stream_infer(requests())]
    assert [answer.get_response().id for answer, error in got if error is None] == ["0", "1", "2"]


async def bodies(client: TritonClient, place: Stage, prefix: str) -> None:
    body, size = client.client.generate_request_body([client.input("in_0", X)])
    assert size is not None
    assert len(body) == size + X.nbytes


SCENARIOS: dict[str, dict[str, Scenario]] = {
    "is_server_live": {"": server_live},
    "is_server_ready": {"": server_ready},
    "is_model_ready": {"": model_ready},
    "get_server_metadata": {"": server_metadata},
    "get_model_metadata": {"": model_metadata},
    "get_model_config": {"": model_config},
    "get_model_repository_index": {"": repository_index},
    "load_model": {"": load, "config": load_with_config, "files": load_with_files},
    "unload_model": {"": unload},
    "get_inference_statistics": {"": statistics},
    "get_trace_settings": {"": get_traces},
    "update_trace_settings": {
        "": update_traces,
        "TENSORS": trace_tensors,
        "trace_file": trace_to_a_file,
        "model_name": trace_one_model,
    },
    "get_log_settings": {"": get_log},
    "update_log_settings": {"": update_log, "log_file": log_to_a_file},
    "register_system_shared_memory": {"": system_memory},
    "get_system_shared_memory_status": {"": system_memory},
    "unregister_system_shared_memory": {"": system_memory},
    "register_cuda_shared_memory": {"": cuda_memory},
    "get_cuda_shared_memory_status": {"": cuda_status},
    "unregister_cuda_shared_memory": {"": cuda_unregister},
    "infer": {"": infer, "sequence_id": infer_in_sequence},
    "async_infer": {"": async_infer},
    "start_stream": {"": stream},
    "async_stream_infer": {"": stream},
    "stop_stream": {"": stream},
    "stream_infer": {"": aio_stream},
    "generate_request_body": {"": bodies},
}
CLIENTS_OWN = {"close", "plugin", "register_plugin", "unregister_plugin", "parse_response_body"}
"""Methods that ask no server."""


def rows_of_the_page() -> dict[tuple[str, str], str]:
    """What the page says of a call, by method and argument: "yes", or why it is refused."""
    section = PAGE.read_text().partition("\n## tritonclient")[2]
    found = re.findall(r"(?m)^\| `(\w+)`(?: with `(\w+)`)? \| ([^|]+) \|", section)
    return {(method, argument): said.strip() for method, argument, said in found}


def methods_of(form: str) -> set[str]:
    client = FORMS[form].InferenceServerClient
    return {name for name, _ in inspect.getmembers(client, inspect.isfunction) if name[0] != "_"}


def test_every_call_has_a_row_and_a_scenario() -> None:
    theirs = set().union(*map(methods_of, FORMS)) - CLIENTS_OWN
    assert theirs == set(SCENARIOS)
    assert set(rows_of_the_page()) == {
        (method, argument) for method, kinds in SCENARIOS.items() for argument in kinds
    }


@pytest.mark.parametrize(
    ("method", "argument"),
    [(method, argument) for method, kinds in SCENARIOS.items() for argument in kinds],
)
async def test_a_call_does_what_the_page_says(
    client: TritonClient, sharing: Stage, prefix: str, method: str, argument: str
) -> None:
    if method not in methods_of(client.form):
        pytest.skip("this form of the client has no such method")
    if (client.form, argument) == ("http.aio", "files"):
        pytest.skip("this form of the client fails at files itself: it does not import base64")
    said = rows_of_the_page()[method, argument]
    scenario = SCENARIOS[method][argument]
    if said == "yes":
        await scenario(client, sharing, prefix)
        return
    with pytest.raises(InferenceServerException, match=re.escape(said.removeprefix("no: "))):
        await scenario(client, sharing, prefix)
    assert sharing.scheduler.undeployed == []
