"""What holds for every test."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path

import hypothesis
import pytest
import structlog

from suite_rules.fast_selection import RUNTIMES, TESTS, is_fast
from suite_rules.longest_first import longest_first

# How long an example takes says something of the machine, and nothing of what is tested.
hypothesis.settings.register_profile(
    "catenary", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("catenary")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="only tests that start no process and load no model"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files that are not for `--fast` before they are imported."""
    if not config.getoption("fast") or not collection_path.is_relative_to(TESTS):
        return None
    is_test = collection_path.is_dir() or collection_path.name.startswith("test_")
    return True if is_test and not is_fast(collection_path) else None


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets what it starts in the background ignore Ctrl-C, and so do all who descend from it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("fast"):
        sys.path_hooks.insert(0, _sources_only)
        sys.path_importer_cache.clear()
        sys.addaudithook(_nothing_slow)


def _sources_only(folder: str) -> FileFinder:
    """Finds no compiled module in the checkout: it may be older than its source."""
    place = Path(folder).resolve()
    if not place.is_relative_to(TESTS.parent) or "site-packages" in place.parts:
        raise ImportError
    return FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)


def pytest_collection_finish() -> None:
    """Spares every later garbage collection what stays anyway: libraries and thousands of tests.

    Loading a model collects, as do tests of memory: without this that takes most of their time.
    """
    gc.collect()
    gc.freeze()


_running = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    global _running  # noqa: PLW0603  (an audit hook has no other way to know)
    _running = True
    try:
        return (yield)
    finally:
        _running = False


def _nothing_slow(event: str, arguments: tuple[object, ...]) -> None:
    """Fails a test that is not as fast as its file looks."""
    if not _running or event not in ("subprocess.Popen", "import"):
        return
    if event == "import" and arguments[0] not in RUNTIMES:
        return
    raise AssertionError(
        f"{event} {arguments[0]}: not fast; tests/support/suite_rules/fast_selection.py"
    )


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undoes what a command that ran in this process set up: the next test's logs are its own."""
    before, handlers, level = structlog.get_config(), logging.root.handlers[:], logging.root.level
    yield
    if structlog.get_config() != before:
        structlog.configure(**before)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
