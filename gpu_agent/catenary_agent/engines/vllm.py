"""The protocol of vLLM's OpenAI server: `/v1/completions` with numbers of tokens both ways.

Its sampler is its own: answers by temperature are as random as ours, but others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from catenary_agent.decoders.model_files.adapters import adapter_rank, room_of_rank
from catenary_agent.engines.requests import (
    NOTHING_NEW,
    EngineBooking,
    EngineCapacity,
    EngineCommand,
    EngineRequest,
    EngineTokens,
    grammar_parts,
    visible_devices,
)
from catenary_services.domain.logprobs import LOWEST_LOGPROB, TokenLogprobs, unknown_logprobs
from catenary_services.errors import InvalidInput, PartitionLost

if TYPE_CHECKING:
    from catenary_agent.executors.device import Device

_NAME = "model"
"""The name of the model between agent and engine."""
_GPU_BLOCK_TOKENS, _CPU_BLOCK_TOKENS = 16, 32
_GIB = 1 << 30
_CONFIGURATION = re.compile(rb"^vllm:cache_config_info\{(?P<labels>[^}\n]*)\}", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')
_PREFIX = "token_id:"
_SHORT_OPTION = re.compile(r"-[A-Za-z]")
_OWN = frozenset(
    {
        "--model",
        "--served-model-name",
        "--host",
        "--port",
        "--uds",
        "--tokenizer",
        "--max-model-len",
        "--max-num-seqs",
        "--num-gpu-blocks-override",
        "--block-size",
        "--api-key",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--root-path",
        "--config",
        "--data-parallel-size",
        "--pipeline-parallel-size",
        "--enable-lora",
        "--lora-modules",
        "--max-loras",
        "--max-lora-rank",
    }
)
"""The options that the agent decides."""
_WAYS = "--tensor-parallel-size"

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] = []


class _Choice(msgspec.Struct):
    token_ids: list[_Token] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class VllmProtocol:
    """Requests to vLLM's completions path, and what its answers say."""

    path = "/v1/completions"
    health_path = "/health"
    capacity_path = "/metrics"
    places = 0

    def __init__(self, sessions: int) -> None:
        """Asks for as many sequences at a time as are booked, because no page says their number."""
        self._sessions = sessions

    def body(self, request: EngineRequest, *, whole: bool = False) -> dict[str, Any]:
        """Returns the JSON object that asks for tokens; see `EngineProtocol.body`."""
        asked = request.parameters
        if asked.prompt_logprobs is not None:
            raise InvalidInput("prompt_logprobs", "an engine serves this model, and says none")
        made: dict[str, Any] = {
            "model": _name_of(request.adapter),
            "prompt": list(request.token_ids),
            "max_tokens": request.most_tokens,
            "min_tokens": request.least_tokens,
            "stream": not whole,
            "return_token_ids": True,
            "temperature": 0.0 if asked.greedy else asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "min_p": asked.min_p,
            "repetition_penalty": asked.repetition_penalty,
            "presence_penalty": asked.presence_penalty,
            "frequency_penalty": asked.frequency_penalty,
            "ignore_eos": asked.ignore_eos,
            "seed": request.seed,
            "skip_special_tokens": False,
        }
        if asked.stop_token_ids:
            made["stop_token_ids"] = list(asked.stop_token_ids)
        if asked.allowed_token_ids:
            made["allowed_token_ids"] = list(asked.allowed_token_ids)
        if asked.bad_words:
            made["bad_words"] = list(asked.bad_words)
        if asked.logit_bias:
            made["logit_bias"] = {str(token): value for token, value in asked.logit_bias}
        if asked.logprobs is not None:
            made |= {"logprobs": asked.logprobs, "return_tokens_as_token_ids": True}
        if asked.grammar:
            schema, lark = grammar_parts(asked.grammar)
            made["structured_outputs"] = (
                {"json": schema} if schema is not None else {"grammar": lark}
            )
        return made

    def parser(self, request: EngineRequest) -> _VllmAnswer:
        """Returns a parser for the answer to a request."""
        return _VllmAnswer(request.parameters.logprobs)

    def capacity(self, page: bytes) -> EngineCapacity:
        """Returns what `/metrics` says; see `EngineProtocol.capacity`."""
        found = _CONFIGURATION.search(page)
        labels = dict(_LABEL.findall(found["labels"])) if found is not None else {}
        try:
            blocks, size = int(labels[b"num_gpu_blocks"]), int(labels[b"block_size"])
        except (KeyError, ValueError):
            raise PartitionLost("vLLM does not say how many blocks of caches it has") from None
        # One block stands for places that nobody reads.
        return EngineCapacity(self._sessions, max(0, blocks - 1) * size)


