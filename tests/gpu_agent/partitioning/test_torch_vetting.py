"""Exported programs of strangers: which operators and sizes are run, and which are refused."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from catenary_agent.partitioning.census import QUIET, functional_of, is_pure
from catenary_agent.partitioning.torch_archive import check_archive, load_program
from catenary_agent.partitioning.torch_graph import load_torch
from catenary_agent.partitioning.torch_vetting import pure_operators
from catenary_agent.preparing import prepare
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.errors import CatenaryError, InvalidInput
from catenary_services.models.model_repository import ModelRepository
from hostile.hostile_programs import (
    OPERATORS,
    SIZES,
    SYMBOL,
    WEIGHTS,
    Plain,
    argument,
    calls,
    edited,
    export,
    rewritten,
    sized,
)

KEY = ModelKey("m", "1")


def of_name(name: str) -> Any:
    """Returns the overload that "aten.add.Tensor" names."""
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


@pytest.mark.parametrize("name", sorted(pure_operators()))
def test_a_listed_operator_only_computes_new_tensors(name: str) -> None:
    """By PyTorch's own schema, and by nobody's opinion."""
    operator = of_name(name)
    schema = operator._schema
    assert not schema.is_mutable
    for taken in (*schema.arguments, *schema.returns):
        assert taken.alias_info is None or not taken.alias_info.is_write
    for taken in schema.arguments:
        assert not taken.is_out
        assert taken.name not in ("out", "filename", "generator", "storage")
        assert not any(w in str(taken.type) for w in ("Generator", "Storage", "Stream"))
    assert torch.Tag.nondeterministic_seeded not in operator.tags or name in QUIET
    assert torch.Tag.dynamic_output_shape not in operator.tags or name == "aten.index.Tensor"
    assert is_pure(operator)


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten.set_.source_Storage",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten.add.out",
        "aten.rand.default",
        "aten.randn_like.default",
        "aten.bernoulli.default",
        "aten.normal_.default",
        "aten.empty.memory_format",
        "aten.new_empty.default",
        "aten.as_strided.default",
        "aten._unsafe_index.Tensor",
        "aten.item.default",
        "aten.nonzero.default",
        "aten.copy_.default",
        "aten.record_stream.default",
        "aten.rand.generator",
        "aten.unique_dim.default",
        "aten.multinomial.default",
    ],
)
def test_what_must_not_be_listed_is_not(name: str) -> None:
    assert name not in pure_operators()
    assert not is_pure(of_name(name))


def test_in_place_operators_stand_for_those_that_make_new_tensors() -> None:
    assert functional_of(torch.ops.aten.relu_.default) is torch.ops.aten.relu.default
    assert functional_of(torch.ops.aten.relu.default) is None


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(Plain(), tmp_path_factory.mktemp("plain") / "m.pt2")


def test_a_plain_program_is_loaded_and_computes_the_same(plain: Path) -> None:
    x = torch.rand(5, 3, 8, 8)
    expected = torch.export.load(plain).module()(x)
    model = load_torch(plain)
    assert torch.allclose(model.module(x), expected)
    with pytest.raises(InvalidInput, match="hardtanh_"):
        load_program(plain)  # as a part: those were rewritten


@pytest.mark.parametrize("attack", OPERATORS)
def test_operators_that_are_not_listed_are_refused(
    plain: Path, tmp_path: Path, attack: str
) -> None:
    path = rewritten(plain, tmp_path / "m.pt2", OPERATORS[attack])
    started = time.process_time()
    with pytest.raises(InvalidInput, match=r"m\.pt2"):
        check_archive(path, in_place=True)
    assert time.process_time() - started < 20


def test_the_operator_is_named(plain: Path, tmp_path: Path) -> None:
    path = rewritten(plain, tmp_path / "m.pt2", OPERATORS["a file that is written"])
    with pytest.raises(InvalidInput, match=r"aten\.from_file\.default"):
        load_torch(path)


@pytest.mark.parametrize("attack", SIZES)
def test_sizes_that_never_end_are_refused_before_they_are_read(
    plain: Path, tmp_path: Path, attack: str
) -> None:
    path = rewritten(plain, tmp_path / "m.pt2", sized(SIZES[attack]))
    started = time.process_time()
    with pytest.raises(InvalidInput, match=r"m\.pt2"):
        check_archive(path, in_place=True)
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "text",
    [
        SYMBOL,
        f"Mul(Integer(2), {SYMBOL})",
        f"Add(Integer(1), FloorDiv(Add({SYMBOL}, Integer(-1)), Integer(2)))",
        f"Mod({SYMBOL}, Integer(8))",
        f"Pow({SYMBOL}, Integer(2))",
        "s0",
        "2*s0 + 1",
    ],
)
def test_sizes_as_pytorch_writes_them_are_read(plain: Path, tmp_path: Path, text: str) -> None:
    check_archive(rewritten(plain, tmp_path / "m.pt2", sized(text)), in_place=True)


def test_a_size_that_grows_from_node_to_node_is_refused(plain: Path, tmp_path: Path) -> None:
    """Each multiplication is harmless; forty of them in a row square a size forty times."""

    def change(document: Any) -> None:
        nodes = document["graph_module"]["graph"]["nodes"]
        at = next(i for i, node in enumerate(nodes) if "sym_size" in node["target"])
        name = nodes[at]["outputs"][0]["as_sym_int"]["as_name"]
        for n in range(40):
            square = [
                argument("a", as_sym_int={"as_name": name}),
                argument("b", as_sym_int={"as_name": name}),
            ]
            name = f"square_{n}"
            nodes.insert(
                at + 1 + n,
                {
                    "target": "_operator.mul",
                    "inputs": square,
                    "metadata": {},
                    "outputs": [{"as_sym_int": {"as_name": name}}],
                },
            )

    path = rewritten(plain, tmp_path / "m.pt2", edited(change))
    with pytest.raises(InvalidInput, match="computes a size of more than"):
        check_archive(path, in_place=True)


def test_a_program_exported_for_training_is_refused(tmp_path: Path) -> None:
    path = export(Plain(), tmp_path / "m.pt2", train=True)
    with pytest.raises(InvalidInput, match=r"training|keeps state|none of the operators"):
        load_torch(path)


class Counting(torch.nn.Module):
    """Adds up what it was given, for the next request to see."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 8, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.total.add_(rows.sum(0))
        return rows + self.total


