"""Networks that PyTorch's exporters write: as ONNX in two ways, and as exported programs."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from catenary_services.models.model_repository import ModelRepository
from compared_models.graphs import KEY, Answers, Arrays, GraphCase

nn: Any = torch.nn


class Pictures(nn.Module):  # type: ignore[misc]
    """A convolution network on pictures whose channels come last, with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU())
            for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, pictures: Any) -> Any:
        x = pictures.permute(0, 3, 1, 2)
        for layer in self.layers:
            x = layer(x)
        features = x.mean((2, 3))
        return self.head(features), features


class Pairs(nn.Module):  # type: ignore[misc]
    """Attention over sequences of any length, with a mask as the second input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)
        )

    def forward(self, ids: Any, mask: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask == 0)
        return x


class Sequences(nn.Module):  # type: ignore[misc]
    """Attention over sequences of any length, with positions and a mask made from their size."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(50, 16))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Any, weights: Any) -> Any:
        length = x.shape[1]
        h = (x + self.positions[:length]) * weights.unsqueeze(-1)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        for layer in self.layers:
            q = layer(h).reshape(x.shape[0], length, 2, 8).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(q, q, q, mask)
            h = h + attended.transpose(1, 2).reshape(x.shape[0], length, 16)
        return h


class Halving(nn.Module):  # type: ignore[misc]
    """Convolutions that halve pictures of any size, and a flattening by the size that is left."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Any) -> Any:
        h = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        h = torch.relu(self.second(h))
        return h.reshape(h.shape[0], 8, h.shape[2] * h.shape[3]).transpose(1, 2)


class Running(nn.Module):  # type: ignore[misc]
    """Sums over steps of time, which come first; the batch is the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(torch.cumsum(x, 0)))
        return x


class Numbers(nn.Module):  # type: ignore[misc]
    """Layers in float16, of whole numbers of 32 bits and of float16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.half()

    def forward(self, ids: Any, x: Any) -> Any:
        h = self.embedding(ids) + x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


@dataclass(frozen=True, slots=True)
class Net:
    """A network, how it is exported, and the sizes of requests."""

    make: Callable[[], Any]
    names: tuple[str, ...]
    example: tuple[int, ...]
    """The sizes with which it is exported."""
    requests: tuple[tuple[int, ...], ...]
    inputs: Callable[..., tuple[np.ndarray, ...]]
    """Makes the inputs of given sizes."""
    free: tuple[dict[int, str], ...] | None
    """The names of the sizes of each input that are free."""
    batched: bool = True


def _pictures(rows: int, size: int = 32) -> tuple[np.ndarray, ...]:
    values = np.random.default_rng(7).normal(size=(rows, size, size, 3))
    return (values.astype(np.float32),)


def _tokens(rows: int, length: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(7)
    mask = np.arange(length)[None] < generator.integers(1, length + 1, (rows, 1))
    return generator.integers(0, 100, (rows, length)), mask.astype(np.int64)


def _steps(rows: int, length: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(7)
    x = generator.standard_normal((rows, length, 16)).astype(np.float32)
    return x, generator.random((rows, length)).astype(np.float32)


def _floats(*shape: int) -> tuple[np.ndarray, ...]:
    return (np.random.default_rng(7).standard_normal(shape).astype(np.float32),)


def _numbers(rows: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(7)
    x = generator.standard_normal((rows, 16)).astype(np.float16)
    return generator.integers(0, 100, rows).astype(np.int32), x


_ROWS = {0: "batch"}
_LONG = {0: "batch", 1: "length"}
NETS = {
    "pictures, channels last": Net(
        Pictures, ("pictures",), (2,), ((3,), (1,)), _pictures, (_ROWS,)
    ),
    "pictures, all sizes given": Net(
        Pictures, ("pictures",), (2,), ((2,),), _pictures, None, batched=False
    ),
    "pictures, width and height free": Net(
        Halving,
        ("x",),
        (2, 3, 32, 48),
        ((3, 3, 20, 36), (1, 3, 16, 50)),
        _floats,
        ({0: "batch", 2: "height", 3: "width"},),
    ),
    "ids and mask, length free": Net(
        Pairs, ("ids", "mask"), (2, 6), ((3, 9), (1, 5)), _tokens, (_LONG, _LONG)
    ),
    "positions and a mask by length": Net(
        Sequences, ("x", "weights"), (2, 6), ((3, 9), (1, 4)), _steps, (_LONG, _LONG)
    ),
    "steps of time first": Net(
        Running,
        ("x",),
        (5, 2, 16),
        ((7, 3, 16), (1, 1, 16)),
        _floats,
        ({0: "time", 1: "batch"},),
        batched=False,
    ),
    "INT32 and FP16": Net(Numbers, ("ids", "x"), (2,), ((3,), (1,)), _numbers, (_ROWS, _ROWS)),
}
"""By what is special of them, as docs/families.md has it."""
_MASKED, _TIME = "ids and mask, length free", "steps of time first"
_EXPORTERS = {"ONNX, by dynamo=True": True, "ONNX, by dynamo=False": False}
_SLOW = ("pictures, all sizes given", "INT32 and FP16", "pictures, width and height free")


def onnx_cases() -> dict[tuple[str, str], GraphCase]:
    return {
        (form, name): GraphCase(
            partial(_write_onnx, net, dynamo),
            partial(_requests, net),
            net.batched,
            is_slow=dynamo and name in _SLOW,
        )
        for form, dynamo in _EXPORTERS.items()
        for name, net in NETS.items()
        if (form, name) not in REFUSED
    }


def program_cases() -> dict[tuple[str, str], GraphCase]:
    return {
        ("torch.export", name): GraphCase(
            partial(_write_program, net), partial(_requests, net), net.batched, "pytorch_exported"
        )
        for name, net in NETS.items()
        # Whether PyTorch exports a part of the masked one depends on where it is cut.
        if ("torch.export", name) not in REFUSED and name != _MASKED
    }


def _requests(net: Net) -> list[Arrays]:
    return [dict(zip(net.names, net.inputs(*sizes), strict=True)) for sizes in net.requests]


def _made(net: Net) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    module = net.make().eval()
    return module, tuple(torch.from_numpy(each) for each in net.inputs(*net.example))


def _answers(net: Net, module: Any) -> Answers:
    def answers(inputs: Arrays) -> list[np.ndarray]:
        found = module(*(torch.from_numpy(inputs[name]) for name in net.names))
        return [each.detach().numpy() for each in (found if isinstance(found, tuple) else (found,))]

    return answers


def _write_onnx(net: Net, dynamo: bool, repository: ModelRepository) -> Answers:
    module, example = _made(net)
    options: dict[str, Any] = {"input_names": list(net.names)}
    if dynamo:
        options |= {"dynamic_shapes": net.free}
    elif net.free is not None:
        options |= {"dynamic_axes": dict(zip(net.names, net.free, strict=True))}
    export(repository, module, example, dynamo=dynamo, **options)
    return _answers(net, module)


def export(
    repository: ModelRepository, module: Any, arguments: Sequence[Any], **options: Any
) -> Path:
    """Exports a module with PyTorch's own defaults for all that `options` do not name."""
    file = repository.model_file(KEY)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), tuple(arguments), str(file), verbose=False, **{"dynamo": True} | options
        )
    return file


