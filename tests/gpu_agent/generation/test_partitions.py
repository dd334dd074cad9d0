from __future__ import annotations

import time

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.engine.engine import EngineLimits
from catenary_services.telemetry.metrics import Metrics
from catenary_services.telemetry.tracing import Tracer
from shared_helpers.waiting import until
from tests.support.ring_harness import BLOCKS, HIDDEN, opening, toy, undisturbed

PROMPT = [3, 14, 15, 9, 26]
ONE = [("a-0", 0, BLOCKS)]


async def test_a_retired_partition_ends_with_its_last_session(rings):
    caller = await rings.caller()
    node = await rings.agent("a-0", toy())
    old = node.decoders[0]
    old.takes_s = 0.002
    await caller.open(1, opening(ONE, PROMPT, max_tokens=500))
    await caller.wait_for(1, 1)
    assert node.generation.retire_decoder(old.key)
    new = node.host(toy())
    await node.settled()
    assert not old.closed
    assert node.generation.decoders.memory_bytes == 2 * (1000 + 600 * 512 * 32)
    await caller.open(2, opening(ONE, PROMPT, max_tokens=5))
    assert await caller.finished(2) == undisturbed(PROMPT, 5)
    assert await caller.finished(1) == undisturbed(PROMPT, 500)
    assert all(item[0] == 1 for step in old.steps for item in step)
    assert all(item[0] == 2 for step in new.steps for item in step)
    await until(lambda: old.closed)
    await rings.all_free()
    assert node.generation.decoders.memory_bytes == 1000 + 600 * 512 * 32


async def test_the_tightest_of_several_partitions_takes_a_session_and_the_others_if_it_is_full(
    rings,
):
    caller = await rings.caller()
    await rings.agent("a-0", toy(0, 4))
    node = await rings.agent("a-1", toy(0, BLOCKS, 4), toy(3, BLOCKS, 4, slots=2))
    wide, tight = node.decoders
    ring = [("a-0", 0, 4), ("a-1", 4, BLOCKS)]
    for session in (1, 2):
        await caller.open(session, opening(ring, PROMPT, max_tokens=100))
        await caller.wait_for(session, 1)
    assert {item[0] for step in tight.steps for item in step} == {1}
    assert {item[0] for step in wide.steps for item in step} == {2}
    for session in (1, 2):
        assert await caller.finished(session) == undisturbed(PROMPT, 100)
    await rings.all_free()


async def test_partitions_of_one_agent_take_turns(rings):
    caller = await rings.caller()
    node = await rings.agent("a-0", toy(0, 3), toy(0, BLOCKS))
    await rings.agent("a-1", toy(3, BLOCKS))
    await caller.open(1, opening([("a-0", 0, 3), ("a-1", 3, BLOCKS)], PROMPT, max_tokens=80))
    await caller.open(2, opening(ONE, PROMPT, max_tokens=80))
    for session in (1, 2):
        assert await caller.finished(session) == undisturbed(PROMPT, 80)
    assert all(decoder.steps for decoder in node.decoders)
    await rings.all_free()


async def test_the_hello_names_the_sessions_that_hold_slots(rings):
    caller = await rings.caller()
    node = await rings.agent("a-0", toy())
    node.decoders[0].gate.clear()
    await caller.open(5, opening(ONE, PROMPT, max_tokens=3))
    await until(lambda: node.generation.sessions == 1)
    [held] = node.generation.snapshot()
    assert (held.session_id, held.gateway_id, held.request_id) == (5, "gw-0", 7)
    assert [(hop.agent_id, hop.last_block) for hop in held.route] == [("a-0", BLOCKS)]
    assert await node.generation.wait_idle(0.02) is False
    node.decoders[0].gate.set()
    await caller.finished(5)
    await rings.all_free()
    assert node.generation.snapshot() == []


