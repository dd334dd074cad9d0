"""Parts that cases of placement and re-balancing share: latency lines, limits and requests.

Times are milliseconds in the cases, and nanoseconds in the values returned here.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.placing.jobs import Job, WorkerLimits
from catenary_services.domain.latency import LatencyLines
from catenaryd.replay.fields import JsonFields

NANOSECONDS_PER_MS = 1e6
_SHORTEST_MS = 1e-6


def read_lines(perf: JsonFields) -> LatencyLines:
    """Returns the latency lines in `perf` {k1, c1, k2, c2, c3, h, j, t1}; t1 may be null."""
    return LatencyLines(
        prefill_token_ns=_ns(perf, "k1"),
        prefill_ns=_ns(perf, "c1"),
        decode_context_token_ns=_ns(perf, "k2"),
        decode_session_ns=_ns(perf, "c2"),
        decode_ns=_ns(perf, "c3"),
        decode_lone_ns=_ns(perf, "t1") if perf.has("t1") else 0.0,
        cache_token=perf.number("h"),
        cache_session=perf.number("j"),
    )


def read_limits(params: JsonFields) -> WorkerLimits:
    """Returns the limits in `params` {T_pre, T_dec, M, gamma, theta, split_decode}."""
    return WorkerLimits(
        first_token_ns=round(params.number("T_pre", _SHORTEST_MS) * NANOSECONDS_PER_MS),
        per_token_ns=round(params.number("T_dec", _SHORTEST_MS) * NANOSECONDS_PER_MS),
        cache_capacity=params.number("M"),
        gamma=params.number("gamma", most=1.0),
        theta=params.number("theta", most=1.0),
        split_decode=params.flag("split_decode"),
    )


def read_job(request: JsonFields) -> Job:
    """Returns a request {l_in, l_pred, l_out, t_dec, new}; without the last three it is new."""
    started = request.has("l_out")
    generated = request.whole("l_out") if started else 0
    return Job(
        prompt_tokens=request.whole("l_in", least=1),
        predicted_tokens=request.number("l_pred"),
        generated_tokens=generated,
        decode_ns=_ns(request, "t_dec") if request.has("t_dec") else 0.0,
        is_new=request.flag("new") if request.has("new") else generated == 0,
    )


def _ns(fields: JsonFields, name: str) -> float:
    return fields.number(name) * NANOSECONDS_PER_MS
