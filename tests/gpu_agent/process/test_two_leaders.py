"""Two schedulers of one epoch: an agent obeys the one it met first, and says so to the other."""

from __future__ import annotations

import pytest

from catenary_agent.control import SchedulerLink
from catenary_agent.outbox import Outbox
from catenary_services.security.tls import ClientSecurity


class Obeys:
    """Has seen an epoch; obeys nothing else in these tests."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


def control(epoch: int, leader: str) -> SchedulerLink:
    made = SchedulerLink(["127.0.0.1:1"], ClientSecurity(insecure=True), Obeys(epoch), Outbox())  # type: ignore[arg-type]
    made.leader = leader
    return made


@pytest.mark.parametrize(
    ("known", "leader", "stale"),
    [
        (8, "a", False),
        (8, "b", False),
        (7, "a", False),
        (7, "b", True),
        (7, "", False),
        (6, "a", True),
    ],
)
def test_of_one_epoch_only_the_leader_it_met_is_obeyed(
    known: int, leader: str, stale: bool
) -> None:
    assert control(7, "a")._is_stale(known, leader) is stale


def test_an_agent_that_met_nobody_obeys_anybody() -> None:
    assert not control(0, "")._is_stale(1, "a")
    assert not control(1, "")._is_stale(1, "a")
