"""The device that an agent's executors run on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from catenary_services.errors import InvalidInput

_FORM = re.compile(r"(?P<kind>cpu)|(?P<cuda>cuda)(?::(?P<index>\d+))?|emulated:(?P<name>[\w.-]+)")

MOST_VIRTUAL_GPUS = 8
"""The most virtual GPUs that a device may be divided into."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device an executor runs on, or one of the virtual GPUs it is divided into."""

    kind: str
    """The kind of device: "cpu", "cuda" or "emulated"."""
    index: int = 0
    """Index of the CUDA device."""
    device_class: str = "cpu"
    """The name that planner and profiles have for devices of this speed."""
    slowdown: float = 1.0
    """Factor on every emulated time; with 0 an emulated device does not sleep at all."""
    profile: Path | None = None
    """A file of emulated times (see `emulated`) that takes precedence over the model's profile."""
    virtual_level: int = 1
    """Executors get 1 / `virtual_level` of the device."""

    @staticmethod
    def parse(
        text: str, *, slowdown: float = 1.0, profile: Path | None = None, virtual_level: int = 1
    ) -> Device:
        """Returns the device named "cpu", "cuda", "cuda:1" or "emulated:<class>".

        Raises:
            InvalidInput: The text is none of these, the slowdown is negative or not finite, or the
                level is not within 1 .. `MOST_VIRTUAL_GPUS`.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise InvalidInput("device", f"{text!r} is not cpu, cuda:N or emulated:CLASS")
        if not 0 <= slowdown < float("inf"):
            raise InvalidInput("emulated_slowdown", f"{slowdown!r} is not a number >= 0")
        if not 1 <= virtual_level <= MOST_VIRTUAL_GPUS:
            raise InvalidInput("virtual_level", f"{virtual_level} is not 1 to {MOST_VIRTUAL_GPUS}")
        if match["kind"]:
            return Device("cpu", virtual_level=virtual_level)
        if match["cuda"]:
            index = int(match["index"] or 0)
            return Device("cuda", index, device_class="cuda", virtual_level=virtual_level)
        return Device(
            "emulated",
            device_class=match["name"],
            slowdown=slowdown,
            profile=profile,
            virtual_level=virtual_level,
        )

    def __str__(self) -> str:
        if self.kind == "cuda":
            return f"cuda:{self.index}"
        return self.kind if self.kind == "cpu" else f"emulated:{self.device_class}"
