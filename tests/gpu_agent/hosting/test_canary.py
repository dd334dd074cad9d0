"""What a partition answers to its canary is compared with what the first of its kind answered."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from catenary_agent.hosting.canary import FOLDER, TOLERANCES, Canary, Kind
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import CanaryFailed

KEY = PartitionKey(ModelKey("net", "1"), 0, 4)
RIGHT = np.random.default_rng(1).standard_normal(500)


def kind(precision: str = "fp32", device: str = "cpu", content: str = "a" * 64) -> Kind:
    return Kind("OnnxPart", device, precision, content)


def recorded(folder: Path) -> list[Path]:
    return list((folder / FOLDER).iterdir())


@pytest.mark.parametrize("precision", TOLERANCES)
def test_an_answer_within_the_tolerance_of_its_precision_passes(
    tmp_path: Path, precision: str
) -> None:
    canary, noise = Canary(tmp_path), np.random.default_rng(2).standard_normal(500)
    noise *= np.linalg.norm(RIGHT) / np.linalg.norm(noise)
    canary.compare(KEY, kind(precision), [RIGHT])
    canary.compare(KEY, kind(precision), [RIGHT + 0.5 * TOLERANCES[precision] * noise])
    with pytest.raises(CanaryFailed, match=r"net:1\[0,4\).* is .* off"):
        canary.compare(KEY, kind(precision), [RIGHT + 2 * TOLERANCES[precision] * noise])
    assert len(recorded(tmp_path)) == 1


@pytest.mark.parametrize(
    "other",
    [
        kind("int8"),
        kind(device="l4"),
        kind(content="b" * 64),
        Kind("TorchPart", "cpu", "fp32", "a" * 64),
    ],
)
def test_unlike_kinds_are_not_compared(tmp_path: Path, other: Kind) -> None:
    Canary(tmp_path).compare(KEY, kind(), [RIGHT])
    Canary(tmp_path).compare(KEY, other, [-RIGHT])
    assert len(recorded(tmp_path)) == 2


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_answer_that_is_no_number_never_passes(tmp_path: Path, value: float) -> None:
    with pytest.raises(CanaryFailed, match="not finite"):
        Canary(tmp_path).compare(KEY, kind(), [np.array([1.0, value])])
    assert not (tmp_path / FOLDER).exists()


def test_an_answer_of_another_shape_does_not_pass(tmp_path: Path) -> None:
    Canary(tmp_path).compare(KEY, kind(), [RIGHT])
    with pytest.raises(CanaryFailed, match="inf off"):
        Canary(tmp_path).compare(KEY, kind(), [RIGHT[:-1]])


def test_what_was_written_down_and_cannot_be_read_is_written_anew(tmp_path: Path) -> None:
    Canary(tmp_path).compare(KEY, kind(), [RIGHT])
    [file] = recorded(tmp_path)
    file.write_bytes(file.read_bytes()[:50])
    Canary(tmp_path).compare(KEY, kind(), [RIGHT])
    with pytest.raises(CanaryFailed):
        Canary(tmp_path).compare(KEY, kind(), [2 * RIGHT])


def test_where_nothing_can_be_written_nothing_is_compared(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("not a folder")
    Canary(tmp_path).compare(KEY, kind(), [RIGHT])
    Canary(tmp_path).compare(KEY, kind(), [2 * RIGHT])


def test_of_many_at_once_one_is_the_first(tmp_path: Path) -> None:
    together = threading.Barrier(6, timeout=20)
    refused: list[int] = []

    def answer(number: int) -> None:
        together.wait()
        try:
            Canary(tmp_path).compare(KEY, kind(), [RIGHT if number else 2 * RIGHT])
        except CanaryFailed:
            refused.append(number)

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert refused == [0] or sorted(refused) == [1, 2, 3, 4, 5]
    assert len(recorded(tmp_path)) == 1
