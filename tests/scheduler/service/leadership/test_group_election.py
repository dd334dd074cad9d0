"""Who tries to lead which group, and who hands one over."""

from __future__ import annotations

import pytest

from catenary_scheduler.leadership.group_election import GroupElection
from catenary_scheduler.storage.lease import LeaseView

GRACE_S = 1.0
FREE = LeaseView("", 0.0, "")


def held(holder: str, wanted_by: str = "") -> LeaseView:
    return LeaseView(holder, 1.5, wanted_by)


def election(token: str = "me", preferred: int = 0, groups: int = 3) -> GroupElection:
    return GroupElection(token, preferred, groups, GRACE_S)


def test_the_preferred_group_is_taken_at_once_and_others_after_a_while() -> None:
    mine = election()
    for group in range(3):
        mine.saw(group, FREE, 10.0)
    assert mine.wait_s(0, 10.0) == 0.0
    assert mine.wait_s(1, 10.0) == GRACE_S
    mine.saw(1, FREE, 10.6)
    assert abs(mine.wait_s(1, 10.6) - 0.4) < 1e-9


def test_a_group_whose_leader_is_gone_is_taken_at_once_by_who_leads_one_at_most() -> None:
    mine = election()
    mine.saw(1, held("another"), 10.8)
    mine.saw(1, FREE, 11.5)
    assert mine.wait_s(1, 11.5) == 0.0
    mine.took(0)
    assert mine.wait_s(1, 11.5) == 0.0
    mine.took(2)
    assert mine.wait_s(1, 11.5) == GRACE_S


def test_a_group_that_is_handed_over_is_left_to_who_wants_it() -> None:
    wanting, third = election("wanting"), election("third")
    for each in (wanting, third):
        each.saw(1, held("busy", wanted_by="wanting"), 1.0)
        each.saw(1, LeaseView("", 0.0, "wanting"), 1.2)
    assert wanting.wait_s(1, 1.2) == 0.0
    assert third.wait_s(1, 1.2) == pytest.approx(GRACE_S)


def test_who_leads_more_waits_longer_so_that_free_groups_go_to_who_leads_less() -> None:
    busy, idle = election("busy", 0), election("idle", 1)
    busy.took(0)
    busy.took(1)
    for each in (busy, idle):
        each.saw(2, FREE, 5.0)
    assert idle.wait_s(2, 5.0) < busy.wait_s(2, 5.0)


def test_a_standby_wants_one_group_of_a_process_that_leads_two() -> None:
    mine = election("me", preferred=1, groups=2)
    mine.saw(0, held("other"), 0.0)
    assert not mine.wants(0), "one each is as even as it gets"
    mine.saw(1, held("other"), 0.0)
    assert (mine.wants(0), mine.wants(1)) == (False, True)


def test_a_process_that_leads_one_wants_a_second_only_of_one_that_leads_three() -> None:
    mine = election("me", preferred=0, groups=4)
    mine.took(0)
    mine.saw(1, held("other"), 0.0)
    mine.saw(2, held("other"), 0.0)
    assert not any(map(mine.wants, range(4)))
    mine.saw(3, held("other"), 0.0)
    assert [group for group in range(4) if mine.wants(group)] == [3]


def test_of_two_requests_at_a_time_the_last_group_is_kept() -> None:
    mine = election()
    mine.took(0)
    mine.took(1)
    assert not mine.gives(0, held("me"))
    assert mine.gives(0, held("me", wanted_by="other"))
    mine.gave(0, 3.0, 4.0)
    assert not mine.gives(1, held("me", wanted_by="third"))
    mine.saw(0, FREE, 3.0)
    assert mine.wait_s(0, 3.0) == 4.0, "even the preferred group is left to who wanted it"
    assert mine.wait_s(0, 7.5) == 0.0
