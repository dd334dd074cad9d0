"""Settings of traces and of the log, changed while a gateway runs."""

from __future__ import annotations

import logging

import pytest
from tritonclient.utils import InferenceServerException

from catenary_gateway.oip.process_settings import LogSettings, TraceSettings
from catenary_services.errors import CatenaryError, PermissionDenied
from catenary_services.log import configure_logging, get_logger, present_level, set_level
from catenary_services.security.keys import ANYONE
from catenary_services.telemetry.tracing import Tracer
from gateway_harness import Stage
from shared_helpers.triton_clients import TritonClient

RATE = {"trace_rate": ["1"]}


@pytest.mark.parametrize(
    ("level", "flags", "verbose"),
    [
        ("debug", [True, True, True], 1),
        ("info", [True, True, True], 0),
        ("warning", [False, True, True], 0),
        ("error", [False, False, True], 0),
        ("critical", [False, False, False], 0),
    ],
)
def test_a_level_is_told_as_flags_and_set_by_them(
    level: str, flags: list[bool], verbose: int
) -> None:
    set_level(level)
    told = LogSettings().values()
    names = ["log_info", "log_warning", "log_error"]
    assert [told[name] for name in names] == flags
    assert told["log_verbose_level"] == verbose
    set_level("info")
    LogSettings().update({**dict(zip(names, flags, strict=True)), "log_verbose_level": verbose})
    assert present_level() == logging.getLevelNamesMapping()[level.upper()]


def test_a_level_that_is_set_decides_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    handlers = logging.root.handlers[:]
    try:
        configure_logging("test", "t", "info", as_json=True)
        log = get_logger("here")
        log.debug("first")
        LogSettings().update({"log_verbose_level": 2})
        log.debug("second")
        logging.getLogger("library").debug("third")
        LogSettings().update({"log_verbose_level": 0, "log_info": False})
        log.info("fourth")
        written = capsys.readouterr().err
    finally:
        logging.root.handlers[:] = handlers
    assert [word in written for word in ("first", "second", "third", "fourth")] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"log_info": True, "log_warning": False},
        {"log_error": False, "log_info": True},
        {"log_info": False, "log_verbose_level": 1},
        {"log_info": 1},
        {"log_info": None},
        {"log_verbose_level": True},
        {"log_verbose_level": -1},
        {"log_file": "/tmp/x"},
        {"log_file": 1},
        {"log_format": "default"},
        {"log_nothing": True},
        {"log_info": True, "log_nothing": True},
    ],
)
def test_wrong_log_settings_change_nothing(changes: dict[str, object]) -> None:
    set_level("warning")
    with pytest.raises(CatenaryError):
        LogSettings().update({"log_warning": True, **changes})
    assert present_level() == logging.WARNING


def test_traces_are_sampled_as_set_and_as_before() -> None:
    tracer = Tracer("t", "t", sample_ratio=0.5)
    settings = TraceSettings(tracer)
    assert (settings.values()["trace_rate"], settings.values()["trace_level"]) == (
        ["2"],
        ["TIMESTAMPS"],
    )
    settings.update({"trace_rate": ["1"]})
    assert tracer.root(None)[0].sampled
    settings.update({"trace_level": ["OFF"]})
    assert not any(tracer.root(None)[0].sampled for _ in range(50))
    assert settings.values()["trace_rate"] == ["1"]
    settings.update({"trace_level": ["TIMESTAMPS"]})
    assert tracer.sample_ratio == 1.0
    settings.update({"trace_rate": [], "trace_level": [], "trace_file": [], "trace_count": ["-1"]})
    assert tracer.sample_ratio == 0.5


def test_a_gateway_that_traces_nothing_can_be_told_to() -> None:
    tracer = Tracer("t", "t", sample_ratio=0.0)
    settings = TraceSettings(tracer)
    assert settings.values()["trace_level"] == ["OFF"]
    settings.update({"trace_rate": ["10"], "trace_level": ["TIMESTAMPS"]})
    assert tracer.sample_ratio == 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"trace_rate": ["0"]},
        {"trace_rate": ["-1"]},
        {"trace_rate": ["1.5"]},
        {"trace_rate": ["²"]},
        {"trace_rate": ["9" * 30]},
        {"trace_rate": ["1", "2"]},
        {"trace_level": ["OFF", "TIMESTAMPS"]},
        {"trace_level": ["MAX"]},
        {"trace_level": ["TENSORS", "TIMESTAMPS"]},
        {"trace_mode": ["triton"]},
        {"nothing": ["1"]},
        {"trace_rate": ["7"], "nothing": ["1"]},
    ],
)
def test_wrong_trace_settings_change_nothing(changes: dict[str, list[str]]) -> None:
    tracer = Tracer("t", "t", sample_ratio=0.5)
    with pytest.raises(CatenaryError):
        TraceSettings(tracer).update(changes)
    assert tracer.sample_ratio == 0.5


async def test_clients_change_them_and_are_told(client: TritonClient, sharing: Stage) -> None:
    told = await client.call(
        "update_trace_settings", settings={"trace_rate": "8", "trace_level": None}
    )
    settings = told["settings"] if client.is_grpc else told
    rate = settings["trace_rate"]
    assert rate == ({"value": ["8"]} if client.is_grpc else "8")
    await client.call("update_log_settings", {"log_info": False})
    assert present_level() == logging.WARNING
    with pytest.raises(InferenceServerException, match="no model"):
        await client.call("get_trace_settings", "nobody")


async def test_a_gateway_with_tls_and_no_keys_changes_no_settings(sharing: Stage) -> None:
    extensions = sharing.gateway._extensions
    extensions._is_open = False  # as with certificates
    assert extensions.log_settings(ANYONE, {}) == LogSettings().values()
    for change in (extensions.log_settings, lambda *_: extensions.trace_settings(ANYONE, "", RATE)):
        with pytest.raises(PermissionDenied, match="api_keys_file"):
            change(ANYONE, {"log_info": True})
