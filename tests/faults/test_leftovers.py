"""What logs say of exceptions, and what counts as grown."""

from __future__ import annotations

import json
from pathlib import Path

from fault_cluster import Member, Place
from faults.leftovers import Usage, tracebacks, what_grew


def member(log: Path) -> Member:
    return Member("agent-0", "agent", {}, Place(), log)


def test_exceptions_are_counted_by_event_and_last_line(tmp_path: Path) -> None:
    log = tmp_path / "agent-0.log"
    trace = "Traceback (most recent call last):\n  File x\nKeyError: 'a'"
    events = [{"event": "handler_failed", "exception": trace}, {"event": "started"}] * 2
    events.append({"event": "compute_failed", "error": trace.replace("KeyError", "IndexError")})
    bare = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no"]
    log.write_text("\n".join([*map(json.dumps, events), *bare, "what follows"]) + "\n")
    assert tracebacks(member(log)) == {
        "handler_failed: KeyError: 'a'": 2,
        "compute_failed: IndexError: 'a'": 1,
        "stderr: ValueError: no": 1,
    }


def test_a_process_without_a_log_has_no_exceptions(tmp_path: Path) -> None:
    assert not tracebacks(member(tmp_path / "none.log"))


def test_growth_is_judged_by_the_kind_of_process() -> None:
    before = {"agent-0": Usage(1, 40, 20), "agent-1": Usage(1, 50, 24), "redis": Usage(1, 10, 4)}
    after = {"agent-0": Usage(9, 61, 24), "agent-1": Usage(9, 63, 31), "redis": Usage(9, 12, 4)}
    assert what_grew(before, after) == [
        "agent-1 has 63 descriptors open, 50 before",
        "agent-1 has 31 threads, 24 before",
    ]
