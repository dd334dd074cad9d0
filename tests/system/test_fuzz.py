"""Half a minute of what `make fuzz` does for ten."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.fuzz import TOOL, main

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


@pytest.mark.skipif(not TOOL.exists(), reason="`make test-system` installs .venv-tools")
def test_half_a_minute_of_fuzzing_finds_nothing(tmp_path: Path) -> None:
    assert main(["--minutes", "0.5", "--seed", "2", "--folder", str(tmp_path)]) == 0
