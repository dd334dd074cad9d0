"""Bodies of any shape: what they ask for, or a refusal that names the field; nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_gateway.generation.request import ChatPrompt, TextPrompt, TokenPrompt
from catenary_gateway.openai_http.completion_request import (
    CompletionRequest,
    chat_of,
    completion_of,
)
from catenary_gateway.tensors.json_documents import document_of
from catenary_services.errors import InvalidInput

FIELDS = (
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "best_of",
    "stream",
    "stream_options",
    "stop",
    "seed",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "tools",
    "min_tokens",
    "ignore_eos",
    "priority",
    "response_format",
    "echo",
    "suffix",
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "min_p",
    "chat_template_kwargs",
    "whatever",
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "text", "role", "content"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
MEANT = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "prompt": "x",
}


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_body_is_read_or_refused(fields: dict[str, object], meant: bool, chat: bool) -> None:
    document = (MEANT if meant else {}) | fields
    wanted, refusal = None, None
    try:
        wanted = (chat_of if chat else completion_of)(document)
    except InvalidInput as error:
        refusal = error
    if refusal is not None:
        assert refusal.details["field"]
    else:
        assert isinstance(wanted, CompletionRequest)
        assert wanted.model


def test_what_is_left_out_has_the_values_of_openai_and_vllm() -> None:
    chat, completion = chat_of(MEANT), completion_of(MEANT)
    for wanted, most in ((chat, 0), (completion, 16)):
        assert wanted.sampling.max_tokens == most
        assert (wanted.sampling.temperature, wanted.sampling.top_p) == (1.0, 1.0)
        assert not wanted.stream
    (prompt,) = chat.prompts
    assert isinstance(prompt, ChatPrompt)
    assert completion.prompts == [TextPrompt("x")]
    assert completion_of(MEANT | {"prompt": [1, 2]}).prompts == [TokenPrompt([1, 2])]
    both = completion_of(MEANT | {"prompt": ["a", [1]]})
    assert both.prompts == [TextPrompt("a"), TokenPrompt([1])]
    for wanted in (chat, completion):
        assert (wanted.choices, wanted.generated, wanted.echo) == (1, 1, False)
        assert (wanted.logprobs, wanted.sampling.logprobs) == (None, None)


def test_the_lowest_priority_number_goes_first_as_with_vllm() -> None:
    assert chat_of(MEANT | {"priority": -5}).priority == 5


@pytest.mark.parametrize(
    "bias",
    [
        {"x": 1},
        {"-1": 1},
        {"1.5": 1},
        {"\u0661": 1},
        {"1": "2"},
        {"1": True},
        {"1": 101},
        {"1": None},
        {"1": 1, "01": 2},
        {str(token): 1 for token in range(1025)},
        [1],
        {"9" * 11: 1},
    ],
)
def test_a_wrong_bias_is_refused_by_its_name(bias: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        chat_of(MEANT | {"logit_bias": bias})
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("body", [b"", b"null", b"[1]", b"\xff", b'{"a":', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput, match="body"):
        document_of(body)
    assert document_of(json.dumps(MEANT).encode()) == MEANT
