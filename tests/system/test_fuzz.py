"""A little of what `make fuzz` does for ten minutes, and `make fuzz-parsers` for an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system import fuzz_parsers
from tests.system.fuzz import TOOL, main

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


@pytest.mark.skipif(not TOOL.exists(), reason="`make test-system` installs .venv-tools")
def test_half_a_minute_of_fuzzing_finds_nothing(tmp_path: Path) -> None:
    assert main(["--minutes", "0.5", "--seed", "2", "--folder", str(tmp_path)]) == 0


@pytest.mark.skipif(not fuzz_parsers.PYTHON.exists(), reason="`make fuzz-parsers` installs it")
def test_a_guided_search_of_a_parser_finds_nothing() -> None:
    assert fuzz_parsers.main(["--minutes", "0.05", "--only", "stored/keys"]) == 0


def test_an_unknown_parser_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz_parsers.main(["--only", "no/such"]) == 2
    assert "wire/http2" in capsys.readouterr().out
