from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as rpc
from google.rpc import status_pb2

from catenary_services import errors
from catenary_services.errors import CatenaryError
from catenary_services.grpc import error_tables

C = grpc.StatusCode
SECOND = 1_000_000_000

# error, gRPC code, HTTP status, details in order, push-back in ms, Retry-After, retryable
TABLE = [
    (
        errors.InvalidInput("inputs[0].shape", "wrong"),
        C.INVALID_ARGUMENT,
        400,
        [rpc.BadRequest, rpc.ErrorInfo],
        None,
        None,
        False,
    ),
    (errors.PayloadTooLarge("big"), C.RESOURCE_EXHAUSTED, 413, [rpc.ErrorInfo], "-1", None, False),
    (
        errors.ModelNotFound("no", details={"model": "m"}),
        C.NOT_FOUND,
        404,
        [rpc.ResourceInfo, rpc.ErrorInfo],
        None,
        None,
        False,
    ),
    (errors.NotSupported("no"), C.UNIMPLEMENTED, 501, [rpc.ErrorInfo], None, None, False),
    (errors.Unauthenticated("who"), C.UNAUTHENTICATED, 401, [], None, None, False),
    (errors.PermissionDenied("no"), C.PERMISSION_DENIED, 403, [], None, None, False),
    (errors.RequestCancelled("gone"), C.CANCELLED, 499, [], None, None, False),
    (
        errors.CacheFull("full"),
        C.RESOURCE_EXHAUSTED,
        503,
        [rpc.RetryInfo, rpc.ErrorInfo],
        "100",
        "1",
        True,
    ),
    (
        errors.Overloaded("full"),
        C.RESOURCE_EXHAUSTED,
        503,
        [rpc.RetryInfo, rpc.ErrorInfo],
        "100",
        "1",
        True,
    ),
    (
        errors.Overloaded("full", retry_after_ns=2_500_000_001),
        C.RESOURCE_EXHAUSTED,
        503,
        [rpc.RetryInfo, rpc.ErrorInfo],
        "2501",
        "3",
        True,
    ),
    (
        errors.SloUnattainable(
            "late", retry_after_ns=40_000_000, details={"earliest_finish_ms": "120"}
        ),
        C.RESOURCE_EXHAUSTED,
        503,
        [rpc.RetryInfo, rpc.ErrorInfo],
        "40",
        "1",
        False,
    ),
    (
        errors.SloUnattainable("never"),
        C.RESOURCE_EXHAUSTED,
        503,
        [rpc.ErrorInfo],
        "-1",
        None,
        False,
    ),
    (
        errors.QuotaExceeded("over"),
        C.RESOURCE_EXHAUSTED,
        429,
        [rpc.QuotaFailure, rpc.RetryInfo, rpc.ErrorInfo],
        "1000",
        "1",
        False,
    ),
    (
        errors.DeadlineExceeded("late", details={"stage": "compute"}),
        C.DEADLINE_EXCEEDED,
        504,
        [rpc.ErrorInfo],
        None,
        None,
        False,
    ),
    (
        errors.NoActivePlan("none"),
        C.FAILED_PRECONDITION,
        503,
        [rpc.PreconditionFailure, rpc.ErrorInfo],
        None,
        None,
        True,
    ),
    (
        errors.PlanInfeasible("no"),
        C.FAILED_PRECONDITION,
        409,
        [rpc.PreconditionFailure, rpc.ErrorInfo],
        None,
        None,
        False,
    ),
    (
        errors.ContentMismatch("net:1/model.onnx on gpu3", details={"file": "net:1/model.onnx"}),
        C.FAILED_PRECONDITION,
        409,
        [rpc.PreconditionFailure, rpc.ErrorInfo],
        None,
        None,
        False,
    ),
    (
        errors.CanaryFailed("off"),
        C.FAILED_PRECONDITION,
        409,
        [rpc.PreconditionFailure, rpc.ErrorInfo],
        None,
        None,
        False,
    ),
    (
        errors.StaleEpoch("old", details={"epoch": "3"}),
        C.ABORTED,
        409,
        [rpc.ErrorInfo],
        None,
        None,
        True,
    ),
    (
        errors.Unavailable("draining"),
        C.UNAVAILABLE,
        503,
        [rpc.RetryInfo, rpc.ErrorInfo],
        "1000",
        "1",
        True,
    ),
    (
        errors.PartitionLost("lost"),
        C.UNAVAILABLE,
        503,
        [rpc.RetryInfo, rpc.ErrorInfo],
        "100",
        "1",
        True,
    ),
    (
        errors.InvalidMessage("StageReport", "compute_ns", "no"),
        C.INVALID_ARGUMENT,
        400,
        [rpc.BadRequest, rpc.ErrorInfo],
        "-1",
        None,
        False,
    ),
    (
        errors.DeviceFailed("failed"),
        C.UNAVAILABLE,
        503,
        [rpc.RetryInfo, rpc.ErrorInfo],
        "100",
        "1",
        True,
    ),
    (
        errors.DeviceLost("lost"),
        C.UNAVAILABLE,
        503,
        [rpc.RetryInfo, rpc.ErrorInfo],
        "1000",
        "1",
        True,
    ),
    (
        errors.DeviceOutOfMemory("full"),
        C.UNAVAILABLE,
        503,
        [rpc.RetryInfo, rpc.ErrorInfo],
        "1000",
        "1",
        True,
    ),
    (errors.ComputeFailed("failed twice"), C.INTERNAL, 500, [rpc.ErrorInfo], None, None, False),
    (
        errors.InternalError(
            "internal error, id 0123456789ab", details={"error_id": "0123456789ab"}
        ),
        C.INTERNAL,
        500,
        [rpc.RequestInfo],
        None,
        None,
        False,
    ),
    (errors.InternalError("bare"), C.INTERNAL, 500, [], None, None, False),
]
ROWS = pytest.mark.parametrize(
    ("error", "code", "http", "kinds", "pushback", "retry_after", "retryable"), TABLE
)


