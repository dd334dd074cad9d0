"""What holds for every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undoes what a command that ran in this process set up: the next test's logs are its own."""
    before, handlers, level = structlog.get_config(), logging.root.handlers[:], logging.root.level
    yield
    if structlog.get_config() != before:
        structlog.configure(**before)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
