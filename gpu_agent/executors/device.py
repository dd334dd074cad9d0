"""What an agent runs on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from services.errors import InvalidInput

_FORM = re.compile(r"(?P<kind>cpu)|(?P<cuda>cuda)(?::(?P<index>\d+))?|emulated:(?P<name>[\w.-]+)")


@dataclass(frozen=True, slots=True)
class Device:
    """A device an executor runs on."""

    kind: str
    """"cpu", "cuda" or "emulated"."""
    index: int = 0
    """Which CUDA device."""
    device_class: str = "cpu"
    """Name under which planner and profiles know devices of this speed."""
    slowdown: float = 1.0
    """Emulated only: factor on every time; 0 does not sleep at all."""
    profile: Path | None = None
    """Emulated only: a profile file (see `emulated`); without one the block table's times count."""

    @staticmethod
    def parse(text: str, *, slowdown: float = 1.0, profile: Path | None = None) -> Device:
        """Returns the device named "cpu", "cuda", "cuda:1" or "emulated:<class>".

        Raises:
            InvalidInput: If the text is none of these or the slowdown is negative.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise InvalidInput("device", f"{text!r} is not cpu, cuda:N or emulated:CLASS")
        if not 0 <= slowdown < float("inf"):
            raise InvalidInput("emulated_slowdown", f"{slowdown!r} is not a number >= 0")
        if match["kind"]:
            return Device("cpu")
        if match["cuda"]:
            return Device("cuda", index=int(match["index"] or 0), device_class="cuda")
        return Device("emulated", device_class=match["name"], slowdown=slowdown, profile=profile)

    def __str__(self) -> str:
        if self.kind == "cuda":
            return f"cuda:{self.index}"
        return self.kind if self.kind == "cpu" else f"emulated:{self.device_class}"
