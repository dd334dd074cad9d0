"""The frames in which peers ask for bytes of model files, and answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from catenary_protos.catenary.v1 import frame_pb2, scheduler_pb2
from catenary_services.domain.ids import ModelKey
from catenary_services.store.progress import FetchProgress
from catenary_services.transport.interface import Link

REQUEST = frame_pb2.FRAME_KIND_CONTENT_REQUEST
ANSWER = frame_pb2.FRAME_KIND_CONTENT_ANSWER
GIVEN = frame_pb2.ContentAnswer.VERDICT_GIVEN
ABSENT = frame_pb2.ContentAnswer.VERDICT_ABSENT
BUSY = frame_pb2.ContentAnswer.VERDICT_BUSY


class LinkSource(Protocol):
    """The part of `catenary_services.transport.hub.TransportHub` that the store uses."""

    async def link_to(self, peer_id: str, timeout_s: float) -> Link:
        """Returns an open link to a peer."""
        ...


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a file of a model version, as its content record lists the file."""

    model: ModelKey
    content: str
    """Digest of the version."""
    path: str
    sha256: str
    """Digest of the whole file; empty for the content record."""
    offset: int
    length: int


async def push_request(link: Link, number: int, part: FilePart, timeout_s: float) -> None:
    """Asks the peer at the other end of a link for a part of a file.

    Raises:
        CatenaryError: The peer is gone, or takes no byte.
    """
    request = frame_pb2.ContentRequest(
        request_id=number,
        model=part.model.name,
        model_version=part.model.version,
        content_digest=part.content,
        path=part.path,
        sha256=part.sha256,
        offset=part.offset,
        length=part.length,
    )
    header = frame_pb2.FrameHeader(kind=REQUEST, content_request=request)
    slot = await link.export(0, timeout_s)
    await link.push(slot, header.SerializeToString(), timeout_s)


def part_of(request: frame_pb2.ContentRequest) -> FilePart:
    """Returns what a request asks for."""
    return FilePart(
        ModelKey(request.model, request.model_version),
        request.content_digest,
        request.path,
        request.sha256,
        request.offset,
        request.length,
    )


def answer_header(answer: frame_pb2.ContentAnswer) -> bytes:
    """Returns the header of the frame that carries an answer."""
    header = frame_pb2.FrameHeader(kind=ANSWER, content_answer=answer)
    return header.SerializeToString()


def fetch_message(progress: FetchProgress) -> scheduler_pb2.ContentFetch:
    """Returns what a scheduler is told of a fetch."""
    return scheduler_pb2.ContentFetch(
        model=progress.model.name,
        model_version=progress.model.version,
        wanted_bytes=progress.wanted_bytes,
        fetched_bytes=progress.fetched_bytes,
        bytes_per_second=progress.bytes_per_s,
    )
