"""After any test of faults: a cluster that has nothing to do has nothing reserved."""

from __future__ import annotations

import time

import catenary
import figures
from catenary.types import ClusterStatus


def idle_book(
    target: str, admin_target: str, test: str, timeout_s: float = 30.0, audits: int = 2
) -> ClusterStatus:
    """Waits until the book is empty, and audits find nothing that should not be there.

    Call it when every client has its answer. What the audits mended before is printed: it leaked.

    Args:
        target: The gateway's gRPC endpoint.
        admin_target: Its admin endpoint.
        test: What the figures are printed under.
        timeout_s: An AssertionError tells what is left after that.
        audits: So many must have been done on the idle cluster.

    Returns:
        The last status, with `audits` and `leaks_mended`.
    """
    begin_s, idle_since_s, audits_then = time.monotonic(), 0.0, 0
    left = "no status"
    with catenary.Client(target, admin_target=admin_target) as client:
        while time.monotonic() < begin_s + timeout_s:
            try:
                status = client.status()
            except catenary.CatenaryError as error:  # no scheduler leads for a moment
                left, idle_since_s = str(error), 0.0
                time.sleep(0.1)
                continue
            left = _left(status)
            if left:
                idle_since_s = 0.0
            elif not idle_since_s:
                idle_since_s, audits_then = time.monotonic(), status.audits
            elif status.audits >= audits_then + audits:
                figures.report(test, "book empty after", idle_since_s - begin_s, "s")
                if status.leaks_mended:
                    figures.report(test, "leaks mended", float(status.leaks_mended))
                return status
            time.sleep(0.1)
    raise AssertionError(f"{test}: the cluster is idle, but the book is not empty: {left}")


def _left(status: ClusterStatus) -> str:
    """Returns what is still reserved; empty if nothing is."""
    counts = {
        "reservations": status.live_reservations,
        "batches in flight": status.batches_in_flight,
        "sessions": status.sessions_in_flight,
        "queued requests": status.queued_requests,
        "block slots": sum(agent.used_block_slots for agent in status.agents),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
