"""Exported programs of strangers: what could run their code is refused before PyTorch reads it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from catenary_agent.partitioning.torch_archive import load_program
from catenary_services.errors import InvalidInput

WEIGHT = "m/data/weights/weight_0"
WEIGHTS = "m/data/weights/model_weights_config.json"
CONSTANTS = "m/data/constants/model_constants_config.json"
GRAPH = "m/models/model.json"
INPUTS = "m/data/sample_inputs/model.pt"
Members = dict[str, bytes]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + torch.ones(4)).reshape(x.shape[0] * 2, 2)


class Runs:
    """Unpickling it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "m.pt2"
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(Model(), (torch.zeros(2, 4),), dynamic_shapes={"x": {0: rows}})
    torch.export.save(program, path)
    return path


def rewritten(good: Path, target: Path, edit: Callable[[Members], object]) -> Path:
    """Writes a copy of an archive after `edit`."""
    with zipfile.ZipFile(good) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def in_graph(find: str, replace: str) -> Callable[[Members], None]:
    def edit(members: Members) -> None:
        assert find in members[GRAPH].decode()
        members[GRAPH] = members[GRAPH].decode().replace(find, replace).encode()

    return edit


def with_guard(code: str) -> Callable[[Members], None]:
    def edit(members: Members) -> None:
        graph = json.loads(members[GRAPH])
        graph["guards_code"] = [code]
        members[GRAPH] = json.dumps(graph).encode()

    return edit


def pickled_weight(members: Members) -> None:
    config = json.loads(members[WEIGHTS])
    next(iter(config["config"].values()))["use_pickle"] = True
    members[WEIGHTS] = json.dumps(config).encode()
    members[WEIGHT] = saved(Runs("true"))


def opaque_constant(members: Members) -> None:
    entry = {
        "path_name": "opaque_obj_0",
        "is_param": False,
        "use_pickle": True,
        "tensor_meta": None,
    }
    members[CONSTANTS] = json.dumps({"config": {"x": entry}}).encode()
    members["m/data/constants/opaque_obj_0"] = pickle.dumps(Runs("true"))


SIZE = "Symbol('s77', positive=True, integer=True)"
ATTACKS = {
    "a pickle as example inputs": lambda m: m.update({INPUTS: saved(Runs("true"))}),
    "a pickle as weight": pickled_weight,
    "an opaque constant": opaque_constant,
    "code as a size": in_graph(SIZE, "__import__('os').system('true')"),
    "code inside a size": in_graph("Integer(2)", "Integer('__import__(1)')"),
    "a text as a size": in_graph("Integer(2)", "sympify('exit()')"),
    "a function of another module": in_graph("torch.ops.aten.linear.default", "torch.os.system"),
    "a loader of libraries": in_graph("torch.ops.aten.linear.default", "torch.ops.load_library"),
    "an extension": in_graph("torch.ops.aten.linear.default", "#evil:run"),
    "an attribute by name": in_graph("_operator.mul", "_operator.attrgetter"),
    "code as a guard": with_guard("__import__('os').system('true')"),
    "an attribute in a guard": with_guard("x.__class__ == 1"),
    "a compiled library": lambda m: m.update({"m/data/aotinductor/model/a.so": b"\x7fELF"}),
    "a foreign member": lambda m: m.update({"m/../../etc/passwd": b"x"}),
    "a class as container": in_graph("builtins.tuple", "os.system"),
    "no graph that is JSON": lambda m: m.update({GRAPH: b"{"}),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_could_run_code_is_refused(good: Path, tmp_path: Path, attack: str) -> None:
    path = rewritten(good, tmp_path / "m.pt2", ATTACKS[attack])
    with pytest.raises(InvalidInput, match=r"m\.pt2"):
        load_program(path)


def test_without_the_check_such_a_file_runs_code(good: Path, tmp_path: Path) -> None:
    """Shows that the attacks are real: what is refused above is obeyed by PyTorch."""
    marker = tmp_path / "was-run"
    run = f"__import__('pathlib').Path({str(marker)!r}).touch()".replace('"', "")
    path = rewritten(good, tmp_path / "m.pt2", in_graph("Integer(2)", run))
    with pytest.raises(InvalidInput):
        load_program(path)
    assert not marker.exists()
    with contextlib.suppress(Exception):  # what it returns is no size; it has run by then
        torch.export.load(path)
    assert marker.exists()


def test_archives_that_readers_may_see_differently_are_refused(good: Path, tmp_path: Path) -> None:
    before = tmp_path / "before.pt2"
    before.write_bytes(b"PK\x03\x04junk" + good.read_bytes())
    packed = tmp_path / "packed.pt2"
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    commented = tmp_path / "commented.pt2"
    commented.write_bytes(good.read_bytes())
    with zipfile.ZipFile(commented, "a") as archive:
        archive.comment = b"x" * 100
    for path in (before, packed, commented):
        with pytest.raises(InvalidInput):
            load_program(path)


def test_a_program_as_pytorch_writes_it_is_loaded(good: Path, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    expected = torch.export.load(good).module()(x)
    again = rewritten(good, tmp_path / "m.pt2", lambda members: None)
    assert torch.equal(load_program(good).module()(x), expected)
    assert torch.equal(load_program(again).module()(x), expected)
