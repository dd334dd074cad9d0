"""The rate that tests of overload compare is that of the devices, however many callers wait."""

from __future__ import annotations

from typing import Any

import pytest

from deployed.overload_cluster import Answers

SERVED_PER_S = 20.0
SECONDS = 10.0


def saturated(waiting: int) -> list[dict[str, Any]]:
    """Devices answer one after the other until nobody waits; all who wait ask again in time."""
    took_s = waiting / SERVED_PER_S
    ends_s = ((n + 0.5) / SERVED_PER_S for n in range(int((SECONDS + took_s) * SERVED_PER_S)))
    return [{"error": "", "due_s": end_s - took_s, "took_s": took_s} for end_s in ends_s]


@pytest.mark.parametrize("waiting", [1, 17, 60])
def test_goodput_is_what_devices_answer_however_many_wait_at_the_end(waiting: int) -> None:
    answers = Answers(saturated(waiting), SECONDS)
    assert answers.goodput(4.0, 1.0) == pytest.approx(SERVED_PER_S)
    assert answers.goodput(4.0) == pytest.approx(SERVED_PER_S)


def test_answers_that_are_late_and_refusals_are_no_goodput() -> None:
    sent = saturated(17)
    for each in sent[::2]:
        each["took_s"] += 4.0
    for each in sent[1::4]:
        each["error"] = "OVERLOADED"
    assert Answers(sent, SECONDS).goodput(4.0) == pytest.approx(SERVED_PER_S / 4)
