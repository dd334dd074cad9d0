"""The join line: what is printed is read back, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_services.errors import InvalidInput
from catenaryd.enrolment.join_line import JOIN_PORT, JoinLine, join_line_for, parse_join_line

PIN = bytes(range(32))
TOKEN = "k3x9w2ab." + "4f6g" * 8
LINE = f"catenary://10.0.0.5:8006?token={TOKEN}&ca=sha256:{PIN.hex()}"

hosts = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{1,10})?", fullmatch=True),
)
tokens = st.from_regex(r"[a-z0-9]{8}\.[a-z0-9]{32}", fullmatch=True)


@given(hosts, st.integers(1, 65_535), st.binary(min_size=32, max_size=32), tokens | st.just(""))
def test_what_is_printed_is_read_back(host: str, port: int, pin: bytes, token: str) -> None:
    line = JoinLine(host, port, pin, token)
    assert parse_join_line(str(line)) == line
    assert parse_join_line(f"  {line}\n") == line


def test_the_line_is_of_the_documented_form() -> None:
    assert str(JoinLine("10.0.0.5", 8006, PIN, TOKEN)) == LINE
    assert str(JoinLine("fd00::5", 8006, PIN)) == f"catenary://[fd00::5]:8006?ca=sha256:{PIN.hex()}"


def test_without_a_port_it_is_the_usual_one() -> None:
    for host in ("10.0.0.5", "[fd00::5]"):
        read = parse_join_line(f"catenary://{host}?ca=sha256:{PIN.hex()}")
        assert (read.port, read.host) == (JOIN_PORT, host.strip("[]"))


@given(st.text(max_size=400))
def test_any_text_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_join_line(text)
    assert len(refused.value.message) < 1_000


@given(st.integers(0, len(LINE) - 1), st.text(max_size=3))
def test_a_damaged_line_is_refused_or_names_other_parts(at: int, other: str) -> None:
    damaged = LINE[:at] + other + LINE[at + 1 :]
    said = ""
    try:
        read = parse_join_line(damaged)
    except InvalidInput as refused:
        said = refused.message
    else:
        assert parse_join_line(str(read)) == read
    assert TOKEN.partition(".")[2] not in said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"http://10.0.0.5?token={TOKEN}&ca=sha256:{PIN.hex()}", "must be catenary://"),
        (f"catenary://10.0.0.5:8006?token={TOKEN}", "lacks ca=sha256"),
        (f"catenary://10.0.0.5:8006?token={TOKEN}&ca=sha256:1234", "lacks ca=sha256"),
        ("catenary://10.0.0.5:8006", "lacks ca=sha256"),
        (f"{LINE}&ca=sha256:{PIN.hex()}", "other fields"),
        (f"{LINE}&more=1", "other fields"),
        (LINE.replace("//", "//me@"), "names no HOST:PORT"),
        (LINE.replace("10.0.0.5:8006", "fd00::5:8006"), "names no HOST:PORT"),
        (LINE.replace("8006", "99999"), "names no HOST:PORT"),
        (LINE.replace("k3x9", "K3X9"), "token of another form"),
        (LINE + "x" * 1_000, "too long"),
        (LINE.replace("?", "/etc?"), "must be catenary://"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(line: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        parse_join_line(line)


def test_no_line_leads_other_machines_to_themselves() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0"):
        with pytest.raises(InvalidInput, match="leads no other machine"):
            join_line_for(host, 8006, PIN, TOKEN)
