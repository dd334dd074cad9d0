"""Turns on the device: one at a time, in the order of asking."""

from __future__ import annotations

import threading

import pytest

from catenary_agent.supervision.turns import DeviceTurns

LONGEST_S = 60.0


def test_two_threads_that_always_have_work_take_turns() -> None:
    turns, log, inside = DeviceTurns(), [], []
    both_wait = threading.Barrier(2)

    def work(name: str) -> None:
        both_wait.wait(LONGEST_S)
        for _ in range(200):
            with turns:
                inside.append(name)
                assert inside == [name]
                log.append(name)
                # The other has come by now, or comes while this one works.
                threading.Event().wait(0.0005)
                inside.clear()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("batch", "step")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    assert sorted(log) == ["batch"] * 200 + ["step"] * 200


def test_who_releases_does_not_overtake_who_waits() -> None:
    turns, order = DeviceTurns(), []
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        with turns:
            order.append("waited")

    with turns:
        thread = threading.Thread(target=wait)
        thread.start()
        assert waits.wait(LONGEST_S)
        while not turns.waiting:
            pass
    with turns:
        order.append("came again")
    thread.join(LONGEST_S)
    assert order == ["waited", "came again"]


def test_an_error_ends_a_turn() -> None:
    turns = DeviceTurns()
    with pytest.raises(ValueError, match="broken"), turns:
        raise ValueError("broken")
    with turns:
        assert turns.waiting == 0
