"""Answers to peers that ask for bytes of model files.

A peer gets what the content record lists and nothing else, and only what is here: of a version that
is itself being fetched, the chunks that have come. One piece at a time is sent to each peer, so
that frames of requests, which take the same link, wait for one piece at most.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from catenary_protos.catenary.v1.frame_pb2 import ContentAnswer
from catenary_services.content.record import RECORD_FILE, encode
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import CatenaryError
from catenary_services.log import get_logger
from catenary_services.models.model_repository import ModelRepository
from catenary_services.store.kept import KeptVersion, is_kept
from catenary_services.store.messages import (
    ABSENT,
    BUSY,
    GIVEN,
    FilePart,
    LinkSource,
    answer_header,
    part_of,
)
from catenary_services.store.settings import PIECE_BYTES, StoreSettings
from catenary_services.store.window import ByteRate

if TYPE_CHECKING:
    from catenary_protos.catenary.v1.frame_pb2 import FrameHeader
    from catenary_services.transport.interface import ReceivedFrame

MOST_WAITING = 160
"""Requests of one peer that wait at a time; what comes beyond is told to come again."""
_MOST_PEERS = 64
_LATER_NS = 200_000_000
_PUSH_S = 20.0
_SECOND_NS = 1_000_000_000
_log = get_logger("catenary_services.store")


class _AbsentError(Exception):
    """Bytes that are not here."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Bytes that are here: in a file, or in memory."""

    size: int
    """Bytes of the whole file."""
    offset: int
    length: int
    file: Path | None
    content: bytes = b""


