"""The version of the software that this process runs."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def software_version() -> str:
    """Returns the version of the installed package.

    "unknown" in a checkout that is not installed.
    """
    try:
        return version("catenary")
    except PackageNotFoundError:
        return "unknown"
