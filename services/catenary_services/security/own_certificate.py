"""This process's own certificate: checked for the right identity, and watched for replacement."""

from __future__ import annotations

import asyncio

from catenary_services.errors import InvalidInput
from catenary_services.security.identity import Identity, Role
from catenary_services.security.rotation import WatchedFiles, watched_files
from catenary_services.settings import ProcessSettings
from catenary_services.telemetry.metrics import Metrics


class OwnCertificate:
    """The certificate of this process, watched from `start` to `close`; may be absent."""

    def __init__(self, settings: ProcessSettings, role: Role, name: str) -> None:
        """Reads the files.

        Raises:
            InvalidInput: The files are not usable, or name another identity, which peers would
                refuse.
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
        """Examines the files every few seconds, and exports for how long they are valid."""
        if self._files is not None:
            metrics.certificate_expiry.set_function(self._files.seconds_left)
            self._task = asyncio.create_task(self._files.watch(), name="watch-certificate")

    async def close(self) -> None:
        """Stops examining the files; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
