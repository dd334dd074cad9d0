"""Messages of the Admin service as JSON values."""

from __future__ import annotations

import json

import pytest

from catenary_gateway.dashboard import converters
from catenary_gateway.dashboard.sources import WINDOWS_S, window_of
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import InvalidInput
from scheduling_cases import large_cluster


def test_every_field_keeps_its_name_and_value() -> None:
    answer = large_cluster.status()
    found = json.loads(json.dumps(converters.values_of(answer)))
    assert set(found) == set(admin_pb2.GetStatusResponse.DESCRIPTOR.fields_by_name)
    assert found["agents"][3]["agent_id"] == answer.agents[3].agent_id
    assert found["agents"][3]["utilisation_ratio"] == answer.agents[3].utilisation_ratio
    assert found["models"][4]["chains"][6]["hops"][2]["last_block"] == 30
    assert found["models"][0]["pipelines_served"][0]["stages"][1]["agent_ids"] == [
        "agent-2",
        "agent-3",
    ]


def test_an_absent_message_is_null_and_an_empty_list_is_a_list() -> None:
    found = converters.values_of(admin_pb2.GetPlanResponse(plan_id="p"))
    assert found["last_switch"] is None
    assert found["promises"] == []


def test_numbers_no_browser_can_count_to_are_text() -> None:
    session = admin_pb2.SessionStatus(session_id=2**63 + 1, request_number=7, tokens=9)
    found = converters.values_of(session)
    assert found["session_id"] == "9223372036854775809"
    assert found["tokens"] == 9


def test_what_is_no_number_in_json_is_null() -> None:
    agent = admin_pb2.AgentStatus(utilisation_ratio=float("nan"), slowdown_ratio=float("inf"))
    found = converters.values_of(agent)
    assert json.loads(json.dumps(found, allow_nan=False))["utilisation_ratio"] is None
    assert found["slowdown_ratio"] is None


def test_bookings_are_rows_in_microseconds() -> None:
    answer = admin_pb2.GetTimelinesResponse(truncated=True)
    resource = answer.resources.add(kind="gpu", owner="agent-0", group=1)
    resource.bookings.add(
        batch_id=2**62, model="net:1", rows=3, booked_start_ns=-1_500_001, booked_end_ns=250_000
    )
    resource.bookings.add(batch_id=2, model="net:1", real_start_ns=-9_000, real_end_ns=-1_000)
    found = converters.timelines(answer)
    assert found["models"] == ["net:1"]
    assert found["truncated"] is True
    assert found["resources"] == [
        {
            "kind": "gpu",
            "owner": "agent-0",
            "group": 1,
            "bookings": [
                [str(2**62), 0, 3, -1501, 250, 0, 0],
                ["2", 0, 0, 0, 0, -9, -1],
            ],
        }
    ]
    assert len(found["columns"]) == len(found["resources"][0]["bookings"][0])  # type: ignore[index,arg-type]


@pytest.mark.parametrize(("wanted", "window"), [(None, 2), ("1", 2), ("3", 5), ("30", 30)])
def test_windows_are_few_so_that_pages_share_answers(wanted: str | None, window: int) -> None:
    assert window_of(wanted) == window
    assert window in WINDOWS_S


@pytest.mark.parametrize("wanted", ["0", "31", "-1", "2.5", "", "1e1", "٣", "9" * 5000])
def test_other_windows_are_refused(wanted: str) -> None:
    with pytest.raises(InvalidInput):
        window_of(wanted)
