"""Rendering of a request's trace as a waterfall of bars. Pure."""

from __future__ import annotations

from catenary.types import Trace, TraceSpan

_SMALLEST_BAR = 10
_STYLE_OF_STAGE = {
    "receive": "cyan",
    "queue": "yellow",
    "send": "magenta",
    "move": "magenta",
    "stall": "red",
    "transfer": "blue",
    "wait": "bright_black",
    "compute": "green",
    "return": "blue",
    "merge": "cyan",
    "answer": "cyan",
}


def render_waterfall(trace: Trace, width: int = 100) -> str:
    """Returns a trace as text, one line a span, in lines of at most `width` columns.

    Columns: process, stage, bar on the request's time axis, start and duration in milliseconds.
    A span of another attempt than the first says so in its stage.

        request 4f1c  efficientnet-lite0  OK  20.00 ms
        gateway  queue    ██                             0.00    1.20 ms
        agent-0  compute    ████████████                 1.20   10.00 ms
    """
    return "\n".join(
        [
            _heading(trace, width),
            *(before + bar + after for before, bar, after in _rows(trace, width)),
        ]
    )


def waterfall_markup(trace: Trace, width: int = 100) -> list[tuple[str, str]]:
    """Returns the same text as (text, rich style) pieces, for terminals with colours."""
    pieces = [(_heading(trace, width) + "\n", "bold")]
    for span, (before, bar, after) in zip(trace.spans, _rows(trace, width), strict=True):
        style = _STYLE_OF_STAGE.get(span.name.rpartition(".")[2], "white")
        pieces += [(before, ""), (bar, style), (after + "\n", "")]
    return pieces


def _heading(trace: Trace, width: int) -> str:
    parts = [
        f"request {trace.request_id or '-'}",
        trace.model,
        trace.outcome,
        f"{trace.total_ns / 1e6:.2f} ms",
    ]
    return "  ".join(part for part in parts if part)[:width]


def _rows(trace: Trace, width: int) -> list[tuple[str, str, str]]:
    if not trace.spans:
        return []
    end_ns = max(trace.total_ns, *(span.start_ns + span.duration_ns for span in trace.spans), 1)
    process_width = min(20, max(len(span.process) for span in trace.spans))
    stage_width = min(26, max(len(_stage(span)) for span in trace.spans))
    # Two separators of two columns on the left, and start and duration on the right.
    cells = max(_SMALLEST_BAR, width - process_width - stage_width - 4 - 23)
    return [_row(span, end_ns, (process_width, stage_width, cells)) for span in trace.spans]


def _row(span: TraceSpan, end_ns: int, widths: tuple[int, int, int]) -> tuple[str, str, str]:
    process_width, stage_width, cells = widths
    first = min(cells - 1, span.start_ns * cells // end_ns)
    last = min(cells, -(-(span.start_ns + span.duration_ns) * cells // end_ns))
    length = max(1, last - first)
    before = (
        f"{span.process[:process_width]:<{process_width}}  "
        f"{_stage(span)[:stage_width]:<{stage_width}}  " + " " * first
    )
    after = (
        " " * (cells - first - length)
        + f"  {span.start_ns / 1e6:>8.2f}  {span.duration_ns / 1e6:>8.2f} ms"
    )
    return before, "█" * length, after


def _stage(span: TraceSpan) -> str:
    # The process has a column of its own, so the prefix of "agent.compute" can go.
    name = span.name.rpartition(".")[2]
    return f"{name} (attempt {span.attempt})" if span.attempt > 1 else name
