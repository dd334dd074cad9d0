"""Cached parts are what was built, or are built anew."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from catenary_agent.partitioning import parts
from catenary_agent.partitioning.parts import PART_FILE, PartName, part_folder
from catenary_services.errors import ContentMismatch

NAME = PartName("0" * 64, "1" * 64, "test")
WHOLE = b"weights" * 1000


def use(cache: Path, name: PartName = NAME) -> tuple[bytes, bool]:
    """Returns what a part's file has in it when it is loaded, and whether it was built now."""
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "part.onnx").write_bytes(WHOLE)

    with part_folder(cache, name, build) as folder:
        return (folder / "part.onnx").read_bytes(), bool(built)


def altered(final: Path) -> None:
    content = bytearray(WHOLE)
    content[len(content) // 2] ^= 1
    (final / "part.onnx").write_bytes(content)


def a_folder_for_a_file(final: Path) -> None:
    (final / "part.onnx").unlink()
    (final / "part.onnx").mkdir()


def a_file_for_the_folder(final: Path) -> None:
    shutil.rmtree(final)
    final.write_bytes(b"what")


def a_dangling_link(final: Path) -> None:
    shutil.rmtree(final)
    final.symlink_to(final.parent / "nowhere")


def of_another_source(final: Path) -> None:
    said = json.loads((final / PART_FILE).read_bytes())
    said["made_of"]["source"] = "f" * 64
    (final / PART_FILE).write_text(json.dumps(said))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "torn": lambda final: (final / "part.onnx").write_bytes(WHOLE[: len(WHOLE) // 2]),
    "altered": altered,
    "empty": lambda final: (final / "part.onnx").write_bytes(b""),
    "longer": lambda final: (final / "part.onnx").write_bytes(WHOLE + b"x"),
    "missing": lambda final: (final / "part.onnx").unlink(),
    "a folder for a file": a_folder_for_a_file,
    "a file for the folder": a_file_for_the_folder,
    "a dangling link": a_dangling_link,
    "nothing said": lambda final: (final / PART_FILE).unlink(),
    "nothing said in it": lambda final: (final / PART_FILE).write_bytes(b""),
    "nonsense said": lambda final: (final / PART_FILE).write_text("[" * 3000),
    "of another source": of_another_source,
    "one file too many": lambda final: (final / "part.data").write_bytes(b"more"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_part_that_is_not_what_was_built_is_built_anew(tmp_path: Path, damage: str) -> None:
    assert use(tmp_path) == (WHOLE, True)
    assert use(tmp_path) == (WHOLE, False)
    DAMAGE[damage](tmp_path / NAME.folder)
    with capture_logs() as logs:
        assert use(tmp_path) == (WHOLE, True)
    said = [entry for entry in logs if entry["event"] == "part_rebuilt"]
    assert len(said) == 1
    assert said[0]["part"] == str(tmp_path / NAME.folder)
    assert said[0]["reason"]
    assert use(tmp_path) == (WHOLE, False)
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == [NAME.folder]


def test_a_damaged_part_that_cannot_be_replaced_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path)
    altered(tmp_path / NAME.folder)
    real = parts.tempfile.mkdtemp

    def refuse(*args: Any, **options: Any) -> str:
        if options.get("dir") == tmp_path:
            raise OSError(30, "Read-only file system")
        return real(*args, **options)

    monkeypatch.setattr(parts.tempfile, "mkdtemp", refuse)
    with capture_logs() as logs:
        assert use(tmp_path) == (WHOLE, True)
    assert {"part_rebuilt", "parts_not_cached"} <= {entry["event"] for entry in logs}


def test_a_part_that_changes_while_it_is_loaded_is_not_served(tmp_path: Path) -> None:
    use(tmp_path)
    with (
        pytest.raises(ContentMismatch, match="was changed while"),
        part_folder(tmp_path, NAME, lambda folder: None) as folder,
    ):
        altered(folder)


def test_another_source_cut_library_or_cutter_is_another_part(tmp_path: Path) -> None:
    names = {
        NAME,
        PartName("2" * 64, "1" * 64, "test"),
        PartName("0" * 64, "2" * 64, "test"),
        PartName("0" * 64, "1" * 64, "other"),
        PartName("0" * 64, "1" * 64, "test", 99),
    }
    assert len({name.folder for name in names}) == 5
    assert all(use(tmp_path, name) == (WHOLE, True) for name in names)
    assert all(use(tmp_path, name) == (WHOLE, False) for name in names)


def test_what_a_builder_that_died_has_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".{NAME.folder}.abcd"
    left.mkdir()
    (left / "half").write_bytes(b"half")
    assert use(tmp_path) == (WHOLE, True)
    assert not left.exists()


def test_many_who_find_a_damaged_part_build_one(tmp_path: Path) -> None:
    use(tmp_path)
    altered(tmp_path / NAME.folder)
    together = threading.Barrier(6, timeout=20)
    found: list[tuple[bytes, bool]] = []

    def work() -> None:
        together.wait()
        found.append(use(tmp_path))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [content for content, _ in found] == [WHOLE] * 6
    assert sum(built for _, built in found) == 1
