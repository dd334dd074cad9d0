"""Text generation through both clients and the command line, against a real gRPC server."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest
from typer.testing import CliRunner

import catenary
from catenary import errors
from catenary.command_line import app
from catenary.command_line.chat import printable, timing_table
from catenary.text.generation import GenerationResult, Usage
from catenary_services import errors as served


async def test_chat_answers_a_text(generating_server, connect):
    result = await connect.to(generating_server).chat("lm", "hello there", request_id="r-1")
    assert isinstance(result, GenerationResult)
    assert (result.text, result.token_ids) == ("HELLO THERE ", (0, 1))
    assert (result.finish_reason, result.usage) == ("stop", Usage(2, 2))
    assert result.id == "r-1"
    assert 0 < result.first_token_s <= result.total_s
    request = generating_server.orders[0]
    assert [(m.role, m.content) for m in request.messages] == [("user", "hello there")]
    assert generating_server.deadlines == [None]


async def test_pieces_come_one_by_one(generating_server, connect):
    stream = connect.to(generating_server).chat("lm", "hello there", stream=True)
    assert generating_server.orders == []  # sent with the first piece asked for
    pieces = [piece async for piece in stream]
    assert [piece.text for piece in pieces] == ["HELLO ", "THERE ", ""]
    assert [piece.finish_reason for piece in pieces] == ["", "", "stop"]
    assert stream.so_far.text == "HELLO THERE "
    assert stream.id == generating_server.orders[0].id != ""


async def test_a_stream_can_be_drained_into_its_result(generating_server, connect):
    stream = connect.to(generating_server).generate("lm", "a b c", stream=True)
    async for piece in stream:
        assert piece.text == "A "
        break
    assert (await stream.result()).text == "A B C "


async def test_log_probabilities_come_with_their_tokens(generating_server, connect):
    def scored(token: int) -> catenary.TokenLogprobs:
        return catenary.TokenLogprobs(token, -1.5, 2, ((99, -0.5),))

    client = connect.to(generating_server)
    result = await client.generate("lm", "a b c", logprobs=1, prompt_logprobs=1)
    assert result.logprobs == tuple(map(scored, result.token_ids)) == tuple(map(scored, range(3)))
    assert result.prompt_logprobs == (scored(7), scored(8))
    plain = await client.generate("lm", "a b c")
    assert (plain.logprobs, plain.prompt_logprobs) == ((), ())


async def test_every_option_travels(generating_server, connect):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    await connect.to(generating_server).chat(
        "lm",
        messages,
        max_tokens=5,
        min_tokens=1,
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.25,
        stop="END",
        seed=0,
        min_p=0.125,
        logit_bias={7: -100, 9: 0.5},
        grammar='start: "a"',
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=0,
        stop_token_ids=[4, 5],
        allowed_token_ids=(6,),
        bad_words=["no"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        timings=True,
        time_to_first_token_slo_ms=100,
        time_per_output_token_slo_ms=0.5,
        timeout_s=30,
    )
    request = generating_server.orders[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (5, 1, 40)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.5, 0.75, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 0.25)
    assert (list(sampling.stop), sampling.ignore_eos) == (["END"], True)
    assert (sampling.logprobs, sampling.HasField("prompt_logprobs")) == (3, True)
    assert (list(sampling.stop_token_ids), list(sampling.allowed_token_ids)) == ([4, 5], [6])
    assert list(sampling.bad_words) == ["no"]
    assert (sampling.include_stop_str_in_output, sampling.skip_special_tokens) == (True, False)
    assert sampling.HasField("skip_special_tokens")
    assert sampling.min_p == 0.125
    assert [(each.token_id, each.bias) for each in sampling.logit_bias] == [(7, -100), (9, 0.5)]
    assert sampling.grammar == 'start: "a"'
    assert sampling.HasField("seed")
    assert request.time_to_first_token_slo_ns == 100_000_000
    assert request.time_per_output_token_slo_ns == 500_000
    assert request.timings
    assert [m.role for m in request.messages] == ["system", "user"]
    assert 20 < generating_server.deadlines[0] < 31


async def test_what_is_left_out_is_left_to_the_server(generating_server, connect):
    await connect.to(generating_server).generate("lm", [5, 6, 7])
    request = generating_server.orders[0]
    assert not request.HasField("sampling") or not request.sampling.ListFields()
    assert list(request.token_ids) == [5, 6, 7]
    assert not request.prompt


@pytest.mark.parametrize(
    ("method", "given", "options", "field"),
    [
        ("chat", "hi", {"max_tokens": -1}, "max_tokens"),
        ("chat", "hi", {"temperature": "hot"}, "temperature"),
        ("chat", "hi", {"seed": 2**64}, "seed"),
        ("chat", "hi", {"min_p": "low"}, "min_p"),
        ("chat", "hi", {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ("chat", "hi", {"logit_bias": {1: "up"}}, "logit_bias"),
        ("chat", "hi", {"stop": [3]}, "stop"),
        ("chat", "hi", {"time_per_output_token_slo_ms": 0}, "time_per_output_token_slo_ms"),
        ("chat", "hi", {"time_to_first_token_slo_ms": -3}, "time_to_first_token_slo_ms"),
        ("chat", "hi", {"timeout_s": 0}, "timeout_s"),
        ("chat", [], {}, "messages"),
        ("chat", [{"role": "user"}], {}, "messages[0]"),
        ("chat", [{"role": "user", "content": 3}], {}, "messages[0]"),
        ("generate", "", {}, "prompt"),
        ("generate", [-1], {}, "prompt"),
    ],
)
async def test_what_cannot_be_sent_is_named(
    generating_server, connect, method, given, options, field
):
    with pytest.raises(errors.InvalidInputError) as caught:
        await getattr(connect.to(generating_server), method)("lm", given, **options)
    assert caught.value.field == field
    assert generating_server.orders == []


async def test_an_unknown_option_is_a_mistake_of_the_caller(generating_server, connect):
    with pytest.raises(TypeError, match="tempreature"):
        await connect.to(generating_server).chat("lm", "hi", tempreature=1)


async def test_timings_say_where_each_token_was(generating_server, connect):
    result = await connect.to(generating_server).chat("lm", "a b", timings=True)
    assert [timing.token_id for timing in result.timings] == [0, 1]
    hop = result.timings[0].hops[1]
    assert (hop.agent_id, hop.first_block, hop.last_block) == ("agent-1", 4, 8)
    assert hop.compute_ns == 5_000_001
    assert (await connect.to(generating_server).chat("lm", "a")).timings == ()


async def test_the_end_says_what_came_of_the_objectives(generating_server, connect):
    client = connect.to(generating_server)
    stream = client.chat("lm", "a b", stream=True, time_to_first_token_slo_ms=100)
    pieces = [piece async for piece in stream]
    assert [piece.objectives is not None for piece in pieces] == [False, False, True]
    report = stream.so_far.objectives
    assert report.time_to_first_token_slo_ns == 100_000_000
    assert report.predicted_time_to_first_token_ns == 95_000_000
    assert (report.time_per_output_token_slo_ns, report.met) == (0, True)
    assert not (await client.chat("lm", "a", time_to_first_token_slo_ms=80)).objectives.met
    assert (await client.chat("lm", "a")).objectives is None


async def test_closing_a_stream_cancels_the_answer(generating_server, connect):
    async with connect.to(generating_server).chat("lm", "now wait more", stream=True) as stream:
        async for piece in stream:
            if piece.text == "WAIT ":
                break
        assert not generating_server.cancelled.is_set()
    assert await asyncio.to_thread(generating_server.cancelled.wait, 5)
    assert stream.so_far.text == "NOW WAIT "
    assert stream.so_far.finish_reason == ""


def test_a_stream_that_is_dropped_is_cancelled(generating_server):
    gc.disable()  # not by luck: nothing may refer to the stream any more
    try:
        with catenary.Client(generating_server.target) as client:
            for piece in client.chat("lm", "wait", stream=True):
                assert piece.text == "WAIT "
                break
            assert generating_server.cancelled.wait(5)
    finally:
        gc.enable()


async def test_a_cancelled_task_cancels_the_answer(generating_server):
    async with catenary.AsyncClient(generating_server.target) as client:
        asking = asyncio.create_task(client.chat("lm", "wait"))
        assert await asyncio.to_thread(generating_server.waiting.wait, 5)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await asyncio.to_thread(generating_server.cancelled.wait, 5)


async def test_an_error_of_the_server_is_typed(generating_server, connect):
    generating_server.failures.append(
        served.Overloaded("no chain is free", retry_after_ns=250_000_000)
    )
    with pytest.raises(errors.OverloadedError) as caught:
        await connect.to(generating_server).chat("lm", "hello", request_id="r-9")
    assert caught.value.retry_after_s == pytest.approx(0.25)
    assert caught.value.request_id == "r-9"


async def test_a_policy_repeats_until_the_first_token(generating_server, connect):
    policy = catenary.RetryPolicy(initial_backoff_s=0.001, max_backoff_s=0.002)
    busy = served.Overloaded("every chain is taken", retry_after_ns=1_000_000)
    generating_server.failures.extend([busy, busy])
    result = await connect.to(generating_server, retry=policy).chat("lm", "hello")
    assert result.text == "HELLO "
    assert len({request.id for request in generating_server.orders}) == 1
    assert len(generating_server.orders) == 3


async def test_nothing_is_repeated_after_the_first_token(generating_server, connect):
    policy = catenary.RetryPolicy(initial_backoff_s=0.001, max_backoff_s=0.002)
    stream = connect.to(generating_server, retry=policy).chat("lm", "one fail", stream=True)
    with pytest.raises(errors.PartitionLostError):
        _ = [piece async for piece in stream]
    assert len(generating_server.orders) == 1
    assert stream.so_far.text == "ONE "


async def test_a_deadline_ends_an_answer_that_is_too_slow(generating_server, connect):
    with pytest.raises(errors.DeadlineExceededError):
        await connect.to(generating_server).chat("lm", "wait", timeout_s=0.3)


async def test_an_answer_without_an_end_is_a_protocol_error(generating_server, connect):
    with pytest.raises(errors.ProtocolError, match="finish reason"):
        await connect.to(generating_server).chat("lm", "a cut")


async def test_a_server_without_generation_does_not_support_it(server, connect):
    with pytest.raises(errors.NotSupportedError):
        await connect.to(server).chat("lm", "hello")


def run(server, *arguments: str, stdin: str | None = None):
    environment = {"CATENARY_TARGET": server.target}
    return CliRunner().invoke(app, ["chat", *arguments], input=stdin, env=environment)


def test_the_command_prints_the_answer(generating_server):
    found = run(generating_server, "lm", "hello there", "--system", "be brief", "--max-tokens", "1")
    assert (found.exit_code, found.stdout) == (0, "HELLO \n")
    assert [m.role for m in generating_server.orders[0].messages] == ["system", "user"]
    assert not generating_server.orders[0].timings


def test_the_command_prints_one_json_object(generating_server):
    found = run(
        generating_server, "lm", "hello", "--json", "--seed", "3", "--stop", "X", "--stop", "Y"
    )
    facts = json.loads(found.stdout)
    assert facts["text"] == "HELLO "
    assert facts["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "cached_tokens": 0}
    assert "timings" not in facts
    sampling = generating_server.orders[0].sampling
    assert (sampling.seed, list(sampling.stop)) == (3, ["X", "Y"])


def test_the_command_shows_every_token_and_hop(generating_server):
    page = run(generating_server, "lm", "a b c", "--timings").stdout
    assert "agent-0 [0,4)" in page
    assert "agent-1 [4,8)" in page
    assert page.count("0.3 + 5.0 + 0.1") + page.count("0.3 + 5.0 + 0.0") == 6
    assert "2 + 3 tokens, stop" in page
    facts = json.loads(run(generating_server, "lm", "a", "--timings", "--json").stdout)
    assert facts["timings"][0]["hops"][0]["agent_id"] == "agent-0"


def test_the_command_compares_what_was_measured_expected_and_wanted(generating_server):
    asked = ("lm", "a b", "--timings", "--time-to-first-token-slo-ms", "80")
    page = run(generating_server, *asked).stdout
    assert "first token 90 ms (expected 95, wanted 80), then 20 ms per token" in page
    assert "objectives missed" in page
    facts = json.loads(run(generating_server, *asked, "--json").stdout)
    assert facts["objectives"]["time_to_first_token_ns"] == 90_000_000
    objective = ("--time-per-output-token-slo-ms", "7.5")
    assert run(generating_server, "lm", "a", *objective).stdout == "A \n"
    assert generating_server.orders[-1].time_per_output_token_slo_ns == 7_500_000


def test_a_conversation_remembers_what_was_said(generating_server):
    found = run(generating_server, "lm", "first", "--interactive", stdin="\nsecond\n")
    assert found.exit_code == 0
    assert "FIRST" in found.stdout
    assert "SECOND" in found.stdout
    said = [(m.role, m.content) for m in generating_server.orders[1].messages]
    assert said == [("user", "first"), ("assistant", "FIRST "), ("user", "second")]


def test_the_command_fails_in_one_sentence(generating_server, server):
    generating_server.failures.append(served.ModelNotFound("no model 'lm'"))
    found = run(generating_server, "lm", "hello")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr == "error: no model 'lm' [MODEL_NOT_FOUND]\n"
    late = run(generating_server, "lm", "one fail")
    assert (late.exit_code, late.stdout) == (1, "ONE \n")
    assert late.stderr.startswith("error: agent-1 is gone")
    none = run(server, "lm", "hello")
    assert none.exit_code == 1
    assert "generation is not served" in none.stderr
    assert none.stderr.count("\n") == 1
    assert run(generating_server, "lm").exit_code == 2


def test_an_answer_cannot_move_the_cursor():
    assert printable("a\x1b[2Jb\r\n\tc\x9b\x00 é 猫") == "a[2Jb\n\tc é 猫"


def test_an_agent_a_token_did_not_pass_is_a_dash():
    hop = catenary.TokenHop("a", 0, 4, 0, 0, 1_000_000, 0)
    other = catenary.TokenHop("b", 4, 8, 0, 0, 1_000_000, 0)
    timings = [catenary.TokenTiming(1, 2, (hop, other)), catenary.TokenTiming(2, 2, (hop,))]
    column = timing_table(timings).columns[4]
    assert list(column.cells) == ["0.0 + 1.0 + 0.0", "-"]
