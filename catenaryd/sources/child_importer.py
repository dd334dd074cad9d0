"""Imports for a scheduler: each is a child process, `catenaryd pull`, that tells its steps.

The child has the libraries that read models, and the memory and the processor time that it takes
are its own. It ends when nobody wants the answer any more, and with the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Collection
from pathlib import Path

import msgspec

from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.content.record import machine
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND
from catenary_services.domain.model import ENGINE_OF
from catenary_services.errors import (
    CatenaryError,
    InternalError,
    InvalidInput,
    Overloaded,
    PermissionDenied,
    Unavailable,
    error_of_reason,
)
from catenary_services.log import get_logger
from catenary_services.models.model_repository import PRECISIONS, TARGETS
from catenaryd.process_options import command_line_of
from catenaryd.sources.source_names import FIELD, SourceKind, source_of
from catenaryd.sources.steps import LARGEST_LINE_BYTES, ImportPhase, ImportStep

_log = get_logger(__name__)
_SAY_AGAIN_S = 5.0
"""A step is repeated after this, so that silence means a broken stream."""
_END_S = 10.0
_RETRY_NS = 30 * 10**9
_WORDS_KEPT = 2000


class ChildImporter:
    """Implements `catenary_scheduler.admin.imports.ModelImporter`: one import at a time."""

    def __init__(self, repository: Path, kinds: Collection[str]) -> None:
        """Imports into the repository at a path, from sources of some kinds."""
        self._repository = repository.absolute()
        self._kinds = frozenset(kinds)
        self._running = ""
        """The source of the import that runs; empty if none does."""

    async def bring(
        self, request: admin_pb2.ImportModelRequest
    ) -> AsyncGenerator[admin_pb2.ImportProgress, None]:
        """Yields the steps of an import, the version last; closing it ends the import.

        Raises:
            CatenaryError: It failed, or another one runs.
        """
        source = source_of(request.source, request.file)
        _check_options(request)
        if source.kind not in self._kinds:
            raise PermissionDenied(
                f"sources of the kind {source.kind.value!r} are not imported here: the scheduler's"
                f" import_sources are {', '.join(sorted(self._kinds)) or 'none'}"
            )
        if source.kind is SourceKind.FILE and request.HasField("path_identity"):
            await asyncio.to_thread(_check_same_file, Path(source.place), request.path_identity)
        if self._running:
            raise Overloaded(
                f"{self._running} is being imported; one model is at a time",
                retry_after_ns=_RETRY_NS,
            )
        self._running = source.text
        _log.info("import_began", source=source.text)
        try:
            async with contextlib.aclosing(self._steps(request)) as steps:
                async for step in steps:
                    yield step
        finally:
            self._running = ""
            _log.info("import_ended", source=source.text)

    async def _steps(
        self, request: admin_pb2.ImportModelRequest
    ) -> AsyncGenerator[admin_pb2.ImportProgress, None]:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "catenaryd",
            "--supervised",
            "pull",
            *self._arguments(request),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LARGEST_LINE_BYTES,
            start_new_session=True,
            env=_environment(request.hub_token),
        )
        assert child.stdout is not None
        assert child.stderr is not None
        words = asyncio.create_task(_last_words(child.stderr))
        try:
            async with contextlib.aclosing(_told(child.stdout)) as steps:
                async for step in steps:
                    if step.phase is ImportPhase.FAILED:
                        raise _error(step)
                    yield _progress(step)
                    if step.phase is ImportPhase.DONE:
                        return
            code = await child.wait()
            raise InternalError(
                f"the import of {request.source} ended with exit code {code}: {await words}"
            )
        finally:
            await _end(child)
            words.cancel()

    def _arguments(self, request: admin_pb2.ImportModelRequest) -> list[str]:
        options = {
            "file": request.file or None,
            "name": request.name or None,
            "version": request.version or None,
            "precision": request.precision or None,
            "target": request.target or None,
            "engine": request.engine or None,
            "session_tokens": request.session_tokens or None,
            "slo_ms": request.slo_ns / 1e6 or None,
            "hub_endpoint": request.hub_endpoint or None,
            "model_repository": self._repository,
        }
        flags = {"--dry-run": request.dry_run, "--keep-gguf": request.keep_gguf}
        given = [name for name, is_given in flags.items() if is_given]
        return ["--steps", *given, *command_line_of(options), "--", request.source]


def _check_options(request: admin_pb2.ImportModelRequest) -> None:
    """Checks what the child's command line would refuse in other words.

    Raises:
        InvalidInput: An option is out of range; the error names it.
    """
    choices = (("precision", PRECISIONS), ("target", TARGETS), ("engine", tuple(ENGINE_OF)))
    for name, known in choices:
        value = getattr(request, name)
        if value and value not in known:
            raise InvalidInput(name, f"{value!r} is none of {', '.join(known)}")
    if request.session_tokens == 1:
        raise InvalidInput("session_tokens", "must be 2 or more: a prompt and an answer")
    if 0 < request.slo_ns < NANOSECONDS_PER_MILLISECOND:
        raise InvalidInput("slo_ns", "must be a millisecond or more")


def _environment(hub_token: str) -> dict[str, str]:
    """Returns the child's environment: the scheduler's, without the password in it."""
    own = {name: value for name, value in os.environ.items() if name != "CATENARY_REDIS_URL"}
    # A token in the arguments could be read by everybody on the machine.
    return {**own, **({"CATENARY_HUB_TOKEN": hub_token} if hub_token else {})}


def _check_same_file(path: Path, identity: admin_pb2.FileIdentity) -> None:
    """Checks that a path means here what it means to the caller.

    Raises:
        InvalidInput: It does not: the caller is on another machine.
    """
    try:
        status = path.stat()
        is_same = (status.st_ino, status.st_mtime_ns) == (identity.number, identity.changed_ns)
    except OSError:
        is_same = False
    if not is_same:
        raise InvalidInput(
            FIELD,
            f"{path} is of your machine, and the repository is on {machine()}: copy it there, or"
            " name a URL that both can reach",
        )


async def _told(output: asyncio.StreamReader) -> AsyncGenerator[ImportStep, None]:
    """Yields what a child tells; the last step again while it tells nothing."""
    last: ImportStep | None = None
    reading = asyncio.ensure_future(output.readline())
    try:
        while True:
            done, _ = await asyncio.wait({reading}, timeout=_SAY_AGAIN_S)
            if not done:
                if last is not None:
                    yield last
                continue
            try:
                line = reading.result()
            except ValueError as error:
                raise InternalError("an import says more at once than it may") from error
            if not line:
                return
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                last = msgspec.json.decode(line, type=ImportStep)
                yield last
            reading = asyncio.ensure_future(output.readline())
    finally:
        reading.cancel()


async def _last_words(errors: asyncio.StreamReader) -> str:
    """Reads all that a child complains about, and returns the end of it."""
    kept = b""
    while piece := await errors.read(1 << 16):
        kept = (kept + piece)[-_WORDS_KEPT:]
    return " ".join(kept.decode(errors="replace").split())


async def _end(child: asyncio.subprocess.Process) -> None:
    """Asks a child to end, which ends what it has in the jail; kills it if it does not."""
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(asyncio.shield(child.wait()), _END_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


def _progress(step: ImportStep) -> admin_pb2.ImportProgress:
    return admin_pb2.ImportProgress(
        phase=step.phase.value,
        text=step.text,
        file=step.file,
        done_bytes=step.done_bytes,
        total_bytes=step.total_bytes,
        model=step.model,
        version=step.version,
        known=step.known,
    )


def _error(step: ImportStep) -> CatenaryError:
    if not step.reason:
        return Unavailable(step.text)
    return error_of_reason(
        step.reason, step.text, details={"field": step.field} if step.field else {}
    )
