from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

import catenary_services.errors as served
from catenary import errors
from catenary.rpc import failures
from catenary_services.grpc import error_tables


def served_errors() -> list[served.CatenaryError]:
    made: list[served.CatenaryError] = [
        served.InvalidInput("inputs[0].shape", "has 2 dimensions"),
        served.InvalidMessage("StageReport", "compute_ns", "is too large"),
    ]
    pending: list[type[served.CatenaryError]] = [served.CatenaryError]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if not cls.__subclasses__() and cls not in map(type, made[:2]):
            made.append(cls("a sentence"))
    return made


@pytest.mark.parametrize("error", served_errors(), ids=lambda error: error.reason)
def test_every_error_of_a_server_arrives_as_its_class(error):
    status = error_tables.rpc_status(error)
    arrived = failures.error_of_status(error_tables.grpc_code(error).name, "", status)
    assert type(arrived) is errors.CLASS_OF_REASON[error.reason]
    assert arrived.reason == error.reason
    assert arrived.code == error_tables.grpc_code(error).name
    if error.reason != "INTERNAL":
        assert error.message in arrived.message
    if isinstance(arrived, errors.InvalidInputError):
        assert arrived.field == "inputs[0].shape"


def test_every_class_of_a_server_has_a_twin_here_and_no_two_share_a_reason():
    reasons = {error.reason for error in served_errors()}
    assert reasons <= set(errors.CLASS_OF_REASON)
    assert set(errors.CLASS_OF_REASON) - reasons == {"PROTOCOL_ERROR"}


def test_retry_advice_and_facts_arrive():
    error = served.SloUnattainable(
        "too late", retry_after_ns=250_000_000, details={"earliest_finish_ms": "41.5"}
    )
    arrived = failures.error_of_status(
        "RESOURCE_EXHAUSTED", "too late", error_tables.rpc_status(error)
    )
    assert isinstance(arrived, errors.SloUnattainableError)
    assert arrived.retry_after_s == pytest.approx(0.25)
    assert arrived.retryable
    assert arrived.earliest_finish_ms == 41.5


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        ("INVALID_ARGUMENT", "bad", errors.InvalidInputError),
        ("NOT_FOUND", "none", errors.ModelNotFoundError),
        ("UNIMPLEMENTED", "no", errors.NotSupportedError),
        ("UNAVAILABLE", "down", errors.UnavailableError),
        ("RESOURCE_EXHAUSTED", "full", errors.OverloadedError),
        ("RESOURCE_EXHAUSTED", "Sent message larger than max", errors.PayloadTooLargeError),
        ("DEADLINE_EXCEEDED", "late", errors.DeadlineExceededError),
        ("UNKNOWN", "?", errors.InternalError),
    ],
)
def test_a_bare_code_of_any_server_is_understood(code, text, expected):
    assert type(failures.error_of_status(code, text)) is expected


def test_details_of_other_kinds_and_broken_ones_are_skipped():
    broken = any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")
    foreign = any_pb2.Any(type_url="type.googleapis.com/other.Thing", value=b"1")
    unknown = any_pb2.Any()
    unknown.Pack(error_details_pb2.ErrorInfo(reason="SOMETHING_NEW", metadata={"a": "b"}))
    status = status_pb2.Status(message="gone", details=[broken, foreign, unknown])
    arrived = failures.error_of_status("UNAVAILABLE", "gone", status)
    assert type(arrived) is errors.UnavailableError
    assert arrived.details == {"a": "b"}
    assert arrived.retry_after_s is None


class Failed:
    def __init__(self, trailers):
        self._trailers = trailers

    def code(self):
        return grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "down"

    def trailing_metadata(self):
        return self._trailers


@pytest.mark.parametrize(
    ("pushback", "wait", "retryable"),
    [("30", 0.03, True), ("-1", None, False), ("soon", None, False)],
)
def test_pushback_replaces_other_advice(pushback, wait, retryable):
    arrived = failures.error_of_call(Failed([("grpc-retry-pushback-ms", pushback)]))
    assert arrived.retry_after_s == wait
    assert arrived.retryable is retryable


def test_unreadable_details_do_not_hide_the_error():
    arrived = failures.error_of_call(Failed([("grpc-status-details-bin", b"\xff\xff")]))
    assert isinstance(arrived, errors.UnavailableError)
    assert arrived.message == "down"
