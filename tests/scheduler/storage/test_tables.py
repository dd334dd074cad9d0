"""Every table: whatever is in it, the good rest is read, and the bad is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_protos.catenary.v1 import common_pb2
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.stored import StoredCost, StoredGeneration
from catenary_scheduler.storage.values.tables import (
    SHAPES,
    TableShape,
    book_shape,
    cost_text,
    peer_text,
    read_clock,
    read_table,
)
from catenary_services.domain.ids import ResourceId
from scheduling_cases.stored_tables import GOOD

TABLES = sorted(GOOD)


def shape_of(table: str) -> TableShape:
    prefix, _, resource = table.partition(":")
    return book_shape(ResourceId(resource)) if prefix == "book" else SHAPES[RedisTable(table)]


def read(table: str, fields: dict[bytes, bytes]) -> tuple[Any, list[bytes]]:
    records, damaged = read_table(table, shape_of(table), fields)
    assert all(each.why and each.table == table for each in damaged)
    return records, [each.name for each in damaged]


def raw(fields: dict[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in fields.items()}


def test_every_table_is_here() -> None:
    assert {str(table) for table in RedisTable} <= GOOD.keys()
    assert set(SHAPES) == set(RedisTable)


@pytest.mark.parametrize("table", TABLES)
def test_what_the_version_before_wrote_is_read(table: str) -> None:
    records, damaged = read(table, raw(GOOD[table]))
    assert len(records) == len(GOOD[table])
    assert damaged == []


def odd_bytes() -> st.SearchStrategy[bytes]:
    numbers = st.sampled_from(
        [
            "nan",
            "-1",
            "1e999",
            "9" * 5000,
            "18446744073709551616",
            "inf",
            "0x1",
            "-0",
            "1 2 -3",
            "generation -1 2 3 4",
            "generation 1 2 3 4 nan",
            "null",
            "[]",
            "{}",
            "[[[",
            '""',
            "true",
            '{"v": 2}',
            "v2 1 2 3",
            '{"hops": [["a", "b", 1, 0]]}',
            '{"models": []}',
            "[" * 100_000,
            '{"a":' * 2_000,
            '{"slo_ns": -1}',
            '{"max_batch": 1e300}',
            '{"everywhere": 1}',
            "\ud800",
        ]
    )
    return st.one_of(
        st.binary(max_size=60),
        numbers.map(lambda text: text.encode(errors="surrogatepass")),
        st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass")),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["models", "hops", "line", "rows", "v", "slo_ns", "x"]), inner
                )
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    )


@pytest.mark.parametrize("table", TABLES)
@given(data=st.data())
def test_any_bytes_spoil_nothing_else(table: str, data: st.DataObject) -> None:
    fields = raw(GOOD[table])
    victim = data.draw(st.sampled_from(sorted(fields)), "victim")
    extra = data.draw(st.dictionaries(odd_bytes(), odd_bytes(), max_size=3), "extra")
    spoiled = {**extra, **fields, victim: data.draw(odd_bytes(), "value")}
    records, damaged = read(table, spoiled)
    good, _ = read(table, {name: fields[name] for name in fields.keys() - {victim}})
    # Only the names that are added may turn out to be good ones as well, or to mean the same.
    assert good.keys() <= records.keys()
    assert set(damaged) <= {victim, *extra}


@pytest.mark.parametrize("table", TABLES)
@given(data=st.data())
def test_a_renamed_field_spoils_nothing_else(table: str, data: st.DataObject) -> None:
    fields = raw(GOOD[table])
    victim = data.draw(st.sampled_from(sorted(fields)), "victim")
    value = fields.pop(victim)
    records, damaged = read(table, {**fields, data.draw(odd_bytes(), "name"): value})
    assert read(table, fields)[0].keys() <= records.keys()
    assert len(damaged) <= 1


def documents() -> list[tuple[str, str]]:
    return [
        (table, name)
        for table, fields in GOOD.items()
        for name, text in fields.items()
        if text.startswith("{")
    ]


@pytest.mark.parametrize(("table", "name"), documents())
def test_a_later_version_may_add_fields_to_a_document(table: str, name: str) -> None:
    record = json.loads(GOOD[table][name])
    expected, _ = read(table, {name.encode(): GOOD[table][name].encode()})
    for document in _with_more(record):
        found, damaged = read(table, {name.encode(): json.dumps(document).encode()})
        assert damaged == []
        if name not in ("scaling",) and table != RedisTable.LENGTHS:
            assert found == expected
    later = {**record, "v": 2}
    assert read(table, {name.encode(): json.dumps(later).encode()})[1] == [name.encode()]


def _with_more(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns documents with a field more at the top, and in every object and array inside."""

    def grown(value: Any) -> Any:
        if isinstance(value, dict):
            return {**{key: grown(each) for key, each in value.items()}, "added": 1}
        return [grown(each) for each in value] if isinstance(value, list) else value

    whole: dict[str, Any] = {"v": 1, **record}
    if "models" in record:
        return [whole, grown(record)]
    if any(isinstance(each, dict) and "line" in each for each in record.values()):
        return [whole, {model: grown(each) for model, each in record.items()}]
    return [whole, {**whole, "added": {"a": [1]}}]


