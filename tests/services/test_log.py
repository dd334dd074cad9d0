from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from catenary_services.log import configure_logging, get_logger


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    structlog.reset_defaults()


def test_lines_carry_event_origin_and_facts(capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_logger("part")  # made before the configuration, as modules do
    configure_logging("gateway", "gateway-0", "info", True)
    logger.info("request_rejected", reason="OVERLOADED")
    logger.debug("not_shown")
    (line,) = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert fields.pop("timestamp").endswith("Z")
    assert fields == {
        "event": "request_rejected",
        "reason": "OVERLOADED",
        "level": "info",
        "logger": "part",
        "process": "gateway",
        "instance": "gateway-0",
    }


def test_lines_of_libraries_look_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("agent", "agent-1", "warning", True)
    logging.getLogger("library").warning("disk %s", "full")
    logging.getLogger("library").info("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert fields["event"] == "disk full"
    assert (fields["instance"], fields["logger"]) == ("agent-1", "library")


def test_exceptions_are_written_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (True, False):
        configure_logging("agent", "agent-1", "info", as_json)
        try:
            raise ValueError("boom")
        except ValueError:
            get_logger("part").error("failed", exc_info=True)
        assert "ValueError" in capsys.readouterr().err


def test_a_full_disk_loses_lines_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - closing it fails
    monkeypatch.setattr("sys.stderr", full)
    configure_logging("agent", "agent-0", "info", False)
    try:
        for _ in range(500):
            get_logger("test").warning("written_nowhere", text="x" * 100)
            logging.getLogger("library").warning("neither is this")
    finally:
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