async def test_reports_add_up_to_what_was_computed(rings):
    caller = await rings.caller()
    node = await rings.agent("a-0", toy(), chunk=4)
    for session in (1, 2):
        await caller.open(session, opening(ONE, [1] * 13, max_tokens=9))
    for session in (1, 2):
        await caller.finished(session)
    [report] = await node.told.wait_for("generation_report")  # a second after the first step
    rows = [item for step in node.decoders[0].steps for item in step]
    assert report.prefill_tokens == sum(tokens for _, _, tokens in rows if tokens > 1)
    assert report.prefill_chunks == sum(tokens > 1 for _, _, tokens in rows)
    assert report.decode_rows == sum(tokens == 1 for _, _, tokens in rows)
    assert report.decode_context_tokens == sum(at for _, at, tokens in rows if tokens == 1)
    assert 0 < report.decode_steps <= report.decode_rows
    assert report.decode_ns > 0
    assert report.prefill_ns > 0
    assert (report.key.first_block, report.key.last_block) == (0, BLOCKS)
    assert (report.sessions, report.used_block_slots) == (0, 0)
    await rings.all_free()


async def test_a_sampled_session_leaves_spans_and_another_does_not(rings):
    exporter = InMemorySpanExporter()
    tracer = Tracer("agent", "a-0", exporter=exporter)
    caller = await rings.caller()
    await rings.agent("a-0", toy(), tracer=tracer)
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-"
    await caller.open(1, opening(ONE, PROMPT, max_tokens=4, traceparent=trace + "01"))
    await caller.open(2, opening(ONE, PROMPT, max_tokens=4, traceparent=trace + "00"))
    for session in (1, 2):
        await caller.finished(session)
    await rings.all_free()
    tracer.force_flush()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"agent.session", "agent.wait", "agent.prefill", "agent.decode"}
    whole = spans["agent.session"]
    assert whole.attributes["catenary.session.id"] == 1
    assert whole.attributes["catenary.session.steps"] == 4
    assert whole.start_time <= spans["agent.prefill"].start_time
    assert spans["agent.prefill"].end_time == spans["agent.decode"].start_time
    assert spans["agent.decode"].end_time == whole.end_time <= time.time_ns()
    tracer.shutdown()


async def test_a_layout_changes_under_running_sessions(rings):
    caller = await rings.caller()
    node = await rings.agent("a-0", toy(slots=BLOCKS))
    executor = node.decoders[0]
    await caller.open(1, opening(ONE, PROMPT, max_tokens=300))
    await caller.wait_for(1, 2)
    prepared = executor.prepare_layout(CacheLayout(2 * BLOCKS, 600, (0, 2)))
    await node.generation.on_thread(lambda: executor.apply_layout(prepared))
    await caller.open(2, opening(ONE, PROMPT, max_tokens=10))
    assert await caller.finished(2) == undisturbed(PROMPT, 10)
    assert await caller.finished(1) == undisturbed(PROMPT, 300)
    await rings.all_free()


async def test_hidden_states_take_as_long_as_an_emulated_link_does(rings):
    caller = await rings.caller()
    limits = EngineLimits(emulated_link_bytes_per_second=100_000)
    await rings.agent("a-0", toy(0, 2), engine_limits=limits, chunk=400)
    await rings.agent("a-1", toy(2, BLOCKS), engine_limits=limits)
    prompt = [i % 48 for i in range(400)]
    began = time.monotonic()
    await caller.open(1, opening([("a-0", 0, 2), ("a-1", 2, BLOCKS)], prompt, max_tokens=3))
    assert await caller.finished(1) == undisturbed(prompt, 3)
    assert time.monotonic() - began >= 400 * HIDDEN * 4 / 100_000
    await rings.all_free()


async def test_metrics_count_steps_tokens_and_ends(rings):
    metrics = Metrics()
    caller = await rings.caller()
    node = await rings.agent("a-0", toy(), metrics=metrics)
    await caller.open(1, opening(ONE, PROMPT, max_tokens=6))
    await caller.open(2, opening(ONE, [1] * 600))
    await caller.finished(1)
    await node.told.wait_for("session_failed")
    await rings.all_free()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"catenary_{name}", labels)

    await until(lambda: value("generation_step_seconds_count", model="toy") == 6)
    assert value("generation_rows_total", model="toy", phase="decode") == 5
    assert value("generation_rows_total", model="toy", phase="prefill") == len(PROMPT)
    assert value("generation_sessions_ended_total", model="toy", outcome="OK") == 1