REQUIRED = {
    ("notes", "planner"),
    ("notes", "cause"),
    ("last_switch", "from_plan"),
    ("last_switch", "to_plan"),
    ("last_switch", "phase"),
    ("fixed", "models"),
    ("fixed_before", "models"),
    ("active", "models"),
    (RedisTable.AGENTS, "server"),
    (RedisTable.BATCHES, "rows"),
    (RedisTable.BATCHES, "expected_finish_ns"),
    (RedisTable.SESSIONS, "hops"),
    (RedisTable.LENGTHS, "everywhere"),
    (RedisTable.LENGTHS, "buckets"),
    ("scaling", "llm:1"),
    ("servers|first|second", "round_trip_ns"),
    ("servers|first|second", "bytes_per_second"),
    ("servers|first|second", "measured_unix_s"),
}


@pytest.mark.parametrize(("table", "name"), documents())
def test_a_field_less_has_its_default_or_makes_the_record_unreadable(table: str, name: str) -> None:
    record = json.loads(GOOD[table][name])
    for missing in record:
        rest = {key: value for key, value in record.items() if key != missing}
        _, damaged = read(table, {name.encode(): json.dumps(rest).encode()})
        needed = {(name, missing), (table, missing)} & REQUIRED
        # Scaling has models for fields: one less is just that.
        assert bool(damaged) == bool(needed and missing != "llm:1"), missing


LINES = [
    ("book:gpu/agent-0", "7:0", "1 2 3 0 0 8 9"),
    ("book:cache/agent-0/llm:x:1[0,4)", "7:0", "1 3 3 0 4 5 6"),
    (RedisTable.MEASURED, "a|llm:1[0,4)", "generation 1 2 3 4 0.5 6 7 8 9 10"),
    (RedisTable.MEASURED, "link|a|b", "5 6"),
    (RedisTable.DRAINING, "a", "5 6"),
]


@pytest.mark.parametrize(("table", "name", "line"), LINES)
def test_a_later_version_may_add_numbers_to_a_line(table: str, name: str, line: str) -> None:
    records, damaged = read(table, {name.encode(): line.encode()})
    assert (len(records), damaged) == (1, [])
    assert read(table, {name.encode(): b"v1 " + line.encode()})[1] in ([], [name.encode()])
    assert read(table, {name.encode(): b"v2 " + line.encode()})[1] == [name.encode()]


def test_an_older_version_of_a_line_has_fewer_numbers() -> None:
    records, damaged = read("book:gpu/agent-0", {b"7:0": b"1 2 3"})
    assert (len(records), damaged) == (1, [])
    cost = StoredGeneration(1, 2, 3, 4)
    assert cost_text(StoredCost(cost)).startswith("generation 1 2 3 4 0.0")


NONSENSE = [
    (RedisTable.DEPLOYMENTS, "toy", '{"slo_ns": -5}'),
    (RedisTable.DEPLOYMENTS, "toy", '{"packing": "sideways"}'),
    (RedisTable.DRAINING, "agent-0", "-1"),
    (RedisTable.DRAINING, "agent-0", str(2**64)),
    (RedisTable.MEASURED, "servers|a|b", "1000"),
    (RedisTable.MEASURED, "servers|a", "1000"),
    (RedisTable.MEASURED, "a|toy:1[0,2)", '{"round_trip_ns": 1}'),
    (RedisTable.MEASURED, "a|toy:1[2,2)", "1 2"),
    (RedisTable.MEASURED, "a|toy:1[0,2)", "-1 2"),
    (RedisTable.MEASURED, "a|toy:1[0,2)", "generation 1 2 3 NaN"),
    (RedisTable.MEASURED, "link|a|b", "0"),
    (RedisTable.PEERS, "agent-0", peer_text(common_pb2.Peer(peer_id="agent-1"))),
    (RedisTable.SESSIONS, "-1", '{"hops": []}'),
    (RedisTable.SESSIONS, str(2**64), '{"hops": []}'),
    (RedisTable.BATCHES, "1", '{"rows": -1, "expected_finish_ns": 1}'),
    (RedisTable.RESOURCES, "moon/agent-0", "1"),
    ("book:gpu/agent-0", "1:0", "3 2 3 0"),
    ("book:gpu/agent-0", "1:0", "1 2 3 7"),
    ("book:gpu/agent-0", "-1:0", "1 2 3 0"),
    ("book:gpu/agent-0", "1:99999999", "1 2 3 0"),
    ("book:gpu/agent-0", "1:0", "1 2 3 0 5"),
    ("book:cache/agent-0/llm:x:1[0,4)", "1:0", "1 2 3 0"),
    (
        RedisTable.PLAN,
        "scaling",
        '{"llm:1": {"line": {"prior": [1], "history": []}, "cold_start_ns": 1}}',
    ),
    (RedisTable.PLAN, "active", '{"models": [{"name": "toy", "pipelines": []}]}'),
]


@pytest.mark.parametrize(("table", "name", "value"), NONSENSE)
def test_what_is_well_formed_can_be_nonsense(table: str, name: str, value: str) -> None:
    assert read(table, {name.encode(): value.encode()}) == ({}, [name.encode()])


@given(
    st.dictionaries(st.sampled_from([b"scheduler_ns", b"redis_us", b"epoch", b"x"]), odd_bytes())
)
def test_a_clock_is_read_or_not(fields: dict[bytes, bytes]) -> None:
    try:
        clock = read_clock(fields)
    except ValueError:
        return
    assert clock is None or clock.redis_us >= 0