class _VllmAnswer:
    """Reads the lines of one answer of vLLM."""

    def __init__(self, top: int | None) -> None:
        self._top = top

    def take(self, line: bytes) -> EngineTokens:
        """Returns what a line adds; see `AnswerParser.take`."""
        text = line.removeprefix(b"data: ")
        if not text or text.startswith(b":") or text == b"[DONE]":
            return NOTHING_NEW
        try:
            event = msgspec.json.decode(text, type=_Event)
        except msgspec.DecodeError:
            raise PartitionLost(f"vLLM said {text[:120].decode(errors='replace')!r}") from None
        if event.error is not None:
            raise PartitionLost(f"vLLM gave an answer up: {str(event.error)[:200]}")
        if not event.choices:
            return NOTHING_NEW
        choice = event.choices[0]
        tokens = choice.token_ids
        if tokens is None:
            raise PartitionLost("vLLM says no numbers of tokens: it is older than 0.10.2")
        finish = choice.finish_reason or ""
        if finish not in ("", "stop", "length"):
            raise PartitionLost(f"vLLM ended an answer by {finish[:40]!r}")
        return EngineTokens(tokens, self._scored(tokens, choice.logprobs), finish)

    def _scored(self, tokens: Sequence[int], said: _Logprobs | None) -> list[TokenLogprobs]:
        if self._top is None:
            return []
        if said is None or len(said.token_logprobs) != len(tokens):
            return [unknown_logprobs(token) for token in tokens]
        tops = said.top_logprobs or [None] * len(tokens)
        rows = zip(tokens, said.token_logprobs, tops, strict=False)
        return [self._score(token, logprob, top or {}) for token, logprob, top in rows]

    def _score(
        self, token: int, logprob: float | None, likely: dict[str, float | None]
    ) -> TokenLogprobs:
        pairs = [
            (int(name.removeprefix(_PREFIX)), _logprob(value))
            for name, value in likely.items()
            if name.removeprefix(_PREFIX).isdecimal()
        ]
        pairs.sort(key=lambda pair: -pair[1])
        # Beside the likeliest ones it names the token itself, of which it says no rank.
        rank = next((at for at, (each, _) in enumerate(pairs, 1) if each == token), len(pairs) + 1)
        return TokenLogprobs(token, _logprob(logprob), rank, tuple(pairs[: self._top]))


def vllm_command(
    folder: Path,
    booking: EngineBooking,
    cache_bytes: int,
    device: Device,
    threads: int,
    arguments: Sequence[str],
) -> EngineCommand:
    """Returns how vLLM is started with the room that is booked.

    Args:
        folder: The folder with config.json, tokenizer and safetensors.
        booking: The room.
        cache_bytes: Size of the caches that it is for.
        device: The device to compute on; with "--tensor-parallel-size N", the first of N.
        threads: Threads of the CPU, if that is the device.
        arguments: What the model's manifest adds: options of vLLM's server. Code that comes with a
            model is run only if they say so.

    Raises:
        InvalidInput: An argument decides what the agent decides.
    """
    for argument in arguments:
        name = _option(argument)
        # Its parser takes the beginning of a name for the name.
        if name and name != _WAYS and any(own.startswith(name) for own in (*_OWN, _WAYS)):
            raise InvalidInput("engine_arguments", f"{name} is decided by the agent")
        if _SHORT_OPTION.match(argument):
            raise InvalidInput("engine_arguments", f"{argument} has a long form: write that")
    # A sequence may leave most of its last block empty, and one block is for nobody.
    each = _CPU_BLOCK_TOKENS if device.kind == "cpu" else _GPU_BLOCK_TOKENS
    blocks = -(-booking.tokens // each) + booking.sessions + 1
    options = {
        "--model": str(folder),
        "--served-model-name": _NAME,
        "--uds": "{socket}",
        "--max-model-len": str(booking.session_tokens),
        "--max-num-seqs": str(booking.sessions),
        "--num-gpu-blocks-override": str(blocks),
        "--block-size": str(each),
        # Grammars are written for llguidance; it would take another library for simple ones.
        "--structured-outputs-config": '{"backend": "guidance"}',
    }
    variables = visible_devices(device, _ways(arguments))
    if device.kind == "cpu":
        variables |= {
            "OMP_NUM_THREADS": str(max(1, threads)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # It is asked for in GiB, and only what the blocks take is really used.
            "VLLM_CPU_KVCACHE_SPACE": str(1 + cache_bytes // _GIB),
        }
    pairs = [part for option in options.items() for part in option]
    return EngineCommand("vllm", (*pairs, "--disable-uvicorn-access-log", *arguments), variables)


def adapter_options(folder: Path, adapters: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the options by which vLLM serves the LoRA adapters of a model, all at a time.

    Raises:
        InvalidInput: An adapter is not what vLLM reads.
    """
    if not adapters:
        return ()
    rank = max(room_of_rank(adapter_rank(folder / place)) for _, place in adapters)
    modules = [{"name": _name_of(name), "path": str(folder / place)} for name, place in adapters]
    sizes = ("--max-loras", str(len(adapters)), "--max-lora-rank", str(rank))
    return ("--enable-lora", *sizes, "--lora-modules", *map(json.dumps, modules))


def _name_of(adapter: str) -> str:
    return f"{_NAME}:{adapter}" if adapter else _NAME


def _ways(arguments: Sequence[str]) -> int:
    """Returns the number of GPUs that the arguments ask for."""
    for number, each in enumerate(arguments):
        if _option(each) == _WAYS:
            _, _, value = each.partition("=")
            value = value or (arguments[number + 1] if number + 1 < len(arguments) else "")
            if not value.isdecimal() or not 1 <= int(value) <= 64:
                raise InvalidInput("engine_arguments", f"{_WAYS} {value!r} is not 1 to 64")
            return int(value)
    return 1


def _option(argument: str) -> str:
    """Returns the name of an option as vLLM knows it; empty for what is none."""
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else ""


def _logprob(value: float | None) -> float:
    return LOWEST_LOGPROB if value is None else max(LOWEST_LOGPROB, value)
