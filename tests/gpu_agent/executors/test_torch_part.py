"""Exported programs that are harder to cut than a plain convolution network."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_agent.partitioning import jailed
from catenary_agent.preparing import cutting, prepare
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.model import BlockTable, ModelManifest
from catenary_services.domain.tensors import ANY
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from compared_models.graphs import KEY, difference, repository_of
from small_models.jail_here import run_here

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from compared_models.nets import Sequences


class Masked(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Layers of attention under a mask made from shapes only, and a long skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[0], 6, 6, dtype=torch.bool).tril()
        first = torch.tanh(x)
        h = first
        for layer in self.layers:
            q = layer(h)
            h = h + torch.nn.functional.scaled_dot_product_attention(q, q, h, mask)
        return torch.nn.functional.relu_(h) + first


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets blocks be small, and works in this process: the jail has tests of its own."""
    monkeypatch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)
    for module in (jailed, prepare):
        monkeypatch.setattr(module, "run_jailed", run_here)


def test_sizes_with_names_and_bounds_stay_free_in_every_part(tmp_path: Path) -> None:
    repository, net = repository_of(tmp_path, "pytorch_exported"), Sequences().eval()
    sizes = {
        0: torch.export.Dim("batch", min=1),
        1: torch.export.Dim("length", min=1, max=50),
    }
    arguments = (torch.zeros(2, 6, 16), torch.zeros(2, 6))
    program = torch.export.export(
        net, arguments, dynamic_shapes=(dict(sizes), dict(sizes)), strict=False
    )
    torch.export.save(program, repository.model_file(KEY))
    table = prepare_model(repository, KEY, blocks=4)
    assert table.batched
    assert [t.shape for t in table.boundaries[0].tensors] == [(ANY, ANY, 16), (ANY, ANY)]
    x, weights = torch.randn(3, 9, 16), torch.rand(3, 9)
    with torch.no_grad():
        expected = net(x, weights).numpy()
    inputs = {"x": x.numpy(), "weights": weights.numpy()}
    assert difference(repository, inputs, [expected]) < 1e-5


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    torch.manual_seed(0)
    made = ModelRepository(tmp_path)
    made.write_manifest(ModelManifest(KEY, "pytorch_exported", "model.pt2", 10**9, 8, True))
    program = torch.export.export(
        Masked().eval(),
        (torch.zeros(2, 6, 16),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        strict=False,
    )
    torch.export.save(program, made.model_file(KEY))
    return made


def names(table: BlockTable) -> list[set[str]]:
    return [{tensor.name for tensor in boundary.tensors} for boundary in table.boundaries]


def test_masks_made_from_shapes_do_not_cross_and_skips_are_carried(
    repository: ModelRepository,
) -> None:
    table = prepare_model(repository, KEY, blocks=5)
    assert table.batched
    assert {t.datatype for b in table.boundaries for t in b.tensors} == {"FP32"}
    inner = names(table)[1:-1]
    assert any(a & b for a, b in itertools.pairwise(inner)), "the skip must cross several cuts"

    value = np.random.default_rng(0).standard_normal((3, 6, 16)).astype(np.float32)
    expected = run(repository, (), value)
    for cuts in ((1,), (2,), tuple(range(1, table.blocks))):
        np.testing.assert_allclose(run(repository, cuts, value), expected, atol=1e-6)
        np.testing.assert_allclose(run(repository, cuts, value[:1]), expected[:1], atol=1e-6)
    halved = run(repository, (2,), value, float16=True)
    # Float16 keeps 11 bits; attention mixes rows, so the scale is that of the largest value.
    np.testing.assert_allclose(halved, expected, atol=2**-10 * np.abs(expected).max())


def test_inputs_are_not_changed_by_in_place_operations(repository: ModelRepository) -> None:
    prepare_model(repository, KEY, blocks=5)
    value = np.random.default_rng(0).standard_normal((2, 6, 16)).astype(np.float32)
    before = value.copy()
    first = run(repository, (), value)
    np.testing.assert_array_equal(value, before)
    np.testing.assert_array_equal(run(repository, (), value), first)


def test_what_is_not_an_exported_program_is_refused(repository: ModelRepository) -> None:
    repository.model_file(KEY).write_bytes(b"PK not an archive")
    with pytest.raises(InvalidInput, match=r"model\.pt2"):
        prepare_model(repository, KEY)


def run(
    repository: ModelRepository, cuts: tuple[int, ...], value: np.ndarray, float16: bool = False
) -> np.ndarray:
    values = [value]
    for first, last in itertools.pairwise([0, *cuts, repository.block_table(KEY).blocks]):
        values = load_executor(
            repository,
            PartitionKey(KEY, first, last),
            device=Device.parse("cpu"),
            float16_boundaries=float16,
        ).run(values)
    return values[0]
