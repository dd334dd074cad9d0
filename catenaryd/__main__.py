"""`python -m catenaryd`, and the command `catenaryd`."""

from __future__ import annotations

import os
import signal
import sys

_SERVERS = frozenset({"gateway", "scheduler", "agent"})


def _stop_before_the_start(*_: object) -> None:
    os._exit(0)


def main() -> None:
    """Runs the command line.

    A server that is told to stop while it is still importing has nothing to give up: it ends well,
    as it would a second later (`catenary_services.lifecycle` takes over then).
    """
    if not _SERVERS.isdisjoint(sys.argv[1:3]):
        signal.signal(signal.SIGTERM, _stop_before_the_start)
    from catenaryd.command_line import main as run

    run()


if __name__ == "__main__":
    main()
