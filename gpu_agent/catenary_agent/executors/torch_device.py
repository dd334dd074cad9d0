"""PyTorch on CUDA: the form of a part that is fastest there, and its runs as CUDA graphs.

A part of a vision model launches some two hundred kernels of a few microseconds each, so run as it
was exported it takes the time of its launches, whatever the device and the batch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from catenary_agent.devices.cuda_graphs import GraphRecorder
from catenary_services.log import get_logger

MOST_DISTANCE = 1e-2
"""The relative distance (L2) of a form's outputs from those of the part as it was exported. The
tensor cores that PyTorch lets convolutions use for float32 round factors to as many bits as float16
has."""
_MOST_GRAPHS = 32
"""The most graphs, one for each shapes of inputs; what comes after them runs without."""
_MOST_MET = 256
_MET_BEFORE_CAPTURE = 2
"""Sizes that are seen once, such as lengths of texts, are not worth a capture."""
_IMAGE_DIMENSIONS = 4
_TRIALS = 10

_log = get_logger("catenary_agent.executors")
Shapes = tuple[torch.Size, ...]


class PartForm(StrEnum):
    """The forms in which a part can run."""

    EXPORTED = "exported"
    CHANNELS_LAST = "channels_last"
    """Images and the weights of convolutions have their channels innermost."""
    HALF = "half"
    """Convolutions and products in float16, their weights too."""
    HALF_CHANNELS_LAST = "half_channels_last"

    @property
    def is_half(self) -> bool:
        """Whether values are rounded to float16."""
        return self in (PartForm.HALF, PartForm.HALF_CHANNELS_LAST)

    @property
    def has_channels_last(self) -> bool:
        """Whether images and weights of convolutions have their channels innermost."""
        return self in (PartForm.CHANNELS_LAST, PartForm.HALF_CHANNELS_LAST)

    @property
    def in_float32(self) -> PartForm:
        """The form with the same order of channels that rounds nothing."""
        return PartForm.EXPORTED if self is PartForm.HALF else PartForm.CHANNELS_LAST


@dataclass(frozen=True, slots=True)
class PartTypes:
    """The datatypes at the ends of a part."""

    inputs: tuple[torch.dtype, ...]
    """The datatypes that the program was exported for."""
    outputs: tuple[torch.dtype, ...]
    """The datatypes that leave: those of the wire."""


class FormedPart:
    """A part's program on a device, in one of its forms."""

    def __init__(self, model: torch.nn.Module, types: PartTypes, device: torch.device) -> None:
        """Takes a program whose weights are on the device, in the form of its export."""
        self.form = PartForm.EXPORTED
        self.device = device
        self._model, self._types = model, types
        self._weights = [*model.parameters(), *model.buffers()]
        self._exported = [weight.dtype for weight in self._weights]

    @property
    def nbytes(self) -> int:
        """The bytes of the weights."""
        return sum(weight.nbytes for weight in self._weights)

    @property
    def has_images(self) -> bool:
        """Whether some weight can have its channels innermost."""
        return any(weight.dim() == _IMAGE_DIMENSIONS for weight in self._weights)

    def weights(self) -> list[torch.Tensor]:
        """Returns the weights of the present form, for `take`."""
        return [weight.data for weight in self._weights]

    def take(self, form: PartForm, weights: Sequence[torch.Tensor]) -> None:
        """Brings weights into a form. Their values are rounded only if it `is_half`."""
        for weight, dtype, given in zip(self._weights, self._exported, weights, strict=True):
            # A vector, such as a bias or a mean, is neither large nor a factor of a product.
            half = form.is_half and dtype == torch.float32 and given.dim() > 1
            weight.data = _laid_out(given.to(torch.float16 if half else dtype), form)
        self.form = form

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs, contiguous and in their datatypes, for inputs of any on the device.

        A form that `is_half` appends a boolean: whether every value is finite.
        """
        half = self.form.is_half
        with torch.inference_mode(), self._rounding() if half else contextlib.nullcontext():
            moved = [
                _laid_out(tensor.to(dtype), self.form)
                for tensor, dtype in zip(inputs, self._types.inputs, strict=True)
            ]
            made: Sequence[torch.Tensor] = self._model(*moved)
            outputs = [
                tensor.to(dtype).contiguous()
                for tensor, dtype in zip(made, self._types.outputs, strict=True)
            ]
            if half:
                outputs.append(torch.stack([each.isfinite().all() for each in outputs]).all())
        return outputs

    def _rounding(self) -> torch.autocast:
        # What it casts, it would keep until the end: a graph must cast at every replay.
        return torch.autocast(self.device.type, torch.float16, cache_enabled=False)


class PartRuns:
    """Runs of a part on a device, as graphs where the shapes of its inputs come again."""

    def __init__(self, part: FormedPart) -> None:
        """Holds a part, of which nothing is captured before its second run."""
        self._part = part
        self._recorder = GraphRecorder(part.device)
        self._graphs: dict[Shapes, _PartGraph] = {}
        self._met: dict[Shapes, int] = {}
        self._broken = False

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs on the device, valid until the next run, for inputs on the host."""
        outputs = self._run(inputs)
        if not self._part.form.is_half:
            return outputs
        *outputs, finite = outputs
        return outputs if bool(finite) else self._in_float32(inputs, outputs)

    def _in_float32(
        self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns the right outputs for inputs of which float16 made some that are not finite.

        If float32 makes finite ones, a value was too large for float16, and the part stays in
        float32. Otherwise it is the inputs that ask for them, and nothing changes.
        """
        weights, half = self._part.weights(), self._part.form
        self._part.take(half.in_float32, weights)
        exact = self._part(_moved(inputs, self._part.device))
        if not all(bool(each.isfinite().all()) for each in exact):
            self._part.take(half, weights)  # at the addresses that graphs know
            return outputs
        _log.warning("float16_given_up", reason="a value is too large for float16")
        self._graphs.clear()
        self._recorder = GraphRecorder(self._part.device)
        return exact

    def _run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shapes = tuple(tensor.shape for tensor in inputs)
        graph = self._graphs.get(shapes) or self._captured(shapes, inputs)
        if graph is None:
            return self._part(_moved(inputs, self._part.device))
        return graph.run(inputs)

    def _captured(self, shapes: Shapes, inputs: Sequence[torch.Tensor]) -> _PartGraph | None:
        """Returns a new graph, if these shapes have been met often enough for one."""
        if self._broken or len(self._graphs) >= _MOST_GRAPHS:
            return None
        if len(self._met) >= _MOST_MET:
            self._met.clear()
        self._met[shapes] = met = self._met.get(shapes, 0) + 1
        if met < _MET_BEFORE_CAPTURE:
            return None
        graph = _PartGraph(_moved(inputs, self._part.device), self._part)
        try:
            graph.replay = self._recorder.record(graph.launch)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, too
            self._broken = True
            reason = str(error).splitlines()[0][:200]
            _log.warning("part_graphs_unavailable", shapes=str(shapes), reason=reason)
            return None
        self._graphs[shapes] = graph
        return graph


class _PartGraph:
    """A graph of a part with the tensors that it knows by address."""

    def __init__(self, inputs: list[torch.Tensor], part: FormedPart) -> None:
        self.inputs = inputs
        self.replay: Callable[[], object] = self.launch
        self._part = part
        self._outputs: list[torch.Tensor] = []

    def launch(self) -> None:
        self._outputs = self._part(self.inputs)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.replay()
        return list(self._outputs)


def fastest_form(part: FormedPart, inputs: Sequence[torch.Tensor]) -> PartForm:
    """Brings a part into the form that is fastest and computes the same, and returns which it is.

    Args:
        part: A part as it was exported.
        inputs: An example on the host.
    """
    weights, given = part.weights(), _moved(inputs, part.device)
    wanted = [each.clone() for each in part(given)]
    times: dict[PartForm, float] = {}
    for form in PartForm:
        if form.has_channels_last and not part.has_images:
            continue
        try:
            part.take(form, weights)
            distance = _distance(part(given), wanted)
            if distance <= MOST_DISTANCE:
                times[form] = _seconds(part, inputs)
        except RuntimeError as error:  # an operation that has no kernel for the form, or no memory
            reason = str(error).splitlines()[0][:200]
            _log.info("form_unavailable", form=form, reason=reason)
        else:
            _log.debug("form", form=form, distance=distance, seconds=times.get(form))
    chosen = min(times, key=lambda form: times[form], default=PartForm.EXPORTED)
    part.take(chosen, weights)
    return chosen


def _distance(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Returns the largest relative distance of an output; infinite if one is not finite."""
    most = 0.0
    for ours, theirs in zip(made, wanted, strict=False):  # float16 says in one more what is finite
        away = float((ours.double() - theirs.double()).norm())
        distance = away / max(float(theirs.double().norm()), 1e-30) if away else 0.0
        most = max(most, math.inf if math.isnan(distance) else distance)
    return most


def _seconds(part: FormedPart, inputs: Sequence[torch.Tensor]) -> float:
    """Returns the shortest time of a run."""
    runs, times = PartRuns(part), []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        for output in runs.run(inputs):
            output.cpu()  # waits for the device
        times.append(time.perf_counter() - began)
    return min(times)


def _moved(inputs: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in inputs]


def _laid_out(tensor: Any, form: PartForm) -> Any:
    if not form.has_channels_last or tensor.dim() != _IMAGE_DIMENSIONS:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
