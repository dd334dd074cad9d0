"""Exported PyTorch programs as an attacker would write them: a plain one, and what is changed in it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Edit = Callable[[dict[str, bytes]], object]
GRAPH = "m/models/model.json"
WEIGHTS = "m/data/weights/model_weights_config.json"


class Plain(torch.nn.Module):
    """A bit of everything that is allowed: in-place activations, a buffer, a free batch."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.active = torch.nn.ReLU6(inplace=True)
        self.drop = torch.nn.Dropout()
        self.register_buffer("scale", torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.drop(self.active(self.norm(self.convolution(x)))) * self.scale
        return y.reshape(x.shape[0] * 2, -1) + torch.ones(1)


def export(module: torch.nn.Module, path: Path, *, train: bool = False) -> Path:
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(
        module.train(train), (torch.rand(2, 3, 8, 8),), dynamic_shapes=({0: rows},), strict=False
    )
    torch.export.save(program, path)
    return path


def rewritten(source: Path, target: Path, edit: Edit) -> Path:
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target


def edited(change: Callable[[Any], object]) -> Callable[[dict[str, bytes]], None]:
    def edit(members: dict[str, bytes]) -> None:
        document = json.loads(members[GRAPH])
        change(document)
        members[GRAPH] = json.dumps(document).encode()

    return edit


def node_of(document: Any, target: str) -> Any:
    nodes = document["graph_module"]["graph"]["nodes"]
    return next(node for node in nodes if node["target"].startswith(f"torch.ops.aten.{target}"))


def argument(name: str, **value: object) -> dict[str, object]:
    return {"name": name, "arg": value, "kind": 1}


def calls(target: str, *inputs: dict[str, object]) -> Callable[[dict[str, bytes]], None]:
    """Puts a call in the place of `torch.ones(1)`."""

    def change(document: Any) -> None:
        node = node_of(document, "ones")
        node["target"] = target
        node["inputs"] = list(inputs)

    return edited(change)


def sized(text: str) -> Callable[[dict[str, bytes]], None]:
    """Writes an expression as the size of a tensor."""

    def change(document: Any) -> None:
        values = document["graph_module"]["graph"]["tensor_values"]
        free = next(v for v in values.values() if any("as_expr" in s for s in v["sizes"]))
        size = next(s for s in free["sizes"] if "as_expr" in s)
        size["as_expr"]["expr_str"] = text

    return edited(change)


FILE = argument("filename", as_string="/etc/shadow")
SIZE = argument("size", as_int=100)
SYMBOL = "Symbol('s0', positive=True, integer=True)"
OPERATORS = {
    "a file that is read": calls(
        "torch.ops.aten.from_file.default", FILE, argument("shared", as_bool=False), SIZE
    ),
    "a file that is written": calls(
        "torch.ops.aten.from_file.default", FILE, argument("shared", as_bool=True), SIZE
    ),
    "an output that is given": calls("torch.ops.aten.ones.out", argument("size", as_ints=[1])),
    "storage of another tensor": calls(
        "torch.ops.aten.set_.source_Tensor", argument("self", as_tensor={"name": "b_scale"})
    ),
    "a storage that grows": calls(
        "torch.ops.aten.resize_.default", argument("self", as_tensor={"name": "b_scale"})
    ),
    "memory as it was found": calls(
        "torch.ops.aten.empty.memory_format", argument("size", as_ints=[1])
    ),
    "memory by address": calls(
        "torch.ops.aten.as_strided.default", argument("self", as_tensor={"name": "b_scale"})
    ),
    "an index that nobody checks": calls("torch.ops.aten._unsafe_index.Tensor"),
    "random numbers": calls("torch.ops.aten.rand.default", argument("size", as_ints=[1])),
    "a graph inside": calls("torch.ops.higher_order.cond"),
    "a wrapped graph": calls("torch.ops.higher_order.wrap_with_set_grad_enabled"),
    "another library": calls("torch.ops.quantized_decomposed.quantize_per_tensor.default"),
    "prims": calls("torch.ops.prims.fma.default"),
    "a power of sizes": calls("_operator.pow"),
    "a shift of sizes": calls("_operator.lshift"),
    "a call by name": calls("_operator.methodcaller"),
    "a factorial": calls("math.factorial"),
    "code": calls("torch.ops.aten.ones.default.__init__.__globals__"),
    "two in one": calls("torch.ops.aten.ones.default\ntorch.ops.aten.from_file.default"),
    "nothing": calls(""),
    "a terabyte": calls(
        "torch.ops.aten.ones.default", argument("size", as_ints=[1 << 20, 1 << 20])
    ),
    "a tensor of tensors": calls("torch.ops.aten.arange.default", argument("end", as_int=1 << 40)),
    "a number without end": calls(
        "torch.ops.aten.full.default", argument("fill_value", as_int=1 << 100)
    ),
    "a graph as argument": calls(
        "torch.ops.aten.ones.default", argument("size", as_graph={"name": "g", "graph": {}})
    ),
    "an object as argument": calls(
        "torch.ops.aten.ones.default", argument("size", as_custom_obj={"name": "o"})
    ),
    "dropout at work": edited(
        lambda d: node_of(d, "dropout")["inputs"][2].update(arg={"as_bool": True})
    ),
    "statistics that change": edited(
        lambda d: next(
            each for each in node_of(d, "batch_norm")["inputs"] if each["name"] == "training"
        ).update(arg={"as_bool": True})
    ),
    "statistics by a symbol": edited(
        lambda d: next(
            each for each in node_of(d, "batch_norm")["inputs"] if each["name"] == "training"
        ).update(arg={"as_sym_bool": {"as_name": "x"}})
    ),
    "a buffer that is put out": edited(
        lambda d: d["graph_module"]["signature"]["output_specs"].append(
            {"buffer_mutation": {"arg": {"name": "add"}, "buffer_name": "scale"}}
        )
    ),
    "an object as input": edited(
        lambda d: d["graph_module"]["signature"]["input_specs"].append(
            {"custom_obj": {"arg": {"name": "x", "class_fqn": "y"}}}
        )
    ),
    "objects": edited(
        lambda d: d["graph_module"]["graph"].update(
            custom_obj_values={"o": {"name": "o", "class_fqn": "evil"}}
        )
    ),
    "very many nodes": edited(
        lambda d: d["graph_module"]["graph"].update(
            nodes=d["graph_module"]["graph"]["nodes"] * 20_000
        )
    ),
    "very deep nesting": lambda m: m.update({GRAPH: b"[" * 100_000 + b"]" * 100_000}),
    "no object": lambda m: m.update({GRAPH: b"[]"}),
    "nodes that are none": edited(lambda d: d["graph_module"]["graph"].update(nodes=[1])),
}
SIZES = {
    "a tower of powers": "Mod(9**9**9, 7)",
    "a tower of calls": "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
    "powers of powers": f"{'Pow(' * 30}{SYMBOL}{', Integer(4))' * 30}",
    "a large power": f"Pow({SYMBOL}, Integer(1000000000))",
    "a shift": "1 << 9999999999",
    "a large number": f"Integer({'9' * 4000})",
    "a product without end": f"Mul({', '.join(['Integer(9223372036854775807)'] * 40)})",
    "a sum without end": f"Add({', '.join([SYMBOL] * 5000)})",
    "a deep tree": f"{'Max(' * 3000}{SYMBOL}{')' * 3000}",
    "deep brackets": f"{'(' * 5000}1{')' * 5000}",
    "a factor of a large sum": f"Mod({'*'.join(f'(a{n}+b{n})' for n in range(90))}, 7)",
    "very many symbols": f"Add({', '.join(f'Symbol({chr(39)}s{n}{chr(39)})' for n in range(99))})",
    "a factorial": f"factorial({SYMBOL})",
    "a symbol that is code": "Symbol('x.__class__')",
    "an assumption that is code": "Symbol('x', positive=exit())",
    "an integer that is text": "Integer('9**9**9')",
    "a float that is large": "Float('1e999999999', precision=53)",
    "a float that is precise": "Float('1.0', precision=999999999)",
    "a lambda": "(lambda: 1)()",
    "a comprehension": "[x for x in ().__class__.__bases__]",
    "an attribute": "x.__class__",
    "a walrus": "(x := 1)",
    "a text": "'9**9**9'",
    "stars": "Add(*[1, 2])",
    "an f-string": "f'{exit()}'",
    "a nul": "1\0",
}
