from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.domain.ids import ModelKey
from catenary_services.domain.profile import (
    DeviceProfile,
    ModelProfile,
    merged,
    parse_profile,
    profile_document,
)
from catenary_services.errors import InvalidInput

KEY = ModelKey("net", "1")


def device(
    name: str = "cpu", level: int = 1, *, estimated: bool = False, scale: int = 1
) -> DeviceProfile:
    p50 = ((100 * scale, 160 * scale, 300 * scale), (50 * scale, 60 * scale, 90 * scale))
    p95 = tuple(tuple(2 * each for each in row) for row in p50)
    return DeviceProfile(name, level, estimated, "made up", (1, 2, 5), p50, p95)


def profile(*devices: DeviceProfile) -> ModelProfile:
    return ModelProfile(KEY, "abc", 2, (0, 7, 0), (1000, 2000), devices, (("x",), ("a",), ("y",)))


def test_a_document_survives_json_and_says_what_it_is() -> None:
    made = profile(device(), device("T4", 2, estimated=True))
    document = json.loads(json.dumps(profile_document(made)))
    assert (document["format"], document["version"]) == ("catenary-profile", 1)
    assert document["model_hash"] == "abc"
    assert [entry["estimated"] for entry in document["devices"]] == [False, True]
    assert parse_profile(document) == made


def test_times_of_a_range_are_sums_interpolated_between_measured_batches() -> None:
    made = profile(device())
    assert made.compute_ns("cpu", 1, 0, 1) == (100, 160, 207, 253, 300)
    assert made.compute_ns("cpu", 1, 0, 2) == (150, 220, 277, 333, 390)


def test_a_larger_batch_never_takes_less_time() -> None:
    odd = replace(device(), p50_ns=((100, 80, 90), (1, 1, 1)))
    assert profile(odd).compute_ns("cpu", 1, 0, 2) == (101,) * 5


@given(
    st.lists(st.integers(2, 40), unique=True, max_size=5).map(lambda sizes: (1, *sorted(sizes))),
    st.randoms(use_true_random=False),
)
def test_measured_sizes_keep_their_times_and_everything_between_is_monotone(
    sizes: tuple[int, ...], random: object
) -> None:
    times = tuple(sorted(random.randrange(10**9) for _ in sizes))  # type: ignore[attr-defined]
    made = DeviceProfile("c", 1, False, "", sizes, (times,), (times,)).compute_ns(0, 1)
    assert len(made) == sizes[-1]
    assert [made[size - 1] for size in sizes] == list(times)
    assert list(made) == sorted(made)
    exact = np.interp(range(1, sizes[-1] + 1), sizes, times)
    np.testing.assert_allclose(made, exact, atol=1)


def test_unknown_classes_levels_and_ranges_are_refused_by_name() -> None:
    made = profile(device())
    assert made.device("cpu", 2) is None
    with pytest.raises(InvalidInput, match="'cpu' with 2 virtual GPUs per device"):
        made.compute_ns("cpu", 2, 0, 1)
    for first, last in ((1, 1), (-1, 1), (0, 3)):
        with pytest.raises(InvalidInput, match="no range of 2 blocks"):
            made.compute_ns("cpu", 1, first, last)


def test_levels_of_a_class_ascend() -> None:
    made = profile(device(level=4), device(level=1), device("L4", 2))
    assert made.levels("cpu") == (1, 4)
    assert made.levels("P4") == ()


def test_merging_adds_devices_and_the_newer_measurement_counts() -> None:
    old, new = profile(device(), device("L4", 2)), profile(device(scale=3), device("T4"))
    both = merged(old, new)
    assert [each.identity for each in both.devices] == [("L4", 2), ("T4", 1), ("cpu", 1)]
    assert both.device("cpu", 1) == device(scale=3)
    assert merged(old, old) == old.with_devices(())


def test_an_estimate_never_replaces_a_measurement() -> None:
    guess = device("L4", estimated=True, scale=9)
    assert merged(profile(device("L4")), profile(guess)).device("L4", 1) == device("L4")
    assert merged(profile(guess), profile(device("L4"))).device("L4", 1) == device("L4")


@pytest.mark.parametrize(
    "change",
    [
        {"model_hash": "other"},
        {"blocks": 3},
        {"cut_row_bytes": (0, 8, 0)},
        {"cut_tensors": (("x",), ("b",), ("y",))},
    ],
)
def test_profiles_of_another_model_are_not_mixed(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(change))):
        merged(profile(device()), replace(profile(device()), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("format",), "profile", "profile.format"),
        (("version",), 2, "profile.version"),
        (("version",), True, "profile.version"),
        (("model_hash",), None, "profile.model_hash"),
        (("blocks",), 0, "profile.blocks"),
        (("blocks",), 3, "profile.cut_row_bytes"),
        (("cut_row_bytes",), [0, -1, 0], "profile.cut_row_bytes[1]"),
        (("cut_row_bytes",), [5, 7, 0], "profile.cut_row_bytes"),
        (("block_weight_bytes",), [1], "profile.block_weight_bytes"),
        (("block_weight_bytes",), [1, 2.5], "profile.block_weight_bytes[1]"),
        (("cut_tensors",), [["x"], "a", ["y"]], "profile.cut_tensors[1]"),
        (("devices", 0, "virtual_level"), 0, "profile.devices[0].virtual_level"),
        (("devices", 0, "estimated"), 1, "profile.devices[0].estimated"),
        (("devices", 0, "batch_sizes"), [2, 4, 8], "profile.devices[0].batch_sizes"),
        (("devices", 0, "batch_sizes"), [1, 5, 5], "profile.devices[0].batch_sizes"),
        (("devices", 0, "p50_ns"), [[1, 2, 3]], "profile.devices[0].p50_ns"),
        (("devices", 0, "p95_ns", 1), [1, 2], "profile.devices[0].p95_ns[1]"),
        (("devices", 0, "p95_ns", 1, 2), "3", "profile.devices[0].p95_ns[1][2]"),
        (("devices", 0, "p95_ns", 1), 7, "profile.devices[0].p95_ns[1]"),
        (("devices", 1, "device_class"), "cpu", "profile.devices"),
        (("devices", 1), "cpu", "profile.devices[1]"),
    ],
)
def test_a_wrong_document_is_refused_and_the_place_named(
    path: tuple[str | int, ...], value: object, named: str
) -> None:
    document = copy.deepcopy(profile_document(profile(device(), device("L4"))))
    inner: object = document
    for step in path[:-1]:
        inner = inner[step]  # type: ignore[index]
    inner[path[-1]] = value  # type: ignore[index]
    with pytest.raises(InvalidInput) as caught:
        parse_profile(document)
    assert caught.value.field == named


def test_a_missing_key_is_named() -> None:
    document = profile_document(profile(device()))
    del document["devices"][0]["source"]
    with pytest.raises(InvalidInput, match=r"profile\.devices\[0\]\.source: is missing"):
        parse_profile(document)
