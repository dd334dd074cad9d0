"""Parts on a device: forms that compute the same, and runs whose shapes come again.

Without a CUDA device nothing is captured: what would be replayed runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch.export.passes import move_to_device_pass

from catenary_agent.devices.cuda_graphs import GraphRecorder
from catenary_agent.executors import torch_device
from catenary_agent.executors.torch_device import (
    MOST_DISTANCE,
    FormedPart,
    PartForm,
    PartRuns,
    PartTypes,
    fastest_form,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Convolutions behind a gain, a mean over the image, and two outputs."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.second = torch.nn.Conv2d(8, 8, 3, groups=8)
        self.last = torch.nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        features = self.second(torch.nn.functional.relu6(self.norm(self.first(images))))
        scores = self.last(features.mean((2, 3)) * self.gain)
        return [scores, features]


@pytest.fixture(autouse=True)
def recorded() -> Iterator[list[Callable[[], object]]]:
    """Returns what was captured; without a device that is run as it is."""
    record, made = GraphRecorder.record, []

    def kept(self: GraphRecorder, run: Callable[[], object]) -> Callable[[], object]:
        made.append(run)
        if DEVICE.type == "cuda":
            return record(self, run)
        run()
        return run

    with mock.patch.object(GraphRecorder, "record", kept):
        yield made


def exported(gain: float = 1.0, features: torch.dtype = torch.float32) -> FormedPart:
    torch.manual_seed(3)
    program = torch.export.export(
        Net(gain).eval(),
        (torch.zeros(2, 3, 12, 12),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        strict=False,
    )
    if DEVICE.type == "cuda":
        program = move_to_device_pass(program, DEVICE)
    types = PartTypes((torch.float32,), (torch.float32, features))
    return FormedPart(program.module(), types, DEVICE)


def images(rows: int, seed: int = 0) -> list[torch.Tensor]:
    return [torch.rand(rows, 3, 12, 12, generator=torch.Generator().manual_seed(seed))]


def on_host(made: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.cpu().clone() for each in made]


def distance(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((made.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("form", list(PartForm))
@pytest.mark.parametrize("features", [torch.float32, torch.float16])
def test_every_form_computes_the_same_in_the_datatypes_of_the_wire(
    form: PartForm, features: torch.dtype
) -> None:
    part = exported(features=features)
    wanted = on_host(PartRuns(part).run(images(3)))
    part.take(form, part.weights())
    runs = PartRuns(part)
    for _ in range(3):  # the first is eager, the second captured, the third replayed
        made = on_host(runs.run(images(3)))
        assert [each.dtype for each in made] == [torch.float32, features]
        assert all(each.is_contiguous() for each in made)
        for ours, theirs in zip(made, wanted, strict=True):
            assert distance(ours, theirs) <= MOST_DISTANCE


def test_half_rounds_factors_of_products_and_nothing_else() -> None:
    part = exported()
    weights = part.weights()
    part.take(PartForm.HALF, weights)
    for ours, given in zip(part.weights(), weights, strict=True):
        rounded = given.dim() > 1 and given.dtype == torch.float32
        assert ours.dtype == (torch.float16 if rounded else given.dtype)
    part.take(PartForm.EXPORTED, weights)
    assert all(torch.equal(a, b) for a, b in zip(part.weights(), weights, strict=True))


def test_the_fastest_form_is_taken_among_those_that_compute_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = dict(zip(PartForm, (4.0, 3.0, 2.0, 1.0), strict=True))
    monkeypatch.setattr(torch_device, "_seconds", lambda part, *_: times[part.form])
    part = exported()
    assert fastest_form(part, images(4)) is PartForm.HALF_CHANNELS_LAST is part.form
    times[PartForm.HALF] = 0.9
    assert fastest_form(exported(), images(4)) is PartForm.HALF
    # Products of some hundred thousand do not fit into float16.
    large = exported(gain=1e7)
    assert fastest_form(large, images(4)) is PartForm.CHANNELS_LAST
    assert all(weight.dtype != torch.float16 for weight in large.weights())
    times[PartForm.EXPORTED] = 0.5
    assert fastest_form(exported(), images(4)) is PartForm.EXPORTED


def test_a_form_that_a_device_cannot_run_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    part = exported()
    monkeypatch.setattr(part, "_rounding", mock.Mock(side_effect=RuntimeError("no kernel")))
    weights = part.weights()
    assert not fastest_form(part, images(4)).is_half
    for ours, given in zip(part.weights(), weights, strict=True):
        assert ours.dtype == given.dtype


@pytest.mark.parametrize("form", [PartForm.HALF, PartForm.HALF_CHANNELS_LAST])
@pytest.mark.parametrize("before", [0, 4])
def test_a_value_too_large_for_float16_ends_half_precision_and_costs_no_answer(
    before: int, form: PartForm
) -> None:
    part = exported(gain=1e3)
    part.take(form, part.weights())
    runs = PartRuns(part)
    for _ in range(before):
        assert all(bool(each.isfinite().all()) for each in runs.run(images(2)))
        assert part.form is form
    large = [images(2)[0] * 1e6]
    made = on_host(runs.run(large))
    assert part.form is form.in_float32
    for ours, theirs in zip(made, exported(gain=1e3)([large[0].to(DEVICE)]), strict=True):
        assert distance(ours, theirs.cpu()) <= MOST_DISTANCE


def test_inputs_that_are_not_finite_change_nothing_for_others() -> None:
    part = exported()
    part.take(PartForm.HALF, part.weights())
    runs = PartRuns(part)
    wanted = [on_host(runs.run(images(2))) for _ in range(3)][-1]
    assert bool(on_host(runs.run([torch.full((2, 3, 12, 12), float("nan"))]))[0].isnan().all())
    assert part.form is PartForm.HALF
    for ours, theirs in zip(runs.run(images(2)), wanted, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_shapes_that_come_again_are_captured_and_keep_their_answers_apart(
    recorded: list[Callable[[], object]],
) -> None:
    part = exported()
    runs = PartRuns(part)
    for seed in range(4):
        for rows in (1, 2, 5):
            given = images(rows, seed)
            eager = on_host(part([each.to(DEVICE) for each in given]))
            for ours, theirs in zip(runs.run(given), eager, strict=True):
                assert distance(ours.cpu(), theirs) < 1e-3
    assert len(recorded) == 3


def test_graphs_are_bounded_in_number(
    monkeypatch: pytest.MonkeyPatch, recorded: list[Callable[[], object]]
) -> None:
    monkeypatch.setattr(torch_device, "_MOST_GRAPHS", 2)
    monkeypatch.setattr(torch_device, "_MOST_MET", 3)
    runs = PartRuns(exported())
    for rows in (*range(1, 8), *range(1, 8), 7, 7, 6, 6, 5, 5):
        assert runs.run(images(rows))[0].shape == (rows, 5)
        assert len(runs._met) <= 3
    assert len(recorded) == 2


def test_a_part_that_cannot_be_captured_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = mock.Mock(side_effect=RuntimeError("operation not permitted when capturing"))
    monkeypatch.setattr(GraphRecorder, "record", refused)
    runs = PartRuns(exported())
    answers = [on_host(runs.run(images(2)))[0] for _ in range(5)]
    assert refused.call_count == 1
    assert all(distance(each, answers[0]) < 1e-3 for each in answers)
