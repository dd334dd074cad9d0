"""A jailed process that stays: it answers orders over a socket until it ends or is ended.

What it says is as little trusted as the answer of any other jailed process. Its caller bounds what
it reads, and ends the process when an answer takes too long.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from catenary_services.jail import process
from catenary_services.jail.orders import JailOrder
from catenary_services.scratch import ScratchFolder

_AFTERWARDS_S = 5.0


class ResidentProcess:
    """One jailed process from its start to its end; all methods block for some milliseconds."""

    def __init__(self, order: JailOrder, environment: Mapping[str, str] | None = None) -> None:
        """Starts the process.

        Args:
            order: Its function, which is given the channel's descriptor as `JailWorkspace.channel`
                and runs for as long as the process is to stay; and its limits.
            environment: Variables that it is to have beside those of every jail.

        Raises:
            OSError: It cannot be started.
        """
        self._folder = ScratchFolder(process.FOLDER_PREFIX)
        self.channel, theirs = socket.socketpair()
        """The caller's end of the channel; whoever reads from it closes it."""
        told = os.open(os.devnull, os.O_WRONLY)
        try:
            placed = process.placed(order, self._folder.path)
            self._order = msgspec.structs.replace(placed, channel=theirs.fileno())
            self._process = process.start(self._order, told, subprocess.DEVNULL, environment)
        except BaseException:
            self.channel.close()
            self._folder.close()
            raise
        finally:
            os.close(told)
            theirs.close()
        process.give(self._order, self._process)
        self.channel.setblocking(False)

    @property
    def pid(self) -> int:
        """The process id of the jailed child."""
        return self._process.pid

    def kill(self) -> None:
        """Has the process end at once, without waiting for it."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def end(self, grace_s: float = _AFTERWARDS_S) -> int:
        """Ends the process, and all that it left, and returns its exit code.

        Args:
            grace_s: Time for it to end by itself, after the channel was closed.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        process.end(self._order, self._process)
        self._folder.close()
        return self._process.returncode
