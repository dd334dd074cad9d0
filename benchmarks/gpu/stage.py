"""The context of a stage: device, folder, clocks, and its measurements."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from catenary_agent.executors.device import Device


class Skipped(Exception):  # noqa: N818 - it is no error
    """Raised by a stage that cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, or one fact with a text instead of a number."""

    name: str
    value: float | str
    unit: str = ""
    bound: str = ""
    """The promise in words, e.g. "<= 0.01"; empty without one."""
    ok: bool | None = None
    """Whether the promise is kept; None without one."""
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """Returns the row as a JSON object."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}

    def text(self) -> str:
        """Returns the row as one line."""
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        verdict = {None: "", True: "ok", False: "MISSED"}[self.ok]
        parts = [f"{self.name:<44} {value:>10} {self.unit:<8}", self.bound, verdict, self.note]
        return " ".join(part for part in parts if part).rstrip()


@dataclass(frozen=True, slots=True)
class Taken:
    """Median times of one call."""

    wall_s: float
    """Seconds until its results were on the host, or the device was idle."""
    span_s: float
    """Seconds from its first to its last work on the device, by CUDA events; on a CPU the wall
    time."""


class Context:
    """The device and the folder of a stage, and the measurements it has made."""

    def __init__(self, folder: Path, *, tiny: bool, rows_file: Path | None = None) -> None:
        """Creates a context that writes rows to a file as they come.

        Args:
            folder: Folder of all stages of one call, in which later ones find what earlier ones
                made.
            tiny: Whether to use tiny sizes on a CPU.
            rows_file: File for a line of JSON for each row; None to keep rows in memory only.
        """
        self.folder = folder
        self.tiny = tiny
        self.rows: list[Row] = []
        self._file = rows_file

    @property
    def device(self) -> Device:
        """The device to measure."""
        return Device("cpu") if self.tiny else Device("cuda")

    @cached_property
    def torch_device(self) -> Any:
        """The device in PyTorch's form; raises where PyTorch sees no GPU."""
        import torch

        if self.tiny:
            torch.set_num_threads(1)
            return torch.device("cpu")
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:
        """True on a GPU."""
        return not self.tiny

    def row(
        self,
        name: str,
        value: float | str,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        note: str = "",
    ) -> None:
        """Notes a measurement, with its bound if one is promised."""
        bound, ok = "", None
        if at_most is not None:
            bound, ok = f"<= {at_most:g}", not isinstance(value, str) and value <= at_most
        elif at_least is not None:
            bound, ok = f">= {at_least:g}", not isinstance(value, str) and value >= at_least
        row = Row(name, value if isinstance(value, str) else float(value), unit, bound, ok, note)
        self.rows.append(row)
        print(row.text(), flush=True)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def sync(self) -> None:
        """Returns once the device is idle."""
        if self.is_cuda:
            import torch

            torch.cuda.synchronize()

    def time(
        self, call: Callable[[], Any], runs: int = 10, warm: int = 2, stream: Any = None
    ) -> Taken:
        """Returns the times of a call, as medians of some runs.

        Args:
            call: The function to time.
            runs: Number of timed runs; a dry run makes two.
            warm: Number of runs before them.
            stream: CUDA stream on which events are recorded; None for the current one.
        """
        if self.tiny:
            runs, warm = min(runs, 2), min(warm, 1)
        for _ in range(warm):
            call()
        self.sync()
        walls, spans = [], []
        for _ in range(runs):
            wall, span = self._once(call, stream)
            walls.append(wall)
            spans.append(span)
        return Taken(statistics.median(walls), statistics.median(spans))

    def _once(self, call: Callable[[], Any], stream: Any) -> tuple[float, float]:
        if not self.is_cuda:
            began = time.perf_counter()
            call()
            wall = time.perf_counter() - began
            return wall, wall
        import torch

        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        first.record(stream)
        call()
        last.record(stream)
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
        return wall, first.elapsed_time(last) / 1e3
