"""What a stage is given: the device, a folder, clocks, and where its measurements go."""

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
    """The stage cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, or with a text instead of a number one fact."""

    name: str
    value: float | str
    unit: str = ""
    bound: str = ""
    """What is promised, in words: "<= 0.01"."""
    ok: bool | None = None
    """Whether it is kept; None: nothing is promised."""
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """Returns the row as JSON has it."""
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
    """Until its results were on the host, or the device was idle."""
    span_s: float
    """From its first to its last work on the device, by CUDA events; on a CPU the same."""


class Context:
    """Where a stage runs and what it has found out."""

    def __init__(self, folder: Path, *, tiny: bool, rows_file: Path | None = None) -> None:
        """Writes rows to a file as they come.

        Args:
            folder: Of all stages of one call: what one has made, later ones may find.
            tiny: Tiny sizes, on a CPU.
            rows_file: A line of JSON for each row; None: rows are only kept.
        """
        self.folder = folder
        self.tiny = tiny
        self.rows: list[Row] = []
        self._file = rows_file

    @property
    def device(self) -> Device:
        """What is measured."""
        return Device("cpu") if self.tiny else Device("cuda")

    @cached_property
    def torch_device(self) -> Any:
        """The same, as PyTorch calls it; a stage ends here where PyTorch sees no GPU."""
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
        """Notes a measurement, with what is promised of it."""
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
        """Returns what a call takes, as the median of some runs.

        Args:
            call: What is timed.
            runs: So often; a dry run makes two.
            warm: So often before.
            stream: CUDA stream the events are recorded on; None: the current one.
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
