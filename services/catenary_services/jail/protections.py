"""The protections this machine offers for confining a jailed process."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from catenary_services.jail import landlock, seccomp
from catenary_services.jail.orders import JailProtection

_log = logging.getLogger("catenary_services.jail")
_NEEDED = sum(1 << capability for capability in (0, 1, 5, 6, 7))
"""Capabilities chown, dac_override, kill, setgid and setuid, as `capabilities(7)` calls them."""


@cache
def offered() -> frozenset[JailProtection]:
    """Returns the protections a jailed process has on this machine; logs once which are missing."""
    found = {JailProtection.RESOURCE_LIMITS}
    has_seccomp = seccomp.is_known() and Path("/proc/sys/kernel/seccomp").exists()
    if seccomp.is_known():
        found |= {JailProtection.NO_NEW_PRIVILEGES, JailProtection.NO_CAPABILITIES}
    if has_seccomp:
        found |= {JailProtection.SECCOMP, JailProtection.NO_NETWORK}
    if landlock.version():
        found.add(JailProtection.LANDLOCK)
    if is_root():
        found.add(JailProtection.OWN_USER)
    # A process that is not root is no weakness of the machine.
    missing = sorted(set(JailProtection) - found - {JailProtection.OWN_USER})
    if missing:
        _log.warning("jail_is_weaker: this machine has no %s", ", ".join(missing))
    return frozenset(found)


def is_root() -> bool:
    """Returns True if this process may become other users, end them and take over their files."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    line = next((each for each in status.splitlines() if each.startswith("CapEff:")), "CapEff: 0")
    return int(line.split()[1], 16) & _NEEDED == _NEEDED
