"""Imports every module with faults, so that the registry is whole."""

from __future__ import annotations

from faults.base import REGISTRY
from faults.kinds import (  # noqa: F401
    agent_faults,
    clock_faults,
    crowd_faults,
    network_faults,
    operator_faults,
    peer_faults,
    process_faults,
    storage_faults,
)

__all__ = ["REGISTRY"]
