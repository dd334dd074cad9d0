"""HTTP/1.1 as bytes: requests to write to a socket, and answers read from one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import numpy as np

INFER = "/v2/models/toy/infer"
INFER_FREE = "/v2/models/free/infer"
"""Of a model whose rows may have any size."""
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"


def toy_body(values: np.ndarray, request_id: str = "") -> tuple[bytes, int]:
    """A body for the model "toy" with a binary tensor, and the size of its JSON."""
    size = {"binary_data_size": values.nbytes}
    tensor = {"name": "in_0", "datatype": "FP32", "shape": values.shape, "parameters": size}
    document = {
        "id": request_id,
        "inputs": [tensor],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(document).encode()
    return text + values.tobytes(), len(text)


def posted(body: bytes, *lines: str, path: str = INFER) -> bytes:
    """A request with a body of known length."""
    fields = (f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *lines, "", "")
    return "\r\n".join(fields).encode() + body


def toy(values: np.ndarray, request_id: str = "", *lines: str, path: str = INFER) -> bytes:
    """A request to infer what the model "toy", or that of another path, makes of an array."""
    body, size = toy_body(values, request_id)
    return posted(body, f"Inference-Header-Content-Length: {size}", *lines, path=path)


def chunked(body: bytes, *lines: str, path: str = INFER) -> bytes:
    """A request whose body comes in chunks."""
    fields = (f"POST {path} HTTP/1.1", "Host: a", "Transfer-Encoding: chunked", *lines, "", "")
    pieces = [body[at : at + 40] for at in range(0, len(body), 40)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return "\r\n".join(fields).encode() + chunks + b"0\r\n\r\n"


@dataclass(frozen=True)
class Answered:
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return str(json.loads(self.document)["id"])

    @property
    def document(self) -> bytes:
        size = self.headers.get("inference-header-content-length")
        return self.body if size is None else self.body[: int(size)]

    @property
    def values(self) -> np.ndarray:
        """The binary tensor behind the document."""
        return np.frombuffer(self.body[len(self.document) :], np.float32)


async def answer_from(reader: asyncio.StreamReader) -> Answered:
    """Reads one answer."""
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *fields = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (f.split(": ", 1) for f in fields)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Answered(int(line.split()[1]), headers, body)
