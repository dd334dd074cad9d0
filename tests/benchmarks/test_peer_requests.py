"""The prebuilt requests of `benchmarks.peers` are those that clients send."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import tritonclient.http

import catenary
from benchmarks.peers.requests import (
    GRPC_PATH,
    GRPC_PREFIX_BYTES,
    Form,
    oip_binary,
    oip_grpc,
    oip_json,
    plain_bytes,
    plain_json,
)
from benchmarks.peers.servers import PEERS
from benchmarks.peers.workloads import Workload, payload_model, workload_of
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_services.models.model_repository import ModelRepository
from cluster_harness import ROOT

SERVERS = [name for name in PEERS if name != "catenary"]
REQUIREMENTS = ROOT / "requirements/peers"


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    repository = ModelRepository(tmp_path_factory.mktemp("models"))
    return workload_of("payload", repository.model_file(payload_model(repository, "payload")))


async def test_over_grpc_they_are_what_our_sdk_sends(payload: Workload) -> None:
    seen: list[bytes] = []

    async def infer(message: bytes, _context: object) -> bytes:
        seen.append(message)
        answer = oip.ModelInferResponse(model_name="payload", raw_output_contents=[b"\0" * 4])
        answer.outputs.add(name="mean", datatype="FP32", shape=[1, 1])
        return answer.SerializeToString()

    server = grpc.aio.server()
    service, method = GRPC_PATH.strip("/").split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with catenary.AsyncClient(f"127.0.0.1:{port}") as client:
            row = {payload.input_name: payload.row}
            await client.infer("payload", row, request_id="")
    finally:
        await server.stop(0)
    body = oip_grpc(payload).body
    assert seen == [body[GRPC_PREFIX_BYTES:]]
    assert body[0] == 0, "not compressed"
    assert int.from_bytes(body[1:GRPC_PREFIX_BYTES], "big") == len(seen[0])


def test_binary_tensors_are_what_tritonclient_sends(payload: Workload) -> None:
    tensor = tritonclient.http.InferInput(payload.input_name, list(payload.row.shape), "FP32")
    tensor.set_data_from_numpy(payload.row)
    theirs, size = tritonclient.http.InferenceServerClient.generate_request_body([tensor])
    ours = oip_binary(payload)
    assert ours.headers["inference-header-content-length"] == str(size)
    assert ours.body == theirs


def of_binary(answer: np.ndarray) -> tuple[bytes, dict[str, str]]:
    head = b'{"outputs":[{"name":"mean","datatype":"FP32","shape":[1,1]}]}'
    return head + answer.tobytes(), {"inference-header-content-length": str(len(head))}


def of_grpc(answer: np.ndarray) -> tuple[bytes, dict[str, str]]:
    message = oip.ModelInferResponse(raw_output_contents=[answer.tobytes()])
    message.outputs.add(name="mean", datatype="FP32", shape=[1, 1])
    return b"\0\0\0\0\0" + message.SerializeToString(), {}


ANSWERS: list[tuple[Form, Callable[[np.ndarray], tuple[bytes, dict[str, str]]]]] = [
    (oip_grpc, of_grpc),
    (oip_binary, of_binary),
    (oip_json, lambda a: (b'{"outputs":[{"shape":[1,1],"data":[%r]}]}' % float(a[0, 0]), {})),
    (plain_json, lambda a: (b"[[%r]]" % float(a[0, 0]), {})),
    (plain_bytes, lambda a: (a.tobytes(), {})),
]


@pytest.mark.parametrize(("form", "answered"), ANSWERS)
def test_answers_are_read_and_compared_in_every_form(
    form: Form, answered: Callable[[np.ndarray], tuple[bytes, dict[str, str]]], payload: Workload
) -> None:
    request = form(payload)
    assert payload.is_right(request.read(*answered(payload.expected)))
    assert not payload.is_right(request.read(*answered(payload.expected + 0.01)))


def test_every_server_has_requirements_of_exact_releases() -> None:
    assert sorted(SERVERS) == sorted(file.stem for file in REQUIREMENTS.glob("*.txt"))
    for name in SERVERS:
        first, *others = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
        assert re.match(rf"{PEERS[name].package}(\[\w+\])?==", first), name
        assert [
            e for e in (first, *others) if not re.fullmatch(r"[\w-]+(\[\w+\])?==[\w.]+", e)
        ] == []


def test_all_servers_run_the_onnxruntime_that_answers_are_compared_with() -> None:
    constraints = (ROOT / "requirements/constraints.txt").read_text().splitlines()
    (ours,) = (line for line in constraints if line.startswith("onnxruntime=="))
    for name in SERVERS:
        assert ours in (REQUIREMENTS / f"{name}.txt").read_text().splitlines(), name


def test_programs_of_other_environments_import_nothing_of_ours() -> None:
    programs = sorted(Path(ROOT / "benchmarks/peers/serving").glob("*.py"))
    assert len(programs) > len(SERVERS)
    for program in programs:
        assert not re.search(r"^(from|import) (benchmarks|catenary)", program.read_text(), re.M)
