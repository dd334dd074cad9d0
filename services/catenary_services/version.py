"""Which version of the software this process runs."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def software_version() -> str:
    """Returns the installed package's version; "unknown" in a checkout that is not installed."""
    try:
        return version("catenary")
    except PackageNotFoundError:
        return "unknown"
