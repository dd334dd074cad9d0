"""Live migration as the gateway sees it: what it orders, whose tokens count, what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from catenary_gateway.generation.sessions import active_starts
from catenary_protos.catenary.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    frame_pb2,
    generation_pb2,
    generation_pb2_grpc,
    scheduler_pb2,
)
from catenary_services.errors import PartitionLost
from generation_harness import Session, TextStage, text_stage
from shared_helpers.waiting import until
from small_models.tiny_tokenizer import tokens_of

BEGIN = frame_pb2.SessionMove.STEP_BEGIN
TOKENS = scheduler_pb2.MOVE_MODE_TOKENS
S1, S2, S3 = (1 << 40 | n for n in (1, 2, 3))


class Stream:
    """One answer over gRPC, read as far as a test wants."""

    def __init__(self, call) -> None:
        self.call = call
        self.got = ""
        self.last = generation_pb2.GenerateResponse()

    async def reads(self, text: str) -> None:
        """Reads until all of `text`, and no more, is there."""
        async with asyncio.timeout(30):
            while self.got != text:
                await self._next()
                assert text.startswith(self.got)

    async def ends_with(self, text: str) -> generation_pb2.GenerateResponse:
        async with asyncio.timeout(30):
            while not self.last.finish_reason:
                await self._next()
        assert self.got == text
        return self.last

    async def _next(self) -> None:
        self.last = await self.call.read()
        assert self.last is not grpc.aio.EOF
        self.got += self.last.text


@asynccontextmanager
async def generating(
    tmp_path: Path, *, agents: int = 2, **settings: object
) -> AsyncIterator[tuple[TextStage, Stream, Session]]:
    """An answer that has begun with "a" on the first agent, prompted by "ab"."""
    facts = settings.pop("asked", {})
    async with (
        text_stage(tmp_path, agents=agents, **settings) as stage,
        grpc.aio.insecure_channel(stage.grpc) as channel,
    ):
        request = generation_pb2.GenerateRequest(model="tiny", prompt="ab", id="mine", **facts)
        stream = Stream(generation_pb2_grpc.GenerationStub(channel).Generate(request))
        first = await stage.agent.session()
        await first.say("a")
        await stream.reads("a")
        await stage.scheduler.hear("submit_session")
        yield stage, stream, first
        stream.call.cancel()


async def moving(stage: TextStage, first: Session, *, to: int = 1, skip: int = 0) -> Session:
    """Has a session move; what it becomes, `skip` tokens later."""
    stage.scheduler.send(stage.scheduler.move_session(first, f"agent-{to}"))
    return (await stage.agent.move()).session(stage.agents[to], skip=skip)


async def failures(stage: TextStage, count: int) -> dict[int, str]:
    """The next sessions reported as failed, and why."""
    heard = [await stage.scheduler.hear("session_failed") for _ in range(count)]
    return {each.session_id: each.failure.message for each in heard}


async def test_the_ring_that_generates_is_told_where_it_goes(tmp_path: Path) -> None:
    async with generating(tmp_path) as (stage, stream, first):
        order = stage.scheduler.move_session(first, "agent-1", mode=TOKENS)
        order.start_session.epoch = 5
        stage.scheduler.send(order)
        told = await stage.agent.move()
        assert told.epoch == 5
        move = told.order
        assert (move.session_id, move.moved_session_id) == (S2, S1)
        assert (move.step, move.by_tokens) == (BEGIN, True)
        assert [hop.agent_id for hop in move.opening.route] == ["agent-1"]
        assert list(move.opening.token_ids) == tokens_of("aba")
        assert move.opening.prompt_tokens == 2
        assert move.opening.sampling == first.opening.sampling
        assert move.opening.gateway_id == first.opening.gateway_id
        assert 0 < move.opening.budget_ns < first.opening.budget_ns
        assert stage.agents[1].opened.empty(), "the old ring opens it, not the gateway"
        await first.say("b", finish="length")
        await stream.ends_with("ab")


async def test_of_two_rings_the_one_that_generates_is_told(tmp_path: Path) -> None:
    def two_rings(submit: scheduler_pb2.SubmitSession) -> list[object]:
        order = stage.scheduler.start_session(submit.request_id)
        order.start_session.decode_route.add(agent_id="agent-1", model="tiny", last_block=30)
        return [order]

    async with (
        text_stage(tmp_path, agents=3) as stage,
        grpc.aio.insecure_channel(stage.grpc) as channel,
    ):
        stage.scheduler.session_script = two_rings
        request = generation_pb2.GenerateRequest(model="tiny", prompt="ab")
        stream = Stream(generation_pb2_grpc.GenerationStub(channel).Generate(request))
        first = await stage.agent.session()
        await first.say("a")
        await stream.reads("a")
        stage.scheduler.send(stage.scheduler.move_session(first, "agent-2"))
        second = (await stage.agents[1].move()).session(stage.agents[2])
        await second.say("b", finish="length")
        last = await stream.ends_with("ab")
        (change,) = last.chain_changes
        assert (list(change.from_agents), list(change.to_agents)) == (["agent-1"], ["agent-2"])


async def test_it_goes_on_until_the_other_ring_brings_the_next_token(tmp_path: Path) -> None:
    async with generating(tmp_path) as (stage, stream, first):
        second = await moving(stage, first, skip=2)
        await first.say("bc")
        await stream.reads("abc")
        await second.say("d")
        await stream.reads("abcd")
        await first.say("xy")
        await second.say("e", finish="length")
        last = await stream.ends_with("abcde")
        await first.say("z")
        assert stage.gateway._sessions.dropped >= 2
        (change,) = last.chain_changes
        assert (change.how, change.generated_tokens) == ("kv", 3)
        assert 0 < change.stall_ns < change.after_ns
        assert not last.objectives.predicted_time_per_output_token_ns
        page = stage.gateway._metrics
        sample = page.registry.get_sample_value
        labels = {"model": "tiny:1", "mode": "kv"}
        assert sample("catenary_move_stall_seconds_count", labels) == 1
        assert sample("catenary_generation_moves_total", {**labels, "outcome": "moved"}) == 1


async def test_it_may_move_again_and_again(tmp_path: Path) -> None:
    async with generating(tmp_path, agents=3) as (stage, stream, first):
        second = await moving(stage, first)
        await second.say("b")
        await stream.reads("ab")
        stage.scheduler.send(stage.scheduler.move_session(second, "agent-0", mode=TOKENS))
        told = await stage.agents[1].move()
        assert list(told.order.opening.token_ids) == tokens_of("abab")
        third = told.session(stage.agents[0])
        await third.say("c", finish="length")
        last = await stream.ends_with("abc")
        assert [change.how for change in last.chain_changes] == ["kv", "tokens"]


async def test_tokens_that_overtake_the_last_ones_of_the_old_ring_wait_for_them(
    tmp_path: Path,
) -> None:
    async with generating(tmp_path) as (stage, stream, first):
        second = await moving(stage, first, skip=2)
        await second.say("de")
        await first.say("b")
        await stream.reads("ab")
        await first.say("c")
        await stream.reads("abcde")
        await first.say("x")
        await second.say("f", finish="length")
        await stream.ends_with("abcdef")
        assert stage.gateway._sessions.dropped == 1


@pytest.mark.parametrize("how", ["none comes", "too many behind", "a gap", "the old ring fails"])
async def test_lost_last_tokens_of_the_old_ring_are_noticed(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_starts, "OVERTAKEN_S", 0.05 if how == "none comes" else 60.0)
    async with generating(tmp_path, agents=3) as (stage, stream, first):
        second = await moving(stage, first, skip=1)
        await second.say("c" * (65 if how == "too many behind" else 1))
        if how == "a gap":
            second.position += 1
            await second.say("e")
        elif how == "the old ring fails":
            await first.fail()
        assert (await failures(stage, 2)).keys() == {S1, S2}
        stage.scheduler.send(stage.scheduler.start_session(1, "agent-2"))
        third = await stage.agents[2].session()
        assert list(third.opening.token_ids) == tokens_of("aba")
        await first.say("x")
        await second.say("y")
        await third.say("b", finish="length")
        last = await stream.ends_with("ab")
        assert [change.how for change in last.chain_changes] == ["restart"]


async def test_a_session_that_does_not_generate_cannot_move(tmp_path: Path) -> None:
    async with generating(tmp_path) as (stage, stream, first):
        order = stage.scheduler.move_session(first, "agent-1")
        order.start_session.moved_session_id = 77
        stage.scheduler.send(order)
        assert await failures(stage, 1) == {S2: "session 77 cannot move: it does not generate"}
        await first.say("b", finish="length")
        await stream.ends_with("ab")


async def test_a_prompt_cannot_move(tmp_path: Path) -> None:
    async with (
        text_stage(tmp_path, agents=2) as stage,
        grpc.aio.insecure_channel(stage.grpc) as channel,
    ):
        request = generation_pb2.GenerateRequest(model="tiny", prompt="ab")
        stream = Stream(generation_pb2_grpc.GenerationStub(channel).Generate(request))
        first = await stage.agent.session()
        stage.scheduler.send(stage.scheduler.move_session(first, "agent-1"))
        assert (await failures(stage, 1)).keys() == {S2}
        await first.say("b", finish="length")
        await stream.ends_with("b")


async def test_what_was_handed_over_cannot_move_from_where_it_was(tmp_path: Path) -> None:
    async with generating(tmp_path, agents=3) as (stage, stream, first):
        second = await moving(stage, first, skip=1)
        await second.say("c")
        await until(lambda: stage.gateway._sessions._requests[1].successors[0].early)
        stage.scheduler.send(stage.scheduler.move_session(first, "agent-2"))
        assert await failures(stage, 1) == {
            S3: f"session {S1} cannot move: it was handed over already"
        }
        await first.say("b")
        await second.say("d", finish="length")
        await stream.ends_with("abcd")


async def test_a_move_that_fails_leaves_it_where_it_is(tmp_path: Path) -> None:
    async with generating(tmp_path, agents=3) as (stage, stream, first):
        second = await moving(stage, first)
        await second.fail()
        assert await failures(stage, 1) == {S2: "gone"}
        await first.say("b")
        await stream.reads("ab")
        await second.say("x")
        third = await moving(stage, first, to=2)
        await third.say("c", finish="length")
        last = await stream.ends_with("abc")
        assert [list(change.to_agents) for change in last.chain_changes] == [["agent-2"]]
        sample = stage.gateway._metrics.registry.get_sample_value
        labels = {"model": "tiny:1", "mode": "kv", "outcome": "failed"}
        assert sample("catenary_generation_moves_total", labels) == 1


async def test_a_ring_that_cannot_be_told_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_link(peer_id: str, timeout_s: float) -> None:
        raise PartitionLost(f"{peer_id} cannot be reached")

    async with generating(tmp_path) as (stage, stream, first):
        monkeypatch.setattr(stage.gateway._hub, "link_to", no_link)
        stage.scheduler.send(stage.scheduler.move_session(first, "agent-1"))
        assert (await failures(stage, 1)).keys() == {S2}
        await first.say("b", finish="length")
        await stream.ends_with("ab")


async def test_a_ring_that_fails_may_have_handed_over_before(tmp_path: Path) -> None:
    async with generating(tmp_path) as (stage, stream, first):
        second = await moving(stage, first)
        await first.fail()
        assert await failures(stage, 1) == {S1: "gone"}
        await second.say("b", finish="length")
        last = await stream.ends_with("ab")
        assert [change.how for change in last.chain_changes] == ["kv"]


async def test_a_new_start_ends_a_move(tmp_path: Path) -> None:
    async with generating(tmp_path, agents=3) as (stage, stream, first):
        second = await moving(stage, first)
        await first.fail()
        await failures(stage, 1)
        stage.scheduler.send(stage.scheduler.start_session(1, "agent-2"))
        third = await stage.agents[2].session()
        await second.say("x")
        await third.say("b", finish="length")
        await stream.ends_with("ab")


async def test_of_two_moves_the_one_that_comes_about_counts(tmp_path: Path) -> None:
    async with generating(tmp_path, agents=3) as (stage, stream, first):
        second = await moving(stage, first)
        third = await moving(stage, first, to=2, skip=1)
        await second.say("b")
        await stream.reads("ab")
        await third.say("x")
        await first.say("x")
        await second.say("c", finish="length")
        await stream.ends_with("abc")


async def test_an_answer_that_ends_meanwhile_does_not_move(tmp_path: Path) -> None:
    async with generating(tmp_path) as (stage, stream, first):
        second = await moving(stage, first)
        await first.say("b", finish="length")
        last = await stream.ends_with("ab")
        assert not last.chain_changes
        await second.say("x")
        await stage.is_empty()


async def test_a_client_that_goes_away_ends_both(tmp_path: Path) -> None:
    async with generating(tmp_path) as (stage, stream, first):
        second = await moving(stage, first, skip=1)
        await second.say("c")
        stream.call.cancel()
        assert (await stage.scheduler.hear("cancel")).request_id == 1
        await stage.is_empty()


async def test_a_new_scheduler_is_told_of_the_session_that_generates(tmp_path: Path) -> None:
    async with generating(tmp_path) as (stage, stream, first):
        scheduler, told = stage.scheduler, []
        second = await moving(stage, first, skip=1)
        for said, reads in ((first, "ab"), (second, "abc")):
            await said.say(reads[-1])
            await stream.reads(reads)
            port = scheduler.port
            await scheduler.stop()
            scheduler.epoch += 1
            await scheduler.start(port)
            submit = await scheduler.hear("submit_session")
            told.append((submit.session_id, [hop.agent_id for hop in submit.route]))
        assert told == [(S1, ["agent-0"]), (S2, ["agent-1"])]
        await second.say("d", finish="length")
        await stream.ends_with("abcd")


async def test_trace_and_spans_show_the_parts(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with generating(tmp_path, exporter=exporter, asked={"timings": True}) as (
        stage,
        stream,
        first,
    ):
        second = await moving(stage, first)
        await second.say("bc", finish="length")
        await stream.ends_with("abc")
        await stage.is_empty()
        async with grpc.aio.insecure_channel(stage.admin) as channel:
            trace = await admin_pb2_grpc.AdminStub(channel).GetTrace(
                admin_pb2.GetTraceRequest(request_id="mine")
            )
        phases = ["agent.transfer", "agent.wait", "agent.compute", "agent.send"]
        assert [span.name for span in trace.spans] == [
            "gateway.receive",
            "gateway.queue",
            "gateway.send",
            "gateway.first_token",
            *phases,
            "gateway.move",
            "gateway.stall",
            *phases,
            "gateway.next_tokens",
            *phases,
        ]
        move, stall = (
            next(span for span in trace.spans if span.name == name)
            for name in ("gateway.move", "gateway.stall")
        )
        assert move.start_ns + move.duration_ns == stall.start_ns + stall.duration_ns
        assert {span.attempt for span in trace.spans if span.batch_id == S2} == {2}


async def test_operators_name_sessions_by_their_requests(tmp_path: Path) -> None:
    async with (
        generating(tmp_path) as (stage, _, _),
        grpc.aio.insecure_channel(stage.admin) as channel,
    ):
        admin = admin_pb2_grpc.AdminStub(channel)
        asked = []

        def move_session(request):
            asked.append(request)
            return admin_pb2.MoveSessionResponse(outcome="moved", session_id=S2)

        def list_sessions(_):
            answer = admin_pb2.ListSessionsResponse()
            answer.sessions.add(session_id=S1, gateway_id="gateway-t", request_number=1)
            answer.sessions.add(session_id=S2, gateway_id="another", request_number=1)
            return answer

        stage.scheduler.answers |= {"MoveSession": move_session, "ListSessions": list_sessions}
        listed = await admin.ListSessions(admin_pb2.ListSessionsRequest())
        assert [each.request_id for each in listed.sessions] == ["mine", ""]
        moved = await admin.MoveSession(admin_pb2.MoveSessionRequest(request_id="mine", mode="kv"))
        assert (moved.outcome, asked[0].session_id, asked[0].mode) == ("moved", S1, "kv")
        for wrong in ({"request_id": "other"}, {}, {"request_id": "mine", "session_id": S1}):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await admin.MoveSession(admin_pb2.MoveSessionRequest(**wrong))
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_operators_ask_for_stories_by_requests_that_run_or_have_ended(tmp_path: Path) -> None:
    async with (
        generating(tmp_path) as (stage, _, _),
        grpc.aio.insecure_channel(stage.admin) as channel,
    ):
        admin = admin_pb2_grpc.AdminStub(channel)
        asked = []

        def get_story(request):
            asked.append(request)
            return admin_pb2.GetStoryResponse(changes=[admin_pb2.StateChange(name="placed")])

        stage.scheduler.answers["GetStory"] = get_story
        for spec in {"request_id": "mine"}, {"session_id": S1}:
            story = await admin.GetStory(admin_pb2.GetStoryRequest(**spec))
            assert [each.name for each in story.changes] == ["placed"]
        assert [(a.session_id, a.request_id, a.gateway_id, a.request_number) for a in asked] == [
            (0, "", "gateway-t", 1),
            (S1, "", "", 0),
        ]
        for wrong in ({"request_id": "other"}, {}, {"request_id": "mine", "session_id": S1}):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await admin.GetStory(admin_pb2.GetStoryRequest(**wrong))
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