def _write_program(net: Net, repository: ModelRepository) -> Answers:
    module, example = _made(net)
    free = net.free and tuple(dict.fromkeys(each, torch.export.Dim.AUTO) for each in net.free)
    program = torch.export.export(module, example, dynamic_shapes=free, strict=False)
    torch.export.save(program, repository.model_file(KEY))
    return _answers(net, module)


# ---- what is refused ----


class Remembers(nn.Module):  # type: ignore[misc]
    """Gives every request what the one before sent: through a view, so that no name tells."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3, 8, 8))

    def forward(self, x: Any) -> Any:
        before = self.kept.clone()
        self.kept.view(-1).mul_(0.0).add_(x[0].reshape(-1))
        return x + before


class ChangesItsInput(nn.Module):  # type: ignore[misc]
    """Doubles its input in place."""

    def forward(self, x: Any) -> Any:
        x.reshape(-1).mul_(2.0)
        return x + 1


class Dices(nn.Module):  # type: ignore[misc]
    """Answers with random numbers."""

    def forward(self, x: Any) -> Any:
        return x + torch.rand_like(x)


def _export_program(make: Callable[[], Any], repository: ModelRepository) -> None:
    free = ({0: torch.export.Dim.AUTO},)
    program = torch.export.export(
        make().eval(), (torch.zeros(2, 3, 8, 8),), dynamic_shapes=free, strict=False
    )
    torch.export.save(program, repository.model_file(KEY))


def _no_archive(repository: ModelRepository) -> None:
    repository.model_file(KEY).write_bytes(b"PK not an archive")


REFUSED: dict[tuple[str, str], Callable[[ModelRepository], object]] = {
    ("torch.export", "a request is remembered"): partial(_export_program, Remembers),
    ("torch.export", "an input is changed"): partial(_export_program, ChangesItsInput),
    ("torch.export", "random numbers"): partial(_export_program, Dices),
    ("torch.export", "no archive"): _no_archive,
    # PyTorch takes the one step of the example for the only size.
    ("torch.export", _TIME): partial(_write_program, NETS[_TIME]),
    # The exporter has written the sizes of the example into the file.
    ("ONNX, by dynamo=False", _MASKED): partial(_write_onnx, NETS[_MASKED], False),
}
"""By the form of the files and what is special of the model."""
