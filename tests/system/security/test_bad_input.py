"""Bad input against a real cluster with API keys: right status, field named, nothing crashes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import numpy as np
import pytest

from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_services.security.keys import add_key
from catenaryd.demo.demo_models import preprocess, sample_photographs
from cluster_harness import MODEL, RunningCluster, running_cluster
from fault_cluster import install_images

pytestmark = pytest.mark.system

SHAPE = (1, 3, 224, 224)
CODE = grpc.StatusCode


@dataclass
class Secured:
    cluster: RunningCluster
    key: str
    tensor: str
    image: np.ndarray

    def infer(
        self, request: oip.ModelInferRequest, key: str | None = None
    ) -> oip.ModelInferResponse:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        metadata = [] if key == "" else [("authorization", f"Bearer {key or self.key}")]
        with grpc.insecure_channel(self.cluster.grpc, options=options) as channel:
            stub = oip_grpc.GRPCInferenceServiceStub(channel)
            return stub.ModelInfer(request, timeout=20, metadata=metadata)

    def good(self) -> oip.ModelInferRequest:
        request = oip.ModelInferRequest(model_name=MODEL, id="x")
        request.inputs.add(name=self.tensor, datatype="FP32", shape=SHAPE)
        request.raw_input_contents.append(self.image.tobytes())
        return request


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    data_dir = tmp_path_factory.mktemp("secured")
    install_images(data_dir / "models")
    key = add_key(data_dir / "keys.json", "tests", ["infer"])
    config = {
        "gateway": {"api_keys_file": str(data_dir / "keys.json"), "max_request_bytes": 4 << 20}
    }
    with running_cluster(data_dir, config=config, agents=2) as cluster:
        options = [("authorization", f"Bearer {key}")]
        with grpc.insecure_channel(cluster.grpc) as channel:
            metadata = oip_grpc.GRPCInferenceServiceStub(channel).ModelMetadata(
                oip.ModelMetadataRequest(name=MODEL), metadata=options, timeout=10
            )
        yield Secured(
            cluster, key, metadata.inputs[0].name, preprocess(sample_photographs()["chelsea"])
        )


def change(
    edit: Callable[[oip.ModelInferRequest], object],
) -> Callable[[Secured], oip.ModelInferRequest]:
    def build(secured: Secured) -> oip.ModelInferRequest:
        request = secured.good()
        edit(request)
        return request

    return build


def typed_too(request: oip.ModelInferRequest) -> None:
    request.inputs[0].contents.fp32_contents.append(1.0)


def huge(request: oip.ModelInferRequest) -> None:
    request.raw_input_contents[0] = bytes(5 << 20)


def rows(number: int) -> Callable[[oip.ModelInferRequest], None]:
    def edit(request: oip.ModelInferRequest) -> None:
        request.inputs[0].shape[0] = number

    return edit


def overflow(request: oip.ModelInferRequest) -> None:
    del request.inputs[0].shape[:]
    request.inputs[0].shape.extend([2**62, 2**62, 2, 2])


GRPC_TABLE = [
    ("unknown model", lambda r: setattr(r, "model_name", "nope"), CODE.NOT_FOUND, "nope"),
    ("empty model", lambda r: setattr(r, "model_name", ""), CODE.NOT_FOUND, ""),
    ("unknown version", lambda r: setattr(r, "model_version", "999"), CODE.NOT_FOUND, "999"),
    ("path as model", lambda r: setattr(r, "model_name", "../../etc/passwd"), CODE.NOT_FOUND, ""),
    (
        "no input",
        lambda r: (r.ClearField("inputs"), r.ClearField("raw_input_contents")),
        CODE.INVALID_ARGUMENT,
        "inputs",
    ),
    (
        "unknown input",
        lambda r: setattr(r.inputs[0], "name", "other"),
        CODE.INVALID_ARGUMENT,
        "inputs[0].name",
    ),
    (
        "input twice",
        lambda r: (
            r.inputs.append(r.inputs[0]),
            r.raw_input_contents.append(r.raw_input_contents[0]),
        ),
        CODE.INVALID_ARGUMENT,
        "inputs[1]",
    ),
    (
        "wrong datatype",
        lambda r: setattr(r.inputs[0], "datatype", "FP64"),
        CODE.INVALID_ARGUMENT,
        "inputs[0].datatype",
    ),
    (
        "made-up datatype",
        lambda r: setattr(r.inputs[0], "datatype", "FP7"),
        CODE.INVALID_ARGUMENT,
        "inputs[0].datatype",
    ),
    (
        "missing dimension",
        lambda r: r.inputs[0].shape.pop(),
        CODE.INVALID_ARGUMENT,
        "inputs[0].shape",
    ),
    ("negative dimension", rows(-1), CODE.INVALID_ARGUMENT, "inputs[0].shape"),
    ("no rows", rows(0), CODE.INVALID_ARGUMENT, "inputs[0].shape"),
    ("overflowing shape", overflow, CODE.INVALID_ARGUMENT, "inputs[0]"),
    ("more rows than bytes", rows(2), CODE.INVALID_ARGUMENT, "raw_input_contents[0]"),
    (
        "raw too short",
        lambda r: r.raw_input_contents.__setitem__(0, r.raw_input_contents[0][:-4]),
        CODE.INVALID_ARGUMENT,
        "raw_input_contents[0]",
    ),
    (
        "raw one byte long",
        lambda r: r.raw_input_contents.__setitem__(0, b"x"),
        CODE.INVALID_ARGUMENT,
        "raw_input_contents[0]",
    ),
    (
        "raw missing",
        lambda r: r.ClearField("raw_input_contents"),
        CODE.INVALID_ARGUMENT,
        "inputs[0]",
    ),
    (
        "raw one too many",
        lambda r: r.raw_input_contents.append(b"abcd"),
        CODE.INVALID_ARGUMENT,
        "raw_input_contents",
    ),
    ("typed and raw", typed_too, CODE.INVALID_ARGUMENT, "contents"),
    (
        "unknown output",
        lambda r: r.outputs.add(name="nothing"),
        CODE.INVALID_ARGUMENT,
        "outputs[0]",
    ),
    (
        "negative slo",
        lambda r: r.parameters["slo_ms"].__setattr__("int64_param", -5),
        CODE.INVALID_ARGUMENT,
        "slo_ms",
    ),
    (
        "slo as text",
        lambda r: r.parameters["slo_ms"].__setattr__("string_param", "soon"),
        CODE.INVALID_ARGUMENT,
        "slo_ms",
    ),
    (
        "impossible slo",
        lambda r: r.parameters["slo_ms"].__setattr__("int64_param", 1),
        (CODE.RESOURCE_EXHAUSTED, CODE.DEADLINE_EXCEEDED),
        "",
    ),
    ("huge request", huge, (CODE.INVALID_ARGUMENT, CODE.RESOURCE_EXHAUSTED), ""),
]


@pytest.mark.parametrize(
    ("name", "edit", "code", "says"), GRPC_TABLE, ids=[row[0] for row in GRPC_TABLE]
)
def test_grpc_refuses(secured: Secured, name: str, edit, code, says: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        secured.infer(change(edit)(secured))
    allowed = code if isinstance(code, tuple) else (code,)
    assert raised.value.code() in allowed, raised.value.details()
    assert says in raised.value.details()
    assert len(secured.infer(secured.good()).raw_output_contents) == 1, "it no longer serves"


@pytest.mark.parametrize("key", ["", "wrong", "Bearer", "x" * 5000])
def test_grpc_refuses_bad_keys(secured: Secured, key: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        secured.infer(secured.good(), key=key)
    assert raised.value.code() == CODE.UNAUTHENTICATED


def test_ignores_unknown_parameters(secured: Secured) -> None:
    request = secured.good()
    request.parameters["somebody_elses"].string_param = "x"
    assert secured.infer(request).id == "x"


def http(
    secured: Secured, path: str, body: bytes | None, headers: dict[str, str]
) -> tuple[int, str]:
    request = urllib.request.Request(secured.cluster.http + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def document(**changes: object) -> dict[str, object]:
    tensor = {"name": "input", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0], **changes}
    return {"inputs": [tensor]}


HTTP_TABLE = [
    ("not json", b"{", 400, ""),
    ("a list", b"[]", 400, ""),
    ("no inputs", b"{}", 400, "inputs"),
    ("inputs is text", b'{"inputs": "x"}', 400, "inputs"),
    ("unknown name", document(name="who"), 400, "inputs[0].name"),
    ("bad shape type", document(shape="big"), 400, "inputs[0].shape"),
    ("text data", document(data=["a", "b"]), 400, "inputs[0]"),
    ("ragged data", document(data=[[1.0], [2.0, 3.0]]), 400, "inputs[0]"),
    ("binary size lies", document(parameters={"binary_data_size": 99}), 400, "inputs[0]"),
]


@pytest.mark.parametrize(
    ("name", "body", "status", "says"), HTTP_TABLE, ids=[row[0] for row in HTTP_TABLE]
)
def test_http_refuses(secured: Secured, name: str, body, status: int, says: str) -> None:
    if isinstance(body, dict):
        if body["inputs"][0]["name"] == "input":
            body["inputs"][0]["name"] = secured.tensor
        body = json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {secured.key}", "Content-Type": "application/json"}
    got, text = http(secured, f"/v2/models/{MODEL}/infer", body, headers)
    assert got == status, text
    assert says in json.loads(text)["error"]


def test_http_refuses_keys_paths_and_sizes(secured: Secured) -> None:
    good = {"Authorization": f"Bearer {secured.key}"}
    path = f"/v2/models/{MODEL}/infer"
    assert http(secured, path, b"{}", {})[0] == 401
    assert http(secured, path, b"{}", {"Authorization": "Bearer nope"})[0] == 401
    assert http(secured, "/v2/models/nope/infer", b"{}", good)[0] == 404
    assert http(secured, "/v2/nothing/here", None, good)[0] == 404
    assert http(secured, path, b" " * (6 << 20), good)[0] == 413
    lying = {**good, "Inference-Header-Content-Length": "99999"}
    assert http(secured, path, b"{}", lying)[0] == 400
    assert http(secured, "/v2/health/ready", None, {})[0] == 200
