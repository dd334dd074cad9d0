"""The certificate of this process: is it ours, how long is it good, has it been replaced."""

from __future__ import annotations

import asyncio

from catenary_services.errors import InvalidInput
from catenary_services.security.identity import Identity, Role
from catenary_services.security.rotation import WatchedFiles, watched_files
from catenary_services.settings import ProcessSettings
from catenary_services.telemetry.metrics import Metrics


class OwnCertificate:
    """Watched from `start` to `close`; does nothing in a process without one."""

    def __init__(self, settings: ProcessSettings, role: Role, name: str) -> None:
        """Reads the files.

        Raises:
            InvalidInput: they are not good, or name somebody else, whom our peers would refuse.
        """
        self._files: WatchedFiles | None = None
        self._task: asyncio.Task[None] | None = None
        if settings.insecure or settings.tls_cert_file is None:
            return
        files = watched_files(settings.tls_cert_file, settings.tls_key_file, settings.tls_ca_file)
        named, own = files.current().identity, Identity.of(settings.cluster, role, name)
        if named != own:
            who = "nobody of ours" if named is None else str(named)
            raise InvalidInput("tls_cert_file", f"names {who}, but this is {own}")
        self._files = files

    def start(self, metrics: Metrics) -> None:
        """Begins to look at the files every few seconds, and shows how long they are good."""
        if self._files is not None:
            metrics.certificate_expiry.set_function(self._files.seconds_left)
            self._task = asyncio.create_task(self._files.watch(), name="watch-certificate")

    async def close(self) -> None:
        """Looks no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
