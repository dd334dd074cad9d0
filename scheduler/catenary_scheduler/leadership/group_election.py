"""Decides which groups a scheduler process tries to lead, so that every group has a leader.

A process takes its preferred group as soon as nobody leads it. It takes a group whose leader is
gone at once if it leads at most one group itself. It takes a group that nobody has led yet after a
grace time, since a process that prefers this group may be about to start. The more groups a process
leads, the longer it waits. To spread the load, a process that leads two groups fewer than another
says that it wants one of them; the other hands it over in good order, and everybody else leaves it
alone meanwhile.
"""

from __future__ import annotations

from collections import Counter

from catenary_scheduler.storage.lease import LeaseView


class GroupElection:
    """One process's knowledge of the leaders of all groups, without I/O; moments are passed in.

    Attributes:
        token: The name of this process in leases.
        groups: The number of groups.
        preferred: The group that this process leads if it can.
        led: The groups that this process leads or is about to lead.
    """

    def __init__(self, token: str, preferred: int, groups: int, grace_s: float) -> None:
        self.token = token
        self.preferred = preferred
        self.groups = groups
        self.led: set[int] = set()
        self._grace_s = grace_s
        self._holders: dict[int, str] = {}
        self._wanted_by: dict[int, str] = {}
        self._seen_led: set[int] = set()
        self._free_since_s: dict[int, float] = {}
        self._held_back_s: dict[int, float] = {}

    def saw(self, group: int, view: LeaseView, now_s: float) -> None:
        """Takes the present state of a group's lease into account."""
        self._holders[group] = view.holder
        self._wanted_by[group] = view.wanted_by
        if view.holder:
            self._seen_led.add(group)
            self._free_since_s.pop(group, None)
        else:
            self._free_since_s.setdefault(group, now_s)

    def took(self, group: int) -> None:
        """Notes that this process holds the lease of a group."""
        self.led.add(group)
        self._holders[group] = self.token
        self._free_since_s.pop(group, None)

    def lost(self, group: int) -> None:
        """Notes that this process no longer holds the lease of a group."""
        self.led.discard(group)
        self._holders.pop(group, None)

    def gave(self, group: int, now_s: float, leave_s: float) -> None:
        """Notes that this process gave a group away, and must not take it for `leave_s` seconds."""
        self.lost(group)
        self._held_back_s[group] = now_s + leave_s

    def wait_s(self, group: int, now_s: float) -> float:
        """Returns the seconds to wait before trying to lead a free group; 0 means now."""
        held_back_s = self._held_back_s.get(group, now_s) - now_s
        if group == self.preferred:
            return max(0.0, held_back_s)
        free_since_s = self._free_since_s.get(group, now_s)
        return max(0.0, held_back_s, free_since_s + self._backoff_s(group) - now_s)

    def _backoff_s(self, group: int) -> float:
        wanted_by = self._wanted_by.get(group, "")
        if wanted_by == self.token:
            return 0.0
        was_led = group in self._seen_led and not wanted_by
        return self._grace_s * (max(1, len(self.led)) - was_led)

    def wants(self, group: int) -> bool:
        """True if the process that leads a group should hand it to this process."""
        counts = Counter(self._holders.values())
        too_many = [
            each
            for each, holder in self._holders.items()
            if holder and holder != self.token and counts[holder] - len(self.led) >= 2
        ]
        if not too_many:
            return False
        return group == (self.preferred if self.preferred in too_many else max(too_many))

    def gives(self, group: int, view: LeaseView) -> bool:
        """True if this process should hand a group it leads to the process that wants it."""
        wanted = bool(view.wanted_by) and view.wanted_by != self.token
        return wanted and group in self.led and len(self.led) >= 2