def leaves(cls: type[CatenaryError]) -> set[type[CatenaryError]]:
    below = cls.__subclasses__()
    return set().union(*(leaves(child) for child in below)) if below else {cls}


def unpack(status: status_pb2.Status, kind: type[Message]) -> Message:
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            return kind.FromString(packed.value)
    raise AssertionError(f"{kind} is missing")


def test_table_covers_every_leaf() -> None:
    assert {type(row[0]) for row in TABLE} == leaves(CatenaryError)
    assert set(error_tables.TABLE) == leaves(CatenaryError)


@ROWS
def test_grpc_row(
    error: CatenaryError,
    code: grpc.StatusCode,
    http: int,
    kinds: list[type[Message]],
    pushback: str | None,
    retry_after: str | None,
    retryable: bool,
) -> None:
    assert error_tables.grpc_code(error) is code
    status = error_tables.rpc_status(error)
    assert status.code == code.value[0]
    assert [packed.TypeName() for packed in status.details] == [
        kind.DESCRIPTOR.full_name for kind in kinds
    ]
    trailers = dict(error_tables.trailing_metadata(error))
    assert trailers.get("grpc-retry-pushback-ms") == pushback
    assert status_pb2.Status.FromString(trailers["grpc-status-details-bin"]) == status
    if rpc.ErrorInfo in kinds:
        info = unpack(status, rpc.ErrorInfo)
        assert (info.reason, info.domain) == (error.reason, "catenary")
        assert dict(info.metadata) == error.details


@ROWS
def test_http_row(
    error: CatenaryError,
    code: grpc.StatusCode,
    http: int,
    kinds: list[type[Message]],
    pushback: str | None,
    retry_after: str | None,
    retryable: bool,
) -> None:
    assert error_tables.http_status(error) == http
    assert error_tables.http_headers(error).get("Retry-After") == retry_after
    message = error_tables.public_message(error)
    assert error_tables.http_body(error) == {"error": message}
    body = error_tables.openai_body(error)["error"]
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == error.reason.lower()


@ROWS
def test_failure_crosses_processes(
    error: CatenaryError,
    code: grpc.StatusCode,
    http: int,
    kinds: list[type[Message]],
    pushback: str | None,
    retry_after: str | None,
    retryable: bool,
) -> None:
    failure = error_tables.failure_of(error, "agent-3")
    assert (failure.reason, failure.agent_id) == (error.reason, "agent-3")
    assert failure.retryable is retryable
    back = error_tables.error_of(failure)
    assert type(back) is type(error)
    assert back.message == error_tables.public_message(error)
    assert back.details["agent_id"] == "agent-3"
    assert back.details.get("field") == error.details.get("field")


