"""Scratch folders: one is alone with whoever made it, and does not outlive a killed process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from catenary_services.scratch import ScratchFolder, sweep

MAKES_ONE_AND_WAITS = """
import sys
from pathlib import Path
from catenary_services.scratch import ScratchFolder
folder = ScratchFolder(".work-", Path(sys.argv[1]))
(folder.path / "file").write_text("half")
print(folder.path, flush=True)
sys.stdin.read()
"""


def start(into: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE_AND_WAITS, str(into)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_it_is_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    with ScratchFolder(".work-", tmp_path) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_the_next_one_removes_those_of_killed_processes_only(tmp_path: Path) -> None:
    killed, its_folder = start(tmp_path)
    living, their_folder = start(tmp_path)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert (its_folder / "file").exists()
        with ScratchFolder(".work-", tmp_path) as folder:
            assert set(tmp_path.iterdir()) == {folder, their_folder}
            assert (their_folder / "file").read_text() == "half"
    finally:
        living.communicate()  # its input ends, and so it ends by itself
    assert list(tmp_path.iterdir()) == []


def test_folders_of_other_kinds_and_links_stay(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".work-link").symlink_to(elsewhere)
    (tmp_path / ".work-file").write_text("x")
    (tmp_path / ".other-kind").mkdir()
    before = set(tmp_path.iterdir())
    sweep(tmp_path, ".work-")
    assert set(tmp_path.iterdir()) == before


def test_who_makes_one_beside_others_keeps_it(tmp_path: Path) -> None:
    def makes_some(_: int) -> bool:
        kept = True
        for _ in range(50):
            with ScratchFolder(".work-", tmp_path) as folder:
                (folder / "file").write_text("x")
                sweep(tmp_path, ".work-")
                kept = kept and (folder / "file").exists()
        return kept

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(makes_some, range(8)))
    assert list(tmp_path.iterdir()) == []
