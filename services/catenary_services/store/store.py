"""The model store of a process: it fetches what a partition needs, and serves what is here.

Threads that load call `prepare` and read through `ModelRepository.reading`; whatever they are going
to read is brought in first. Transfers run on the event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from catenary_services.content.keeping import write_durably
from catenary_services.content.making import meaning_of
from catenary_services.content.record import (
    RECORD_FILE,
    SHOWN_DIGITS,
    ContentRecord,
    FileRecord,
    decode,
    encode,
    machine,
)
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import ContentMismatch, InternalError, Unavailable
from catenary_services.log import get_logger
from catenary_services.models.model_repository import ModelRepository
from catenary_services.store import kept
from catenary_services.store.chunk_map import FileState, chunk_span, chunks_of
from catenary_services.store.fetching import ContentFetcher
from catenary_services.store.kept import KeptVersion
from catenary_services.store.messages import ANSWER, REQUEST, LinkSource
from catenary_services.store.pending_chunk import FetchedVersion
from catenary_services.store.progress import FetchProgress, ProgressCounter
from catenary_services.store.room import StoreLimit
from catenary_services.store.serving import ContentServer
from catenary_services.store.settings import StoreSettings
from catenary_services.store.transfers import FileTransfers

if TYPE_CHECKING:
    from catenary_protos.catenary.v1.frame_pb2 import FrameHeader
    from catenary_services.transport.interface import ReceivedFrame

T = TypeVar("T")
_SMALL_BYTES = 1 << 20
"""Files up to this size are fetched before anything of a version is read."""
_MOST_SOURCES = 16
_LOOK_S = 0.5
_THREADS = 3
_log = get_logger("catenary_services.store")


class ModelStore:
    """Fetches versions for a process, and serves those it has to its peers.

    Attributes:
        frame_kinds: The kinds of frames that `on_frame` handles.
    """

    frame_kinds = (REQUEST, ANSWER)

    def __init__(self, repository: ModelRepository, hub: LinkSource, settings: StoreSettings):
        """Stands between a repository, of which it supplies missing files, and the peers."""
        self.waiting: Callable[[], None] = lambda: None
        """Called on a thread that waits for bytes, about twice a second, as long as some come."""
        self.fetched: Callable[[int], object] = lambda _: None
        """Called with the size of each chunk that came from a peer and is on the disk. To be set
        before the start."""
        self._repository = repository
        self._settings = settings
        self._hub = hub
        self._threads = ThreadPoolExecutor(_THREADS, "catenary-store")
        self._transfers = FileTransfers(hub, settings)
        self._room = StoreLimit(repository.root, settings.limit_bytes, settings.free_bytes)
        self._progress = ProgressCounter()
        self._lock = threading.Lock()
        self._sources: dict[ModelKey, tuple[str, ...]] = {}
        self._uses: dict[ModelKey, int] = {}
        """File descriptors that keep the versions from being dropped."""
        self._coming: set[concurrent.futures.Future[None]] = set()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fetcher: ContentFetcher | None = None
        self._server: ContentServer | None = None
        repository.supply = self.supplier

    def start(self) -> None:
        """Begins to fetch and to serve, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._fetcher = ContentFetcher(
            self._transfers,
            self._settings.stall_s,
            self._threads,
            self._progress,
            self.fetched,
        )
        self._server = ContentServer(self._hub, self._repository, self._settings, self._threads)

    def on_frame(self, header: FrameHeader, frame: ReceivedFrame) -> None:
        """Handles a frame of a peer's store."""
        if header.kind == ANSWER:
            self._transfers.on_answer(header, frame)
        elif self._server is not None:
            self._server.on_request(header, frame)
        else:
            frame.release()

    def leave(self) -> None:
        """Sends peers to others from now on: the process is about to end."""
        if self._server is not None:
            self._server.leave()

    async def close(self) -> None:
        """Ends everything. Idempotent."""
        self._is_closed = True
        if self._server is not None and self._fetcher is not None:
            await self._server.close()
            await self._fetcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.release_unused(())

    # -- on the threads that load ----------------------------------------------------------------

    def prepare(self, model: ModelKey, digest: str, sources: Sequence[str]) -> None:
        """Sees to it that a version can be loaded, if nobody but the store has put files there.

        Its content record and small files are here afterwards, and the others are fetched as they
        are read.

        Args:
            model: The version.
            digest: The digest of its content; empty if it is unknown: then nothing is fetched.
            sources: The peers that may have it, the best first.

        Raises:
            Unavailable: It comes from nobody.
            ContentMismatch: What came is not what it should be.
            PlanInfeasible: There is no room for it.
        """
        folder = self._repository.folder(model)
        if sources:
            with self._lock:
                self._sources[model] = tuple(sources)[:_MOST_SOURCES]
        if not digest or kept.is_own(folder) or (not sources and not kept.is_kept(folder)):
            return
        try:
            self._prepare(model, folder, digest)
        except OSError as error:
            raise self._room.full(error) from error

    def supplier(self, model: ModelKey) -> VersionSupplier | None:
        """Returns what brings in the files of a version; None if its files are somebody's own."""
        folder = self._repository.folder(model)
        if self._fetcher is None or not kept.is_kept(folder):
            return None
        record = self._repository.content(model)
        return VersionSupplier(self, model, KeptVersion(folder, record)) if record else None

    def want(
        self, model: ModelKey, version: KeptVersion, name: str, chunks: Iterable[int]
    ) -> concurrent.futures.Future[None] | None:
        """Begins to fetch chunks of a file; returns None if all of them are here.

        Raises:
            PlanInfeasible: There is no room for them.
        """
        missing = version.missing(name, chunks)
        if not missing:
            return None
        recorded = version.record.files[name]
        nbytes = sum(chunk_span(recorded, chunk)[1] for chunk in missing)
        self._room.make(nbytes + self._outstanding_bytes())
        with self._lock:
            sources = self._sources.get(model, ())
        wanted = FetchedVersion(model, version, version.record.digest, sources)
        assert self._fetcher is not None
        coming = self._on_loop(self._fetcher.bring(wanted, name, missing))
        self._coming.add(coming)
        coming.add_done_callback(self._coming.discard)
        return coming

    def wait(self, coming: concurrent.futures.Future[T]) -> T:
        """Returns the result of a transfer, for which the calling thread waits."""
        seen = self._progress.total_bytes
        while not concurrent.futures.wait([coming], _LOOK_S).done:
            if self._is_closed:
                coming.cancel()
                raise Unavailable("the process ends")
            if self._progress.total_bytes != seen:
                seen = self._progress.total_bytes
                self.waiting()
        return coming.result()

    # -- what others ask -------------------------------------------------------------------------

    def progress(self) -> list[FetchProgress]:
        """Returns how far the fetching of every version has come that is being fetched."""
        return self._progress.all(time.monotonic_ns())

    @property
    def is_transferring(self) -> bool:
        """True while files are fetched from peers, or given to them."""
        return bool(self.progress()) or (self._server is not None and self._server.is_serving)

    def abandon(self, model: ModelKey) -> None:
        """Ends the fetching of a version, which is wanted no more."""
        if self._fetcher is not None:
            self._fetcher.abandon(model)

    def release_unused(self, in_use: Collection[ModelKey]) -> None:
        """Lets the versions be dropped that this process has not loaded."""
        with self._lock:
            for model in [each for each in self._uses if each not in in_use]:
                os.close(self._uses.pop(model))

    # -- inside ----------------------------------------------------------------------------------

    def _prepare(self, model: ModelKey, folder: Any, digest: str) -> None:
        kept.sweep(folder.parent)
        for _ in range(3):  # another process may drop it between two steps
            known = self._known(model)
            if known is not None and known.digest != digest and not kept.drop(folder):
                raise Unavailable(
                    f"{model} on {machine()} is loaded with sha256 {known.digest[:SHOWN_DIGITS]};"
                    f" {digest[:SHOWN_DIGITS]} can be fetched when nothing uses it any more"
                )
            with kept.begun(folder):
                known = self._known(model)
                if known is None:
                    self._begin(model, folder, digest)
            with contextlib.suppress(FileNotFoundError):
                self._use(model, folder)
                return
        raise Unavailable(f"{model} is dropped on {machine()} as soon as it is fetched")

    def _known(self, model: ModelKey) -> ContentRecord | None:
        """Returns the content record of a version that was begun; None if there is none."""
        folder = self._repository.folder(model)
        return self._repository.content(model) if (folder / RECORD_FILE).exists() else None

    def _begin(self, model: ModelKey, folder: Any, digest: str) -> None:
        """Fetches the content record and the small files, and makes the others without content."""
        with self._lock:
            sources = self._sources.get(model, ())
        record = self._fetched_record(model, digest, sources)
        kept.begin_content(folder, digest)
        version = KeptVersion(folder, record)
        for name in record.files:
            version.map_of(name).create()
        supplier = VersionSupplier(self, model, version)
        small = [name for name, file in record.files.items() if file.size <= _SMALL_BYTES]
        for name in small:
            supplier.expect(name, record.files[name], [0])
        for name in small:
            supplier.bring(name, record.files[name], [0])
        for name in small:
            self._check_meaning(model, version, name)
        write_durably(folder / RECORD_FILE, encode(record))
        _log.info("version_begun", model=str(model), content=digest[:SHOWN_DIGITS])

    def _fetched_record(
        self, model: ModelKey, digest: str, sources: tuple[str, ...]
    ) -> ContentRecord:
        assert self._fetcher is not None
        content = self.wait(self._on_loop(self._fetcher.record(model, digest, sources)))
        record = decode(content, f"{model}/{RECORD_FILE}")
        # What was derived elsewhere is not part of the digest, so nobody vouches for it.
        own = {name: file for name, file in record.files.items() if not file.derived}
        if record.digest != digest:
            raise ContentMismatch(
                f"a peer of {machine()} has another content record of {model} than was asked for:"
                f" sha256 {record.digest[:SHOWN_DIGITS]} instead of {digest[:SHOWN_DIGITS]}"
            )
        return ContentRecord(record.format, own)

    def _check_meaning(self, model: ModelKey, version: KeptVersion, name: str) -> None:
        """Checks a file that the digest of the version counts by its meaning only."""
        recorded = version.record.files[name]
        if recorded.meaning != meaning_of(version.folder / name):
            version.map_of(name).forget(0)
            raise ContentMismatch(
                f"{model}/{name}, as fetched to {machine()}, says something else than recorded"
            )

    def _use(self, model: ModelKey, folder: Any) -> None:
        handle = kept.use(folder)
        with self._lock:
            old = self._uses.get(model)
            self._uses[model] = handle
        if old is not None:
            os.close(old)

    def _outstanding_bytes(self) -> int:
        return sum(each.wanted_bytes - each.fetched_bytes for each in self.progress())

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        loop = self._loop
        if loop is None or loop.is_closed():
            work.close()
            raise Unavailable("the process ends")
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is loop:
                work.close()
                raise InternalError("files are fetched by threads, not by the event loop")
        return asyncio.run_coroutine_threadsafe(work, loop)


