"""The progress of an import on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_LINE_S = 10.0
"""Seconds between two lines about a transfer, where there is no terminal."""
_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    DownloadColumn(),
    TransferSpeedColumn(),
    TimeRemainingColumn(),
)


class StepView(Protocol):
    """The part of a step that is shown."""

    @property
    def phase(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def done_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...


class ImportView:
    """Shows the steps of one import; use it in a `with` statement."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said = ""
        self._said_s = 0.0

    def __enter__(self) -> ImportView:
        if sys.stderr.isatty():
            self._bar = Progress(*_COLUMNS, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: StepView) -> None:
        """Shows a step of the import: in the bar on a terminal, as a line elsewhere."""
        if step.phase == "fetching":
            self._transfer(step)
        elif step.phase in ("listed", "importing") and step.text and step.text != self._said:
            self._said = step.text
            self._line(step.text)

    def _transfer(self, step: StepView) -> None:
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(step.file, total=step.total_bytes)
            self._bar.update(
                self._task, description=step.file, completed=step.done_bytes, total=step.total_bytes
            )
            return
        now_s = time.monotonic()
        if step.total_bytes and (
            now_s - self._said_s >= _LINE_S or step.done_bytes >= step.total_bytes
        ):
            self._said_s = now_s
            share = step.done_bytes / step.total_bytes
            done, total = step.done_bytes / 1e6, step.total_bytes / 1e6
            self._line(f"{step.file}: {done:.1f} of {total:.1f} MB fetched ({share:.0%})")

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            typer.echo(text, err=True)
