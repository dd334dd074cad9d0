"""Settings of tracing and logging, by the names that Triton's extensions have for them.

All names are told. Those that Catenary decides elsewhere can only be set to what they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from catenary_gateway.tensors.validation import clip
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.log import get_logger, present_level, set_level
from catenary_services.telemetry.tracing import Tracer

OFF, TIMESTAMPS = "OFF", "TIMESTAMPS"
_FIXED_TRACE = {
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "opentelemetry",
}
TRACE_NAMES = ("trace_level", "trace_rate", *_FIXED_TRACE)
_FIXED_LOG: Mapping[str, bool | int | str] = {"log_file": "", "log_format": "ISO8601"}
_LOWEST_RATE, _HIGHEST_RATE = 1, 2**31 - 1
_FLAGS = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}
"""The level that each flag switches, the lowest first."""
_LEVELS = ("info", "warning", "error", "critical")
_HIGHEST_VERBOSE = 2**31 - 1

_log = get_logger("catenary_gateway.settings")

LogValue = bool | int | str


class TraceSettings:
    """The sampling of a gateway's traces: one of every `trace_rate` requests, or none."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._first_ratio = tracer.sample_ratio
        self._ratio = tracer.sample_ratio
        """The ratio while tracing is on."""
        self._is_on = tracer.sample_ratio > 0.0

    def values(self) -> dict[str, list[str]]:
        """Returns the values of every trace setting, by Triton's name for it."""
        rate = round(1 / self._ratio) if self._ratio > 0.0 else _HIGHEST_RATE
        return {
            "trace_level": [TIMESTAMPS if self._is_on else OFF],
            "trace_rate": [str(min(rate, _HIGHEST_RATE))],
            **{name: [value] for name, value in _FIXED_TRACE.items()},
        }

    def update(self, changes: Mapping[str, Sequence[str]]) -> None:
        """Changes settings, all of them or none; one without a value gets its first one again.

        Raises:
            InvalidInput: There is no such setting, or a value is wrong.
            NotSupported: A setting cannot have this value here.
        """
        ratio, is_on = self._ratio, self._is_on
        for name, value in changes.items():
            if name == "trace_rate":
                ratio = 1 / _rate(value) if value else self._first_ratio
            elif name == "trace_level":
                is_on = _is_on(value) if value else self._first_ratio > 0.0
            elif name not in _FIXED_TRACE:
                raise InvalidInput("settings", f"there is no trace setting {clip(name)!r}")
            elif list(value) not in ([], [_FIXED_TRACE[name]]):
                raise NotSupported(
                    f"{name}: cannot be changed; sampled traces go where `otlp_endpoint` says"
                )
        self._ratio, self._is_on = ratio, is_on
        self._tracer.sample_ratio = ratio if is_on else 0.0
        if changes:
            _log.info("trace_settings_changed", sample_ratio=self._tracer.sample_ratio)


class LogSettings:
    """The level of a gateway's log, as one flag for each level."""

    def values(self) -> dict[str, LogValue]:
        """Returns the value of every log setting, by Triton's name for it."""
        present = present_level()
        flags = {name: present <= level for name, level in _FLAGS.items()}
        return {**_FIXED_LOG, **flags, "log_verbose_level": int(present <= logging.DEBUG)}

    def update(self, changes: Mapping[str, object]) -> None:
        """Changes settings, all of them or none.

        Raises:
            InvalidInput: There is no such setting, or a value is wrong.
            NotSupported: A setting cannot have this value here.
        """
        values = self.values()
        for name, value in changes.items():
            if name not in values:
                raise InvalidInput("settings", f"there is no log setting {clip(name)!r}")
            if type(value) is not type(values[name]):
                kind = {bool: "true or false", int: "a number", str: "a text"}[type(values[name])]
                raise InvalidInput(name, f"must be {kind}")
            if name in _FIXED_LOG and value != _FIXED_LOG[name]:
                raise NotSupported(
                    f"{name}: cannot be changed; the log goes to stderr, as `log_json` says"
                )
            assert isinstance(value, LogValue)
            values[name] = value
        level = _level(values)
        if changes:
            _log.info("log_settings_changed", level=level)
            set_level(level)


def _rate(value: Sequence[str]) -> int:
    text = value[0] if len(value) == 1 else ""
    if not (text.isascii() and text.isdecimal() and len(text) <= 10) or not (
        _LOWEST_RATE <= int(text) <= _HIGHEST_RATE
    ):
        raise InvalidInput("trace_rate", f"must be {_LOWEST_RATE} to {_HIGHEST_RATE}")
    return int(text)


def _is_on(value: Sequence[str]) -> bool:
    if "TENSORS" in value:
        raise NotSupported("trace_level: tensors are never in traces")
    if len(value) != 1 or value[0] not in (OFF, TIMESTAMPS):
        raise InvalidInput("trace_level", f"must be {OFF} or {TIMESTAMPS}")
    return value[0] == TIMESTAMPS


def _level(values: Mapping[str, LogValue]) -> str:
    """Returns the level that the flags say.

    Raises:
        InvalidInput: There is no such level.
    """
    verbose = values["log_verbose_level"]
    if not isinstance(verbose, int) or not 0 <= verbose <= _HIGHEST_VERBOSE:
        raise InvalidInput("log_verbose_level", "must be 0 or more")
    flags = [bool(values[name]) for name in _FLAGS]
    if flags != sorted(flags):
        raise InvalidInput("settings", "lines of a level are written with those of all above")
    if verbose and not flags[0]:
        raise InvalidInput("log_verbose_level", "needs log_info")
    return "debug" if verbose else _LEVELS[flags.index(True) if any(flags) else len(flags)]