class ContentServer:
    """Serves the versions of a repository to peers; runs on one event loop."""

    def __init__(
        self,
        hub: LinkSource,
        repository: ModelRepository,
        settings: StoreSettings,
        threads: ThreadPoolExecutor,
    ) -> None:
        """Creates a server of the versions in `repository`.

        Args:
            hub: The links to peers; whoever is in no directory gets no answer.
            repository: The repository.
            settings: Limits.
            threads: Threads that read.
        """
        self.served_bytes = 0
        """Bytes that were sent."""
        self._hub = hub
        self._repository = repository
        self._threads = threads
        self._waiting: dict[str, deque[tuple[int, FilePart]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._making: dict[ModelKey, asyncio.Future[None]] = {}
        self._is_leaving = False
        self._rate = ByteRate(settings.serve_bytes_per_second)

    @property
    def is_serving(self) -> bool:
        """True while a peer is being answered."""
        return bool(self._tasks)

    def on_request(self, header: FrameHeader, frame: ReceivedFrame) -> None:
        """Handles the request of a peer."""
        peer, request = frame.sender.name, header.content_request
        frame.release()
        waiting = self._waiting.get(peer)
        if waiting is None:
            if not peer or len(self._waiting) >= _MOST_PEERS:
                return  # it asks again, or somebody else
            waiting = self._waiting[peer] = deque()
        # What is too much for the queue is still answered, which costs nothing but a small frame.
        if len(waiting) >= 2 * MOST_WAITING:
            return
        waiting.append((request.request_id, part_of(request)))
        if peer not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._serve(peer, waiting))
            self._tasks[peer] = task

    def leave(self) -> None:
        """Gives no more bytes: the process is about to end, and peers are to ask others."""
        self._is_leaving = True

    async def close(self) -> None:
        """Ends all answers."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, peer: str, waiting: deque[tuple[int, FilePart]]) -> None:
        """Answers the requests of one peer, one after the other."""
        try:
            while waiting:
                is_crowded = len(waiting) > MOST_WAITING
                number, part = waiting.popleft()
                try:
                    await self._answer(peer, number, part, is_crowded=is_crowded)
                except CatenaryError as error:
                    _log.info("peer_not_served", peer=peer, why=error.message)
                    waiting.clear()
        finally:
            del self._waiting[peer], self._tasks[peer]

    async def _answer(self, peer: str, number: int, part: FilePart, *, is_crowded: bool) -> None:
        if is_crowded:
            await self._say(peer, ContentAnswer(request_id=number, verdict=BUSY), _LATER_NS)
            return
        try:
            found = await self._find(part)
        except _AbsentError:
            await self._say(peer, ContentAnswer(request_id=number, verdict=ABSENT))
            return
        if found is None:
            await self._say(peer, ContentAnswer(request_id=number, verdict=BUSY), _LATER_NS)
            return
        await asyncio.sleep(self._rate.wait_ns(found.length, time.monotonic_ns()) / _SECOND_NS)
        link = await self._hub.link_to(peer, _PUSH_S)
        slot = await link.export(found.length, _PUSH_S)
        try:
            if not await self._read_into(slot.view, found):
                slot.release()
                await self._say(peer, ContentAnswer(request_id=number, verdict=ABSENT))
                return
            answer = ContentAnswer(request_id=number, verdict=GIVEN, size=found.size)
            await link.push(slot, answer_header(answer), _PUSH_S)
        finally:
            slot.release()
        self.served_bytes += found.length

    async def _say(self, peer: str, answer: ContentAnswer, retry_after_ns: int = 0) -> None:
        """Sends an answer without bytes."""
        answer.retry_after_ns = retry_after_ns
        link = await self._hub.link_to(peer, _PUSH_S)
        slot = await link.export(0, _PUSH_S)
        await link.push(slot, answer_header(answer), _PUSH_S)

    async def _find(self, part: FilePart) -> _Found | None:
        """Returns where the bytes are; None while the version's content is being recorded.

        Raises:
            _AbsentError: They are not here.
        """
        if self._is_leaving:
            raise _AbsentError
        loop = asyncio.get_running_loop()
        making = self._making.get(part.model)
        if making is None or not making.done():
            is_here, is_known = await loop.run_in_executor(
                self._threads, lambda: self._looked_up(part.model)
            )
            if not is_here:
                raise _AbsentError
            if not is_known:
                if making is None:  # this reads all of its files, once
                    making = loop.run_in_executor(None, lambda: self._make_record(part.model))
                    self._making[part.model] = making
                return None
        return await loop.run_in_executor(self._threads, lambda: self._locate(part))

    def _looked_up(self, model: ModelKey) -> tuple[bool, bool]:
        """Returns whether a version is in the repository, and whether its content is recorded."""
        try:
            is_here = self._repository.folder(model).is_dir()
            return is_here, is_here and self._repository.is_recorded(model)
        except CatenaryError:
            return False, False

    def _make_record(self, model: ModelKey) -> None:
        try:
            self._repository.content(model)
        except (CatenaryError, OSError) as error:
            _log.info("content_not_served", model=str(model), why=str(error))

    def _locate(self, part: FilePart) -> _Found:
        """Returns where the bytes are; called on a thread.

        Raises:
            _AbsentError: They are not here.
        """
        try:
            folder = self._repository.folder(part.model)
            record = self._repository.content(part.model)
        except (CatenaryError, OSError):
            raise _AbsentError from None
        if record is None or record.digest != part.content:
            raise _AbsentError
        if part.path == RECORD_FILE:
            content = encode(record)
            piece = content[part.offset :][: min(part.length, PIECE_BYTES)]
            return _Found(len(content), part.offset, len(piece), None, piece)
        recorded = record.files.get(part.path)
        if recorded is None or recorded.sha256 != part.sha256 or recorded.derived:
            raise _AbsentError
        length = max(0, min(part.length, PIECE_BYTES, recorded.size - part.offset))
        file = folder / part.path
        root = self._repository.root.resolve()
        if not file.resolve().is_relative_to(root):
            raise _AbsentError
        if is_kept(folder) and not KeptVersion(folder, record).is_here(
            part.path, part.offset, length
        ):
            raise _AbsentError
        return _Found(recorded.size, part.offset, length, file)

    async def _read_into(self, view: memoryview, found: _Found) -> bool:
        """Reads a part of a file; returns False if it is not there any more."""
        if found.file is None:
            view[:] = found.content
            return True
        place = found.file

        def read() -> bool:
            try:
                with place.open("rb", buffering=0) as file:
                    file.seek(found.offset)
                    done = 0
                    while done < len(view):
                        count = file.readinto(view[done:])
                        if not count:
                            return False
                        done += count
            except OSError:
                return False
            return True

        return await asyncio.get_running_loop().run_in_executor(self._threads, read)
