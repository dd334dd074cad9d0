"""Logging with structlog: one event a line on stderr, with the process and its instance.

Event names are snake_case facts (`agent_lost`); everything else is a key. Tensors and prompts are
never logged. Lines of libraries that use `logging` appear in the same form.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO, cast


@contextmanager
def _without_rich() -> Iterator[None]:
    """Hides `rich`, unless it is in use: structlog imports it wherever it is installed.

    It is for a form of tracebacks that this project does not use, and takes 7 MB of every process.
    """
    if "rich" in sys.modules:
        yield
        return
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["rich"]


with _without_rich():
    import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

# Loggers of libraries whose INFO lines matter only to the authors of these libraries.
_CHATTY = ("aiohttp.access", "asyncio", "grpc", "grpc._cython", "urllib3")


def configure_logging(process: str, instance: str, level: str, as_json: bool) -> None:
    """Sets up logging for this process; every line has `process` and `instance`.

    Args:
        process: Kind of process, e.g. "gateway".
        instance: Name of the process, e.g. "gateway-0".
        level: "debug", "info", "warning" or "error".
        as_json: True for one JSON object a line, False for text.
    """

    def add_origin(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["process"] = process
        event["instance"] = instance
        if "logger_name" in event:
            event["logger"] = event.pop("logger_name")
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_origin,
    ]
    render: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        if as_json
        else [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # The default shows local variables, which may be tensors.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    )
    structlog.configure(
        processors=[*shared, *render],
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Patient())),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(cast(TextIO, _Patient()))
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[remove_meta, *render],
        )
    )
    logging.root.handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    """Changes which lines of this process are written: those of `level` and above."""
    minimum = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(minimum))
    logging.root.setLevel(minimum)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(minimum, logging.WARNING))


def present_level() -> int:
    """Returns the lowest level of lines that are written, as a number of `logging`."""
    return logging.root.level


class _Patient:
    """A file that writes to the current `sys.stderr`, and loses lines rather than raises.

    A full disk, or a stream that somebody closed, must not end the process that logs.
    """

    def write(self, text: str) -> int:
        """Writes a text, or drops it if stderr fails."""
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def get_logger(name: str) -> FilteringBoundLogger:
    """Returns a logger whose lines name their origin; it may be made before `configure_logging`."""
    logger: FilteringBoundLogger = structlog.get_logger(logger_name=name)
    return logger
