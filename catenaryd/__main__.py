"""The entry point of the command `catenaryd` and of `python -m catenaryd`."""

from __future__ import annotations

import os
import signal
import sys

_SERVERS = frozenset({"gateway", "scheduler", "agent"})


def _stop_before_the_start(*_: object) -> None:
    os._exit(0)


def main() -> None:
    """Runs the command line.

    A server that is told to stop while it is still importing has nothing to give up. It ends with
    exit code 0, as it would a second later, when `catenary_services.lifecycle` handles signals.
    """
    if not _SERVERS.isdisjoint(sys.argv[1:3]):
        signal.signal(signal.SIGTERM, _stop_before_the_start)
    from catenaryd.command_line import main as run

    run()


if __name__ == "__main__":
    main()
