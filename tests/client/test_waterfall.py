from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary import Trace, TraceSpan, render_waterfall
from catenary.waterfall import waterfall_markup

TRACE = Trace(
    "4f1c",
    "net:1",
    "OK",
    20_000_000,
    (
        TraceSpan("gateway.queue", "gateway-0", 0, 5_000_000),
        TraceSpan("agent.compute", "agent-0", 5_000_000, 10_000_000, 9, 1),
        TraceSpan("agent.compute", "agent-1", 15_000_000, 5_000_000, 10, 2),
    ),
)


def test_bars_lie_where_the_time_went():
    heading, *rows = render_waterfall(TRACE, 103).splitlines()
    assert heading == "request 4f1c  net:1  OK  20.00 ms"
    cells = rows[0].count("█") * 4
    begin = rows[0].index("█")
    assert [row.count("█") for row in rows] == [cells // 4, cells // 2, cells // 4]
    assert [row.index("█") - begin for row in rows] == [0, cells // 4, cells * 3 // 4]
    assert rows[1].startswith("agent-0    compute ")
    assert rows[1].endswith("    5.00     10.00 ms")
    assert "compute (attempt 2)" in rows[2]


def test_a_trace_without_spans_is_a_heading():
    empty = Trace("", "net", "OVERLOADED", 0, ())
    assert render_waterfall(empty) == "request -  net  OVERLOADED  0.00 ms"


SPANS = st.builds(
    TraceSpan,
    st.text("abc.", max_size=30),
    st.text("xyz-", max_size=30),
    st.integers(0, 2**36) | st.integers(0, 2**63),
    st.integers(0, 2**36) | st.integers(0, 2**63),
    st.just(0),
    st.integers(0, 99),
)


@given(st.lists(SPANS, max_size=5), st.integers(0, 2**63), st.integers(100, 300))
def test_any_trace_gives_one_bar_a_span_and_equal_columns(spans, total_ns, width):
    trace = Trace("r", "m", "OK", total_ns, tuple(spans))
    _, *rows = render_waterfall(trace, width).split("\n")
    assert len(rows) == len(spans)
    assert all("█" in row for row in rows)
    # Times from 100 s on take more digits than their column has.
    if all(s.start_ns + s.duration_ns < 99_999 * 10**6 for s in spans):
        assert {len(row) for row in rows} <= {width}


@given(st.lists(SPANS, max_size=5))
def test_colours_do_not_change_the_text(spans):
    trace = Trace("r", "m", "OK", 5, tuple(spans))
    coloured = "".join(text for text, _ in waterfall_markup(trace, 100))
    assert coloured == render_waterfall(trace, 100) + "\n"
