"""Log probabilities in the forms of OpenAI's chats, OpenAI's completions, and vLLM's prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from catenary_gateway.generation.request import GenerationRequest, Prompt, ScoredToken, TextPrompt
from catenary_gateway.generation.text.answer_text import AnswerText
from catenary_gateway.generation.text.text_codec import TextCodec
from catenary_services.domain.logprobs import TokenLogprobs, unknown_logprobs

_Document = dict[str, Any]


def token_text(content: bytes) -> str:
    """Returns a token's text; that of a part of a character names its bytes, as OpenAI's does."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def chat_logprobs(codec: TextCodec, scored: Iterable[ScoredToken]) -> _Document:
    """Returns the `logprobs` of a chat's choice."""
    content = [
        {
            **_entry(codec, each.logprobs.token_id, each.logprobs.logprob),
            "top_logprobs": [_entry(codec, *pair) for pair in each.logprobs.top],
        }
        for each in scored
        if each.is_text
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    codec: TextCodec,
    scored: Iterable[ScoredToken],
    echoed: EchoedPrompt | None = None,
    start: int = 0,
) -> _Document:
    """Returns the `logprobs` of a completion's choice.

    Args:
        codec: The tokenizer of the model.
        scored: The tokens of the answer.
        echoed: The prompt, if its tokens come first.
        start: Characters of the text that are in front of the answer, if these are not the prompt.
    """
    rows: list[tuple[TokenLogprobs, int]] = [] if echoed is None else list(echoed.rows)
    start = start if echoed is None else len(echoed.text)
    rows += [(each.logprobs, start + each.offset) for each in scored if each.is_text]
    named = [
        {token_text(codec.token_bytes(token)): logprob for token, logprob in _with_own(each)}
        if each.rank
        else None
        for each, _ in rows
    ]
    return {
        "tokens": [token_text(codec.token_bytes(each.token_id)) for each, _ in rows],
        "token_logprobs": [each.logprob if each.rank else None for each, _ in rows],
        "top_logprobs": named,
        "text_offset": [offset for _, offset in rows],
    }


def prompt_logprobs(codec: TextCodec, scored: Sequence[TokenLogprobs], top: int) -> list[Any]:
    """Returns vLLM's `prompt_logprobs`: null for the first token, an object for each other one."""
    return [
        None,
        *(
            {
                str(token): {
                    "logprob": logprob,
                    "rank": each.rank if token == each.token_id else rank,
                    "decoded_token": token_text(codec.token_bytes(token)),
                }
                for rank, (token, logprob) in enumerate(_with_own(each, top), 1)
            }
            for each in scored
        ),
    ]


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as the beginning of a completion's text."""

    text: str
    rows: Sequence[tuple[TokenLogprobs, int]]
    """The tokens with the offsets of their texts; none without log probabilities."""

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        request: GenerationRequest,
        scored: Sequence[TokenLogprobs],
        top: int | None,
    ) -> EchoedPrompt:
        """Returns a prompt with the log probabilities of its tokens, named with `top` others.

        Without them (None) its tokens are left out.
        """
        text = AnswerText(request.codec.table, skips_special=request.sampling.skip_special_tokens)
        said = ""
        offsets: list[int] = []
        for token in request.prompt:
            offsets.append(text.length)
            said += text.push(token)
        said += text.end()
        if isinstance(prompt, TextPrompt):
            said = prompt.text
        rows: list[TokenLogprobs] = []
        if top is not None:
            rows.append(unknown_logprobs(request.prompt[0]))  # nothing precedes it
            rows += (each._replace(top=each.top[:top]) for each in scored)
        return cls(said, list(zip(rows, offsets, strict=False)))


def _entry(codec: TextCodec, token: int, logprob: float) -> _Document:
    content = codec.token_bytes(token)
    return {"token": token_text(content), "logprob": logprob, "bytes": list(content)}


def _with_own(each: TokenLogprobs, top: int | None = None) -> Iterable[tuple[int, float]]:
    """Returns the likeliest tokens with their log probabilities, and the token itself."""
    named = dict(each.top[:top])
    named.setdefault(each.token_id, each.logprob)
    return named.items()