class Overwriting(torch.nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows.mul_(2.0)
        return rows + 1.0


@pytest.mark.parametrize("module", [Counting, Overwriting])
def test_what_outlives_a_request_must_not_change(
    tmp_path: Path, module: type[torch.nn.Module]
) -> None:
    path = export(module(), tmp_path / "m.pt2")
    with pytest.raises(InvalidInput, match=r"outlives a request|keeps state"):
        load_torch(path)


def test_weights_that_are_larger_than_their_bytes_are_refused(plain: Path, tmp_path: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        config = json.loads(members[WEIGHTS])
        meta = next(iter(config["config"].values()))["tensor_meta"]
        meta["sizes"] = [{"as_int": 1 << 30}]
        meta["strides"] = [{"as_int": 0}]
        members[WEIGHTS] = json.dumps(config).encode()

    with pytest.raises(InvalidInput, match="larger than its bytes"):
        check_archive(rewritten(plain, tmp_path / "m.pt2", edit), in_place=True)


def test_members_that_share_bytes_are_refused(plain: Path, tmp_path: Path) -> None:
    """A zip bomb without compression: every name points to the same bytes."""
    path = tmp_path / "m.pt2"
    content = bytearray(plain.read_bytes())
    with zipfile.ZipFile(plain) as archive:
        first, second = (archive.getinfo(f"m/data/weights/weight_{n}") for n in (0, 1))
    at = content.index(b"PK\x01\x02", archive.start_dir)
    while content[at : at + 4] == b"PK\x01\x02":
        length = int.from_bytes(content[at + 28 : at + 30], "little")
        if content[at + 46 : at + 46 + length].decode() == second.filename:
            content[at + 42 : at + 46] = first.header_offset.to_bytes(4, "little")
        more = sum(int.from_bytes(content[at + n : at + n + 2], "little") for n in (30, 32))
        at += 46 + length + more
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="overlap"):
        check_archive(path, in_place=True)


def repository_with(source: Path, folder: Path) -> ModelRepository:
    repository = ModelRepository(folder / "models")
    repository.write_manifest(ModelManifest(KEY, "pytorch_exported", "m.pt2", 10**9, 4, False))
    repository.model_file(KEY).write_bytes(source.read_bytes())
    return repository


def test_a_hostile_program_is_refused_by_prepare_and_leaves_nothing(
    plain: Path, tmp_path: Path
) -> None:
    """Finding A1, from the command's side: what was chosen to be written is not."""
    target = tmp_path / "chosen"
    target.write_bytes(bytes(400))
    write = calls(
        "torch.ops.aten.from_file.default",
        argument("filename", as_string=str(target)),
        argument("shared", as_bool=True),
        argument("size", as_int=100),
    )
    repository = repository_with(rewritten(plain, tmp_path / "m.pt2", write), tmp_path)
    before = sorted(repository.folder(KEY).iterdir())
    with pytest.raises(InvalidInput, match=r"m\.pt2.*from_file"):
        prepare.prepare_model(repository, KEY)
    assert target.read_bytes() == bytes(400)
    assert sorted(repository.folder(KEY).iterdir()) == before


def test_a_model_that_wants_all_memory_is_refused_by_prepare(tmp_path: Path) -> None:
    class Wide(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(x.shape[0], -1)
            for _ in range(4):
                rows = torch.cat([rows] * 200, 1)
            return rows

    repository = repository_with(export(Wide(), tmp_path / "m.pt2"), tmp_path)
    with pytest.raises(CatenaryError, match=r"memory|no size tried"):
        prepare.prepare_model(repository, KEY)
