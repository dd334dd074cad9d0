from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

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


class Row(NamedTuple):
    """What becomes of an error in each of the three forms."""

    error: CatenaryError
    code: grpc.StatusCode
    http: int
    kinds: list[type[Message]]
    """Of the details, in order."""
    pushback: str | None = None
    """In milliseconds."""
    retry_after: str | None = None
    retryable: bool = False


REASON: list[type[Message]] = [rpc.ErrorInfo]
FIELD: list[type[Message]] = [rpc.BadRequest, *REASON]
RETRY: list[type[Message]] = [rpc.RetryInfo, *REASON]
PRECONDITION: list[type[Message]] = [rpc.PreconditionFailure, *REASON]
TABLE = [
    Row(errors.InvalidInput("inputs[0].shape", "wrong"), C.INVALID_ARGUMENT, 400, FIELD),
    Row(errors.PayloadTooLarge("big"), C.RESOURCE_EXHAUSTED, 413, REASON, "-1"),
    Row(
        errors.ModelNotFound("no", details={"model": "m"}),
        C.NOT_FOUND,
        404,
        [rpc.ResourceInfo, rpc.ErrorInfo],
    ),
    Row(errors.NotSupported("no"), C.UNIMPLEMENTED, 501, REASON),
    Row(errors.Unauthenticated("who"), C.UNAUTHENTICATED, 401, []),
    Row(errors.PermissionDenied("no"), C.PERMISSION_DENIED, 403, []),
    Row(errors.RequestCancelled("gone"), C.CANCELLED, 499, []),
    Row(errors.CacheFull("full"), C.RESOURCE_EXHAUSTED, 503, RETRY, "100", "1", True),
    Row(errors.Overloaded("full"), C.RESOURCE_EXHAUSTED, 503, RETRY, "100", "1", True),
    Row(
        errors.Overloaded("full", retry_after_ns=2_500_000_001),
        C.RESOURCE_EXHAUSTED,
        503,
        RETRY,
        "2501",
        "3",
        True,
    ),
    Row(
        errors.SloUnattainable(
            "late", retry_after_ns=40_000_000, details={"earliest_finish_ms": "120"}
        ),
        C.RESOURCE_EXHAUSTED,
        503,
        RETRY,
        "40",
        "1",
    ),
    Row(errors.SloUnattainable("never"), C.RESOURCE_EXHAUSTED, 503, REASON, "-1"),
    Row(
        errors.QuotaExceeded("over"),
        C.RESOURCE_EXHAUSTED,
        429,
        [rpc.QuotaFailure, rpc.RetryInfo, rpc.ErrorInfo],
        "1000",
        "1",
    ),
    Row(
        errors.DeadlineExceeded("late", details={"stage": "compute"}),
        C.DEADLINE_EXCEEDED,
        504,
        REASON,
    ),
    Row(errors.NoActivePlan("none"), C.FAILED_PRECONDITION, 503, PRECONDITION, retryable=True),
    Row(errors.PlanInfeasible("no"), C.FAILED_PRECONDITION, 409, PRECONDITION),
    Row(
        errors.ContentMismatch("net:1/model.onnx on gpu3", details={"file": "net:1/model.onnx"}),
        C.FAILED_PRECONDITION,
        409,
        PRECONDITION,
    ),
    Row(errors.CanaryFailed("off"), C.FAILED_PRECONDITION, 409, PRECONDITION),
    Row(errors.StaleEpoch("old", details={"epoch": "3"}), C.ABORTED, 409, REASON, retryable=True),
    Row(errors.Unavailable("draining"), C.UNAVAILABLE, 503, RETRY, "1000", "1", True),
    Row(errors.PartitionLost("lost"), C.UNAVAILABLE, 503, RETRY, "100", "1", True),
    Row(
        errors.InvalidMessage("StageReport", "compute_ns", "no"),
        C.INVALID_ARGUMENT,
        400,
        FIELD,
        "-1",
    ),
    Row(errors.DeviceFailed("failed"), C.UNAVAILABLE, 503, RETRY, "100", "1", True),
    Row(errors.DeviceLost("lost"), C.UNAVAILABLE, 503, RETRY, "1000", "1", True),
    Row(errors.DeviceOutOfMemory("full"), C.UNAVAILABLE, 503, RETRY, "1000", "1", True),
    Row(errors.ComputeFailed("failed twice"), C.INTERNAL, 500, REASON),
    Row(
        errors.InternalError(
            "internal error, id 0123456789ab", details={"error_id": "0123456789ab"}
        ),
        C.INTERNAL,
        500,
        [rpc.RequestInfo],
    ),
    Row(errors.InternalError("bare"), C.INTERNAL, 500, []),
]
ROWS = pytest.mark.parametrize("row", TABLE, ids=lambda row: type(row.error).__name__)


def leaves(cls: type[CatenaryError]) -> set[type[CatenaryError]]:
    below = cls.__subclasses__()
    return set().union(*(leaves(child) for child in below)) if below else {cls}


def unpack(status: status_pb2.Status, kind: type[Message]) -> Message:
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            return kind.FromString(packed.value)
    raise AssertionError(f"{kind} is missing")


def test_table_covers_every_leaf() -> None:
    assert {type(row.error) for row in TABLE} == leaves(CatenaryError)
    assert set(error_tables.TABLE) == leaves(CatenaryError)


@ROWS
def test_grpc_row(row: Row) -> None:
    assert error_tables.grpc_code(row.error) is row.code
    status = error_tables.rpc_status(row.error)
    assert status.code == row.code.value[0]
    assert [packed.TypeName() for packed in status.details] == [
        kind.DESCRIPTOR.full_name for kind in row.kinds
    ]
    trailers = dict(error_tables.trailing_metadata(row.error))
    assert trailers.get("grpc-retry-pushback-ms") == row.pushback
    assert status_pb2.Status.FromString(trailers["grpc-status-details-bin"]) == status
    if rpc.ErrorInfo in row.kinds:
        info = unpack(status, rpc.ErrorInfo)
        assert (info.reason, info.domain) == (row.error.reason, "catenary")
        assert dict(info.metadata) == row.error.details


@ROWS
def test_http_row(row: Row) -> None:
    assert error_tables.http_status(row.error) == row.http
    assert error_tables.http_headers(row.error).get("Retry-After") == row.retry_after
    message = error_tables.public_message(row.error)
    assert error_tables.http_body(row.error) == {"error": message}
    body = error_tables.openai_body(row.error)["error"]
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == row.error.reason.lower()


@ROWS
def test_failure_crosses_processes(row: Row) -> None:
    failure = error_tables.failure_of(row.error, "agent-3")
    assert (failure.reason, failure.agent_id) == (row.error.reason, "agent-3")
    assert failure.retryable is row.retryable
    back = error_tables.error_of(failure)
    assert type(back) is type(row.error)
    assert back.message == error_tables.public_message(row.error)
    assert back.details["agent_id"] == "agent-3"
    assert back.details.get("field") == row.error.details.get("field")


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
    row: Row,
) -> None:
    service, call = failing
    service.error = row.error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", timeout=5.0)
    assert caught.value.code() is row.code
    back = error_tables.error_of_exception(caught.value)
    assert type(back) is type(row.error)
    assert error_tables.retry_after_ns(back) == error_tables.retry_after_ns(row.error)
    if rpc.ErrorInfo in row.kinds:
        assert back.details == row.error.details


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