def test_retryable_can_be_overridden() -> None:
    assert error_tables.failure_of(errors.InternalError("x"), retryable=True).retryable


def test_details_hold_the_facts() -> None:
    bad = unpack(error_tables.rpc_status(errors.InvalidInput("a.b", "is c")), rpc.BadRequest)
    assert (bad.field_violations[0].field, bad.field_violations[0].description) == ("a.b", "is c")
    lost = errors.ModelNotFound("no such model", details={"model": "m"})
    assert unpack(error_tables.rpc_status(lost), rpc.ResourceInfo).resource_name == "m"
    wait = errors.Overloaded("full", retry_after_ns=1_500_000_000)
    delay = unpack(error_tables.rpc_status(wait), rpc.RetryInfo).retry_delay
    assert (delay.seconds, delay.nanos) == (1, 500_000_000)


def test_a_endpoint_asks_for_the_key_it_misses() -> None:
    assert error_tables.http_headers(errors.Unauthenticated("no"))["WWW-Authenticate"] == "Bearer"


def test_internals_never_leak() -> None:
    error = errors.InternalError("password is hunter2", details={"path": "/secret"})
    seen = f"{error_tables.rpc_status(error)}{error_tables.http_body(error)}"
    seen += f"{error_tables.openai_body(error)}{error_tables.failure_of(error)}"
    assert "hunter2" not in seen
    assert "secret" not in seen
    unknown = error_tables.error_of_exception(KeyError("hunter2"))
    assert isinstance(unknown, errors.InternalError)
    assert "hunter2" not in unknown.message
    assert unknown.details["error_id"] in error_tables.public_message(unknown)
    named = error_tables.error_of_exception(error)
    assert named.details["error_id"] in error_tables.public_message(named)


def test_known_exceptions_keep_their_meaning() -> None:
    ours = errors.Overloaded("full")
    assert error_tables.error_of_exception(ours) is ours
    assert isinstance(error_tables.error_of_exception(TimeoutError()), errors.DeadlineExceeded)


class Service(grpc.GenericRpcHandler):
    """Aborts every call with the error it holds."""

    error: CatenaryError

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.fail)

    async def fail(self, _: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await error_tables.abort(context, self.error)


@pytest.fixture
async def failing() -> AsyncIterator[tuple[Service, grpc.aio.UnaryUnaryMultiCallable]]:
    service = Service()
    server = grpc.aio.server(handlers=[service])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service, channel.unary_unary("/a/b")
    await server.stop(None)


@ROWS
async def test_error_comes_out_of_a_real_call_as_it_went_in(
    failing: tuple[Service, grpc.aio.UnaryUnaryMultiCallable],
    error: CatenaryError,
    code: grpc.StatusCode,
    http: int,
    kinds: list[type[Message]],
    pushback: str | None,
    retry_after: str | None,
    retryable: bool,
) -> None:
    service, call = failing
    service.error = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", timeout=5.0)
    assert caught.value.code() is code
    back = error_tables.error_of_exception(caught.value)
    assert type(back) is type(error)
    assert error_tables.retry_after_ns(back) == error_tables.retry_after_ns(error)
    if rpc.ErrorInfo in kinds:
        assert back.details == error.details


@pytest.mark.parametrize("letter", ["x", "é", "日"])
async def test_endless_texts_still_arrive_as_a_status(
    failing: tuple[Service, grpc.aio.UnaryUnaryMultiCallable], letter: str
) -> None:
    service, call = failing
    service.error = errors.InvalidInput(letter * 5000, letter * 50_000)
    service.error.details.update({f"{letter}{number}": letter * 5000 for number in range(50)})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", timeout=5.0)
    assert caught.value.code() is C.INVALID_ARGUMENT
    assert isinstance(error_tables.error_of_exception(caught.value), errors.InvalidInput)


async def test_nobody_listening_is_unavailable() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/a/b")(b"", timeout=5.0)
    assert isinstance(error_tables.error_of_exception(caught.value), errors.Unavailable)


def test_damaged_trailers_fall_back_to_the_code() -> None:
    error = grpc.aio.AioRpcError(
        C.NOT_FOUND,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff")),
        "no",
    )
    assert isinstance(error_tables.error_of_exception(error), errors.ModelNotFound)