class VersionSupplier:
    """Brings in the files of one version; see `catenary_services.content.reading.FileSupplier`."""

    def __init__(self, store: ModelStore, model: ModelKey, version: KeptVersion) -> None:
        self._store = store
        self._model = model
        self._version = version

    def expect(self, name: str, recorded: FileRecord, chunks: Iterable[int]) -> None:
        """Begins to fetch chunks that will be read soon."""
        if self._is_fetched(name, recorded):
            self._store.want(self._model, self._version, name, _known(recorded, chunks))

    def bring(self, name: str, recorded: FileRecord, chunks: Iterable[int]) -> None:
        """Returns when chunks of a file are here."""
        if self._is_fetched(name, recorded):
            coming = self._store.want(self._model, self._version, name, _known(recorded, chunks))
            if coming is not None:
                self._store.wait(coming)

    def replace(self, name: str, recorded: FileRecord, chunk: int) -> bool:
        """Fetches a chunk again whose content on the disk is wrong; False if that cannot be."""
        if not self._is_fetched(name, recorded):
            return False
        known = _known(recorded, [chunk])
        _log.warning("chunk_damaged", model=str(self._model), file=name, chunk=known[0])
        self._version.map_of(name).forget(known[0])
        self.bring(name, recorded, known)
        return True

    def state(self, name: str, recorded: FileRecord) -> FileState | None:
        """Returns a state of a file that changes whenever anybody but the store writes to it.

        It is None for a file that the store has not fetched.
        """
        return self._version.map_of(name).state() if self._is_fetched(name, recorded) else None

    def _is_fetched(self, name: str, recorded: FileRecord) -> bool:
        # What was made on this machine, or written anew, is no matter of the store.
        return not recorded.derived and self._version.record.files.get(name) == recorded


def _known(recorded: FileRecord, chunks: Iterable[int]) -> list[int]:
    """Returns the indices of chunks in a map; -1 stands for a file that is checked as a whole."""
    known = {max(0, chunk) for chunk in chunks}
    return sorted(chunk for chunk in known if chunk < chunks_of(recorded))
