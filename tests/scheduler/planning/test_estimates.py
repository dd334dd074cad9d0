"""Times of classes that nobody measured: data sheets, block tables, and their correction."""

from __future__ import annotations

import pytest

from catenary_scheduler.planning import DeployedModel
from catenary_scheduler.planning.live import completed, corrections, device_groups, origins
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.model import BlockTable, Boundary, KernelCost
from catenary_services.domain.plan import Agent
from catenary_services.domain.profile import DeviceProfile
from catenary_services.domain.tensors import TensorSpec

KEY = ModelKey("m", "1")
MS = 1_000_000
EDGE = Boundary((TensorSpec("x", "FP32", (-1, 8)),), 32)


def deployed(kernels: bool = True) -> DeployedModel:
    kernel = KernelCost(4e9, 1e6, 1e6, dense=True)
    counted = ((kernel,), (kernel, kernel)) if kernels else ()
    table = BlockTable("0" * 64, True, (EDGE,) * 3, (MS, 2 * MS), counted)
    return DeployedModel(KEY, table, 10**9, 8, False)


def agent(name: str, device_class: str) -> Agent:
    return Agent(AgentId(name), device_class, ServerId(name), 10**9, 10**9)


GROUPS = device_groups([agent("new", "L4"), agent("old", "p4"), agent("host", "cpu")])


def test_every_class_has_times_and_data_sheets_tell_which_is_faster() -> None:
    profile = completed(deployed(), None, GROUPS)
    new, old, host = (profile.device(name, 1) for name in ("L4", "p4", "cpu"))
    assert new is not None
    assert old is not None
    assert host is not None
    assert new.compute_ns(0, 2)[0] < old.compute_ns(0, 2)[0]
    assert "data sheet" in old.source
    assert host.compute_ns(0, 2)[:3] == (3 * MS, 6 * MS, 9 * MS)
    assert all(each.estimated for each in profile.devices)


def test_without_counted_kernels_all_are_as_fast_as_the_machine_that_prepared_it() -> None:
    profile = completed(deployed(kernels=False), None, GROUPS)
    assert {d.compute_ns(0, 2)[0] for d in profile.devices} == {3 * MS}


def test_what_was_measured_by_hand_stays() -> None:
    times = ((MS,), (MS,))
    by_hand = DeviceProfile("p4", 1, False, "by hand", (1,), times, times)
    profile = completed(deployed(), None, ()).with_devices([by_hand])
    assert completed(deployed(), profile, GROUPS).device("p4", 1) == by_hand


@pytest.mark.parametrize(("served", "said"), [(False, "at load"), (True, "while serving")])
def test_measurements_correct_estimates_and_are_told(served: bool, said: str) -> None:
    profiled = [(deployed(), completed(deployed(), None, GROUPS))]
    place = (AgentId("host"), PartitionKey(KEY, 0, 1))
    measured = {place: [3 * MS]}
    factors = corrections(profiled, GROUPS, measured)
    assert factors[KEY, "cpu"] == pytest.approx(3.0)  # also of the block that was not measured
    assert factors[KEY, "p4"] == 1.0
    told = origins(profiled, GROUPS, measured, {place} if served else set())
    assert any(line.endswith(f"corrected by what 1 of its agents measured {said}") for line in told)
    assert sum("corrected" in line for line in told) == 1
