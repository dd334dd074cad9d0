"""What engines are asked, and how what they say is read; nothing that cannot be right is believed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from catenary_agent.engines.llama_server import LlamaServerProtocol, llama_server_command
from catenary_agent.engines.missing_tokens import MissingTokens
from catenary_agent.engines.requests import EngineBooking, EngineRequest, grammar_parts
from catenary_agent.engines.vllm import VllmProtocol, adapter_options, vllm_command
from catenary_agent.executors.device import Device
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import InvalidInput, PartitionLost
from catenary_services.grammar.vocabulary import TokenVocabulary
from engines.engine_models import write_adapter
from small_models.tiny_tokenizer import END, MORE, tiny_tokenizer, tokens_of

PIECES = [b"<end>", b"a", b"b", b"\xf0\x9f", b"\x98", b"\x80", b" \xf0\x9f", "é".encode()]
ROOM = EngineBooking(sessions=4, session_tokens=500, tokens=2000)
CPU = Device.parse("cpu")


def request(**asked: object) -> EngineRequest:
    return EngineRequest([5, 6, 7], 3, 10, SamplingParameters(**asked), 77)


def llama() -> LlamaServerProtocol:
    return LlamaServerProtocol(MissingTokens(lambda: PIECES))


def said(**fields: object) -> bytes:
    event = {"stop": False, "content": "a", "tokens": [1], "tokens_predicted": 1}
    return b"data: " + json.dumps(event | fields).encode()


class TestLlamaServer:
    def test_a_place_is_named_where_the_agent_chooses_it(self) -> None:
        assert "id_slot" not in llama().body(request())
        assert llama().body(replace(request(), place=3))["id_slot"] == 3
        unsaid = MissingTokens(lambda: PIECES)
        assert LlamaServerProtocol(unsaid, 4).places == 4
        assert LlamaServerProtocol(unsaid, 4, is_unified=True).places == 0

    def test_tokens_come_line_by_line(self) -> None:
        parser = llama().parser(request())
        assert list(parser.take(said()).token_ids) == [1]
        assert list(parser.take(b"").token_ids) == []
        assert list(parser.take(b": ping").token_ids) == []
        second = parser.take(said(content="b", tokens=[2], tokens_predicted=2))
        assert list(second.token_ids) == [2]
        end = parser.take(said(stop=True, stop_type="limit", tokens=[], tokens_predicted=2))
        assert (end.finish, end.unsaid) == ("length", 0)

    def test_tokens_of_a_character_that_was_not_complete_are_found_by_their_bytes(self) -> None:
        parser = llama().parser(request())
        delta = parser.take(said(content=" 😀", tokens=[5], tokens_predicted=3))
        assert list(delta.token_ids) == [6, 4, 5]

    def test_tokens_that_are_never_said_are_counted(self) -> None:
        parser = llama().parser(request())
        parser.take(said())
        end = parser.take(said(stop=True, stop_type="limit", tokens=[], tokens_predicted=3))
        assert end.unsaid == 2

    @pytest.mark.parametrize(
        "line",
        [
            b"data: {",
            b"data: []",
            b"data: {}",
            said(tokens=[-1]),
            said(tokens=["x"]),
            said(tokens=[1, 2], tokens_predicted=1),
            said(content="zz", tokens_predicted=3),
            said(content="😀", tokens=[5], tokens_predicted=9),
            said(stop=True, stop_type="magic"),
            b"\xff\xfe",
        ],
    )
    def test_what_cannot_be_right_is_an_error_of_the_engine(self, line: bytes) -> None:
        with pytest.raises(PartitionLost):
            llama().parser(request()).take(line)

    def test_log_probabilities_come_with_their_tokens(self) -> None:
        likely = [{"id": 1, "logprob": -0.5}, {"id": 2, "logprob": -1.0}]
        scored = [{"id": 1, "logprob": -0.5, "top_logprobs": likely}]
        parser = llama().parser(request(logprobs=2))
        (one,) = parser.take(said(completion_probabilities=scored)).scored
        assert (one.logprob, one.rank, one.top) == (-0.5, 1, ((1, -0.5), (2, -1.0)))
        (none,) = parser.take(said(tokens_predicted=2)).scored
        assert none.rank == 0

    def test_a_request_says_what_a_session_asks_for(self) -> None:
        body = llama().body(
            request(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, logit_bias=((3, -2.0),))
        )
        assert body["prompt"] == [5, 6, 7]
        assert (body["n_predict"], body["stream"], body["return_tokens"]) == (10, True, True)
        assert (body["temperature"], body["top_k"], body["min_p"]) == (0.5, 4, 0.1)
        assert body["logit_bias"] == [[3, -2.0]]
        assert body["samplers"].index("temperature") < body["samplers"].index("top_p")
        assert llama().body(request(temperature=0.9, top_k=1))["temperature"] == 0.0

    @pytest.mark.parametrize(
        ("field", "asked"),
        [
            ("min_tokens", {"min_tokens": 2, "max_tokens": 8}),
            ("allowed_token_ids", {"allowed_token_ids": (1,)}),
            ("bad_words", {"bad_token_ids": ((1, 2),)}),
            ("prompt_logprobs", {"prompt_logprobs": 1}),
        ],
    )
    def test_what_it_does_not_have_is_refused_by_name(
        self, field: str, asked: dict[str, object]
    ) -> None:
        with pytest.raises(InvalidInput) as caught:
            llama().body(request(**asked))
        assert caught.value.field == field

    def test_separators_of_grammars_are_texts(self) -> None:
        options = {"item_separator": ", ?", "key_separator": ": ?"}
        schema = {"description": '"key_separator": ": ?"', "x-guidance": options}
        body = llama().body(request(grammar=f"start: %json {json.dumps(schema)}"))
        said = json.loads(body["grammar"].partition("%json ")[2])
        assert said["x-guidance"] == {"item_separator": ", ", "key_separator": ": "}
        assert said["description"] == schema["description"]

    def test_it_gets_the_room_that_is_booked(self, tmp_path) -> None:
        command = llama_server_command(tmp_path / "m.gguf", ROOM, CPU, 2, ("n_ubatch=128",))
        given = json.loads(command.arguments[0])
        assert (given["n_parallel"], given["n_ctx"]) == (4, 4 * 512)
        assert given["kv_unified"] is False
        assert given["n_ubatch"] == 128
        shared = EngineBooking(sessions=8, session_tokens=500, tokens=1000)
        given = json.loads(llama_server_command(tmp_path / "m", shared, CPU, 1, ()).arguments[0])
        assert (given["n_parallel"], given["n_ctx"], given["kv_unified"]) == (8, 1024, True)

    @pytest.mark.parametrize(
        "argument", ["n_ctx=9", "hostnames=x", "model.path=/x", "what", "a=[]"]
    )
    def test_arguments_do_not_decide_what_the_agent_decides(self, tmp_path, argument: str) -> None:
        with pytest.raises(InvalidInput, match="engine_arguments"):
            llama_server_command(tmp_path / "m", ROOM, CPU, 1, (argument,))

    def test_its_capacity_is_read_from_its_page(self) -> None:
        page = {"total_slots": 3, "default_generation_settings": {"n_ctx": 100}}
        assert llama().capacity(json.dumps(page).encode()).tokens == 300
        with pytest.raises(PartitionLost):
            llama().capacity(b"{}")


class TestVllm:
    def test_tokens_and_ends_are_read(self) -> None:
        parser = VllmProtocol(4).parser(request())
        line = {"choices": [{"token_ids": [4, 5], "finish_reason": None}]}
        assert parser.take(b"data: " + json.dumps(line).encode()).token_ids == [4, 5]
        end = {"choices": [{"token_ids": [1], "finish_reason": "stop"}]}
        assert parser.take(b"data: " + json.dumps(end).encode()).finish == "stop"
        assert not parser.take(b"data: [DONE]").token_ids

    @pytest.mark.parametrize(
        "line",
        [
            b"data: nothing",
            b'data: {"choices": [{"text": "x"}]}',
            b'data: {"choices": [{"token_ids": [-4]}]}',
            b'data: {"error": {"message": "no more"}}',
            b'data: {"choices": [{"token_ids": [], "finish_reason": "abort"}]}',
        ],
    )
    def test_what_cannot_be_right_is_an_error_of_the_engine(self, line: bytes) -> None:
        with pytest.raises(PartitionLost):
            VllmProtocol(4).parser(request()).take(line)

    def test_log_probabilities_are_named_by_tokens(self) -> None:
        logprobs = {
            "tokens": ["token_id:4"],
            "token_logprobs": [-0.25],
            "top_logprobs": [{"token_id:4": -0.25, "token_id:9": -2.0}],
        }
        line = {"choices": [{"token_ids": [4], "logprobs": logprobs}]}
        (one,) = VllmProtocol(4).parser(request(logprobs=1)).take(json.dumps(line).encode()).scored
        assert (one.rank, one.top) == (1, ((4, -0.25),))

    def test_a_request_says_what_a_session_asks_for(self) -> None:
        asked = {"min_tokens": 3, "stop_token_ids": (2,), "bad_words": ("x",), "max_tokens": 9}
        body = VllmProtocol(4).body(request(**asked))
        assert (body["min_tokens"], body["stop_token_ids"], body["bad_words"]) == (3, [2], ["x"])
        assert body["return_token_ids"] is True
        with pytest.raises(InvalidInput):
            VllmProtocol(4).body(request(prompt_logprobs=0))

    def test_it_gets_the_room_that_is_booked(self, tmp_path) -> None:
        command = vllm_command(tmp_path, ROOM, 3 << 30, CPU, 2, ("--enforce-eager",))
        options = dict(zip(command.arguments, command.arguments[1:], strict=False))
        assert options["--max-num-seqs"] == "4"
        assert options["--max-model-len"] == "500"
        blocks, size = options["--num-gpu-blocks-override"], options["--block-size"]
        assert int(blocks) * int(size) >= 2000 + 4 * (int(size) - 1)
        assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
        assert "--trust-remote-code" not in command.arguments
        assert json.loads(options["--structured-outputs-config"]) == {"backend": "guidance"}

    @pytest.mark.parametrize(
        "argument",
        [
            *("--uds=/x", "--port", "--max-num-seqs=9", "--max_num_seqs=9", "--max-num-se=9"),
            *("-tp=2", "--enable-lora", "--lora-modules", "--max-loras=1"),
        ],
    )
    def test_arguments_do_not_decide_what_the_agent_decides(self, tmp_path, argument: str) -> None:
        with pytest.raises(InvalidInput, match="engine_arguments"):
            vllm_command(tmp_path, ROOM, 1, CPU, 1, (argument,))

    def test_several_gpus_are_shown_to_one_engine(
        self, tmp_path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
        ways = ("--tensor-parallel-size", "2")
        command = vllm_command(tmp_path, ROOM, 1, Device.parse("cuda:1"), 1, ways)
        assert command.environment["CUDA_VISIBLE_DEVICES"] == "5,6"

    def test_adapters_have_room_and_names_of_their_own(self, tmp_path) -> None:
        assert adapter_options(tmp_path, ()) == ()
        write_adapter(tmp_path / "adapters" / "terse", 4)
        write_adapter(tmp_path / "adapters" / "model", 20)
        places = (("terse", "adapters/terse"), ("model", "adapters/model"))
        options = adapter_options(tmp_path, places)
        pairs = dict(itertools.pairwise(options))
        assert (pairs["--max-loras"], pairs["--max-lora-rank"]) == ("2", "32")
        modules = [json.loads(each) for each in options[options.index("--lora-modules") + 1 :]]
        assert [each["path"] for each in modules] == [str(tmp_path / each) for _, each in places]
        asked = [replace(request(), adapter=name) for name in ("", "terse", "model")]
        names = [VllmProtocol(4).body(each)["model"] for each in asked]
        assert len(set(names)) == 3
        assert names[1:] == [each["name"] for each in modules]

    @pytest.mark.parametrize(
        ("said", "words"),
        [
            ({}, "says no rank"),
            ({"r": "8"}, "says no rank"),
            ({"r": 8, "rank_pattern": {"q_proj": 1024}}, "says no rank"),
            ([], "is not an object"),
        ],
    )
    def test_what_is_no_adapter_is_not_given_to_it(self, tmp_path, said, words: str) -> None:
        write_adapter(tmp_path / "a")
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(said))
        with pytest.raises(InvalidInput, match=words):
            adapter_options(tmp_path, (("a", "a"),))

    def test_pickled_weights_are_not_given_to_it(self, tmp_path) -> None:
        write_adapter(tmp_path / "a")
        (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
        with pytest.raises(InvalidInput, match=r"has no adapter_model\.safetensors"):
            adapter_options(tmp_path, (("a", "a"),))

    def test_its_capacity_is_read_from_its_metrics(self) -> None:
        page = b'# HELP\nvllm:cache_config_info{block_size="16",num_gpu_blocks="11"} 1.0\n'
        assert VllmProtocol(4).capacity(page).tokens == 160
        with pytest.raises(PartitionLost):
            VllmProtocol(4).capacity(b"nothing")


def test_grammars_are_schemas_or_lark() -> None:
    assert grammar_parts('{"grammars": [{"json_schema": {"type": "object"}}]}') == (
        {"type": "object"},
        "",
    )
    assert grammar_parts('start: "a"') == (None, 'start: "a"')
    assert grammar_parts('{"grammars": [{"lark_grammar": "start: /b/"}]}') == (None, "start: /b/")
    with pytest.raises(InvalidInput):
        grammar_parts('{"grammars": [{}, {}]}')


def test_grammars_of_several_parts_become_one() -> None:
    tokens = TokenVocabulary(tiny_tokenizer().to_str(), MORE, (END,))

    def admits(grammar: str, text: str) -> bool:
        matcher = tokens.matcher(grammar)
        try:
            matcher.accept(tokens_of(text))
        except InvalidInput:
            return False
        return bool(matcher.allowed()[END])

    answer = {"name": "answer", "lark_grammar": 'start: "call @answer" | @content'}
    schema = {"type": "array", "items": {"enum": ["@content", 1]}}
    content = {"name": "content", "json_schema": schema}
    first = {"lark_grammar": 'start: "@answer" thought @answer\nthought: /[a-z]*@answer/\n'}
    parts = json.dumps({"grammars": [first, answer, content]})
    none, lark = grammar_parts(parts)
    assert none is None
    for text, is_right in [
        ("@answerabc@answer[1]", True),
        ('@answer@answer["@content", 1]', True),
        ("@answer@answercall @answer", True),
        ("@answer@answer[2]", False),
        ("@answer[1]", False),
        ("part_answer@answer[1]", False),
    ]:
        assert admits(parts, text) is is_right
        assert admits(lark, text) is is_right
