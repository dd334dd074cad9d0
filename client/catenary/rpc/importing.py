"""Models from elsewhere: what to ask of the cluster, and how far it is with it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from catenary.errors import InvalidInputError, ProtocolError
from catenary.records import record_of
from catenary.rpc.calls import RpcCall
from catenary_protos.catenary.v1 import admin_pb2

SOURCE_KINDS = ("hf", "s3", "gs", "http", "https", "file")
_MODEL_FILES = (".gguf", ".onnx", ".pt2", ".safetensors")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:[A-Za-z0-9][A-Za-z0-9._-]{0,127})?")


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """A step of the import of a model.

    Attributes:
        phase: "listed" (what will be fetched is known), "fetching", "importing" or "done".
        text: What happens, in words; may be empty.
        file: The file that is being fetched.
        done_bytes: Bytes that are there, of all files.
        total_bytes: Size of all files.
        model: Name of the version it becomes, once it is known.
        version: The version.
        known: Whether the repository had it already.
    """

    phase: str
    text: str = ""
    file: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    model: str = ""
    version: str = ""
    known: bool = False


@dataclass(frozen=True, slots=True)
class ImportOrder:
    """A model to import, and how; empty fields and zeros leave the choice to the cluster.

    Attributes:
        source: "hf:organisation/name[/file][@revision]", a URL (s3, gs, http, https, file), or a
            path of the machine that has the repository.
        file: The file of the source that is meant, if it has several models.
        name: Name it gets.
        version: Version it gets.
        precision: "fp32", "int8" or "int4".
        target: Agents that are to run it: "cpu", "gpu" or "both".
        engine: The engine that alone is to serve it: "vllm" or "llama_server".
        keep_gguf: Whether a GGUF file is kept beside the blocks, for agents with llama-server.
        session_tokens: Most tokens of one session.
        slo_ms: Time for an answer if the request names none.
        hub_endpoint: A mirror of the hub.
        hub_token: By whose right the hub is asked.
        dry_run: Whether only to say what would be fetched.
    """

    source: str
    file: str = ""
    name: str = ""
    version: str = ""
    precision: str = ""
    target: str = ""
    engine: str = ""
    keep_gguf: bool = False
    session_tokens: int = 0
    slo_ms: float | None = None
    hub_endpoint: str = ""
    hub_token: str = ""
    dry_run: bool = False


ImportWatch = Callable[[ImportProgress], object]
"""Called with each step of an import."""


def is_source(text: str) -> bool:
    """Returns whether a text names a source, and not a model of the repository.

    A name has no slash, no known ending of a file, and no kind of source before a colon; a file or
    folder of this machine with such a name is written "./name".
    """
    kind, colon, _ = text.partition(":")
    if colon and kind in SOURCE_KINDS:
        return True
    return not _NAME.fullmatch(text) or text.lower().endswith(_MODEL_FILES)


def import_request(order: ImportOrder) -> admin_pb2.ImportModelRequest:
    """Returns the message of an order. A path is told with what identifies the file there.

    Raises:
        InvalidInputError: An argument cannot be sent; the error names it.
    """
    if not order.source:
        raise InvalidInputError.at("source", "is empty")
    if order.slo_ms is not None and not 0 < order.slo_ms < 1e12:
        raise InvalidInputError.at("slo_ms", "must be a positive number")
    if not 0 <= order.session_tokens < 2**20 + 1:
        raise InvalidInputError.at("session_tokens", "is out of range")
    request = admin_pb2.ImportModelRequest(
        source=order.source,
        file=order.file,
        name=order.name,
        version=order.version,
        precision=order.precision,
        target=order.target,
        engine=order.engine,
        keep_gguf=order.keep_gguf,
        session_tokens=order.session_tokens,
        slo_ns=round((order.slo_ms or 0) * 1e6),
        hub_endpoint=order.hub_endpoint,
        hub_token=order.hub_token,
        dry_run=order.dry_run,
    )
    if order.source.partition(":")[0] not in SOURCE_KINDS:
        _name_path(request, Path(order.source).expanduser().absolute())
    return request


def _name_path(request: admin_pb2.ImportModelRequest, path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        text = f"{path} cannot be read here: {error.strerror or error}"
        raise InvalidInputError.at("source", text) from error
    request.source = str(path)
    request.path_identity.number = status.st_ino
    request.path_identity.changed_ns = status.st_mtime_ns


def progress_of(message: admin_pb2.ImportProgress) -> ImportProgress:
    """Returns the progress in a message."""
    return record_of(ImportProgress, message)


def result_of(last: ImportProgress | None) -> ImportProgress:
    """Returns the last step of an import, which names the version.

    Raises:
        ProtocolError: The stream ended without it.
    """
    if last is None or last.phase != "done":
        raise ProtocolError("the server ended the import without a result")
    return last


def undeploy(model: str, version: str, timeout_s: float | None) -> RpcCall[str]:
    """Returns the call that serves a model no longer; its result is the version that goes."""
    request = admin_pb2.UndeployModelRequest(model=model, version=version)
    return RpcCall(
        "admin",
        "UndeployModel",
        request,
        lambda reply: str(reply.version),
        timeout_s,
        repeatable=False,
    )


def undrain(agent_id: str, timeout_s: float | None) -> RpcCall[None]:
    """Returns the call that uses a drained agent again."""
    request = admin_pb2.UndrainAgentRequest(agent_id=agent_id)
    return RpcCall(
        "admin", "UndrainAgent", request, lambda reply: None, timeout_s, repeatable=False
    )
