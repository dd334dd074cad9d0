"""A server's answers, compared with ONNX Runtime's before anything is timed."""

from __future__ import annotations

import http.client
import time
from dataclasses import dataclass

import grpc

from benchmarks.peers.processes import ServerProcesses
from benchmarks.peers.requests import GRPC_PATH, GRPC_PREFIX_BYTES, Request
from benchmarks.peers.servers import Protocol
from benchmarks.peers.workloads import Workload

STARTS_WITHIN_S = 180.0
_ANSWERS_WITHIN_S = 30.0
_POLL_S = 0.2
_CHECKS = 3


class WrongAnswerError(Exception):
    """A server's answer is not the one of ONNX Runtime."""


class NotServingError(Exception):
    """A server did not answer within the time to start, or ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with status 200: its body (over gRPC with the prefix) and its headers."""

    body: bytes
    headers: dict[str, str]


def ask(protocol: Protocol, port: int, request: Request) -> Answer:
    """Sends a request once.

    Raises:
        OSError: There is no answer, or one with another status.
    """
    return _ask_grpc(port, request) if protocol == "grpc" else _ask_http(port, request)


def _ask_grpc(port: int, request: Request) -> Answer:
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
        call = channel.unary_unary(GRPC_PATH)
        try:
            message = call(request.body[GRPC_PREFIX_BYTES:], timeout=_ANSWERS_WITHIN_S)
        except grpc.RpcError as error:
            raise OSError(f"gRPC status {error.code()}: {error.details()}") from None
    return Answer(b"\0" + len(message).to_bytes(4, "big") + message, {})


def _ask_http(port: int, request: Request) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWERS_WITHIN_S)
    try:
        connection.request("POST", request.path, request.body, request.headers)
        response = connection.getresponse()
        body = response.read()
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer: {error!r}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise OSError(f"HTTP status {response.status}: {body[:300]!r}")
    return Answer(body, {name.lower(): value for name, value in response.getheaders()})


def answer_bytes(
    processes: ServerProcesses, protocol: Protocol, port: int, workload: Workload, request: Request
) -> range:
    """Waits for a server, checks its answers and returns the sizes that they have.

    Raises:
        NotServingError: It does not answer with success in time.
        WrongAnswerError: It answers something else than ONNX Runtime.
    """
    until = time.monotonic() + STARTS_WITHIN_S
    sizes = []
    while len(sizes) < _CHECKS:
        try:
            answer = ask(protocol, port, request)
        except OSError as error:
            if processes.ended or time.monotonic() > until:
                raise NotServingError(f"{error}\n{processes.last_lines()}") from None
            time.sleep(_POLL_S)
            continue
        try:
            tensor = request.read(answer.body, answer.headers)
        except (KeyError, TypeError, ValueError) as error:
            text = f"{workload.name} over {protocol} is answered in another form: {error!r}"
            raise WrongAnswerError(text) from None
        if not workload.is_right(tensor):
            raise WrongAnswerError(
                f"{workload.name} over {protocol} is not what ONNX Runtime answers"
            )
        sizes.append(len(answer.body))
    return range(min(sizes), max(sizes) + 1)
