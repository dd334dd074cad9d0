"""ONNX files of strangers: their weights lie beside them, or they are refused."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from catenary_agent.partitioning.onnx_file import read_onnx
from catenary_services.errors import InvalidInput

VALUE = b"\x00\x00\x80\x3f" * 4


def tensor(location: str) -> TensorProto:
    made = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    made.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        made.external_data.add(key=key, value=value)
    return made


def written(folder: Path, location: str, *, in_node: bool = False) -> Path:
    """Writes y = x + w with w in another file, as an initializer or as a constant."""
    folder.mkdir(parents=True)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4]) for n in "xy")
    add = helper.make_node("Add", ["x", "w"], ["y"])
    constant = helper.make_node("Constant", [], ["w"], value=tensor(location))
    nodes = [constant, add] if in_node else [add]
    graph = helper.make_graph(nodes, "g", [x], [y], [] if in_node else [tensor(location)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("in_node", [False, True])
@pytest.mark.parametrize("location", ["../../secret", "ABSOLUTE", "link", "nothing"])
def test_weights_from_elsewhere_are_refused(tmp_path: Path, location: str, in_node: bool) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(VALUE)
    where = str(secret) if location == "ABSOLUTE" else location
    path = written(tmp_path / "models" / "1", where, in_node=in_node)
    (path.parent / "link").symlink_to(secret)
    with pytest.raises(InvalidInput, match=r"model\.onnx: wants weights from"):
        read_onnx(path)


def test_weights_beside_the_file_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "1", "w.bin")
    (path.parent / "w.bin").write_bytes(VALUE)
    weights = read_onnx(path).graph.initializers["w"].const_value
    assert weights is not None
    assert weights.numpy().tolist() == [1.0] * 4


def test_what_is_no_onnx_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(InvalidInput, match="is not an ONNX model"):
        read_onnx(path)


def test_reading_needs_no_external_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["x2"])], "g", [value], [value])
    onnx.save(helper.make_model(graph), path)
    assert read_onnx(path).graph.inputs[0].name == "x"
