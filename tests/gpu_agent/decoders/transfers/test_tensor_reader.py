"""Tensors read in pieces by several threads are those of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import load_file, save_file

from catenary_agent.decoders.model_files.weights import stored_tensors
from catenary_agent.decoders.transfers.tensor_reader import MappedFiles, TensorReader
from catenary_services.errors import InvalidInput

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
]
SHAPES = [(), (1,), (0, 3), (7,), (3, 5, 7), (64, 48)]


def written(path: Path) -> dict[str, Any]:
    """Writes random bits of every datatype in every shape; returns what safetensors reads."""
    random = torch.Generator().manual_seed(3)
    tensors = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            count = torch.Size(shape).numel() * dtype.itemsize
            most = 2 if dtype is torch.bool else 256
            bits = torch.randint(0, most, (count,), dtype=torch.uint8, generator=random)
            tensors[f"{dtype}{list(shape)}"] = bits.view(dtype).view(shape)
    save_file(tensors, path)
    return load_file(path)


def bits_of(tensor: Any) -> list[int]:
    return tensor.cpu().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("piece_bytes", "threads"), [(1 << 20, 0), (1000, 3), (64, 1), (7, 2)])
def test_every_datatype_and_shape_is_read_as_it_is_stored(
    tmp_path: Path, device: str, piece_bytes: int, threads: int
) -> None:
    path = tmp_path / "model.safetensors"
    expected = written(path)
    places = stored_tensors(path)
    with TensorReader(torch.device(device), piece_bytes, threads) as reader:
        for name in reversed(places):
            made = reader.read(path, name, places[name])
            assert made.device.type == device
            assert (made.dtype, made.shape) == (expected[name].dtype, expected[name].shape)
            assert bits_of(made) == bits_of(expected[name])


def test_mapped_files_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    expected = written(path)
    with MappedFiles() as reader:
        for name, where in stored_tensors(path).items():
            assert bits_of(reader.read(path, name, where)) == bits_of(expected[name])


def test_a_file_that_ends_too_soon_is_refused_and_others_are_read_on(tmp_path: Path) -> None:
    whole, short = tmp_path / "whole.safetensors", tmp_path / "short.safetensors"
    for path in (whole, short):
        save_file({"weight": torch.arange(9000, dtype=torch.int32)}, path)
    where = stored_tensors(whole)["weight"]
    with short.open("r+b") as file:
        file.truncate(where.offset + 10_000)
    with TensorReader(torch.device("cpu"), 1000, 2) as reader:
        for _ in range(5):  # more often than there are buffers
            with pytest.raises(InvalidInput, match=r"short\.safetensors: ends within weight"):
                reader.read(short, "weight", where)
        assert reader.read(whole, "weight", where).tolist() == list(range(9000))
