"""Reasoning is taken out of an answer, in pieces of any size, and nothing of it is content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_gateway.generation.forms.calls.hermes import HermesParser
from catenary_gateway.generation.forms.events import (
    AnswerEvent,
    ContentParser,
    ContentPiece,
    ReasoningPiece,
)
from catenary_gateway.generation.forms.reasoning import (
    ReasoningForm,
    ReasoningParser,
    ThinkingState,
)

UNDECIDED, THINKING, ANSWERING = ThinkingState
TAGS = ReasoningForm(assumed=False)
ALWAYS = ReasoningForm(assumed=True)


def read(begin: ThinkingState, *pieces: str) -> tuple[str, str]:
    """Returns reasoning and content."""
    parser = ReasoningParser(begin, ContentParser())
    events: list[AnswerEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    events += parser.end()
    thought = [event.text for event in events if isinstance(event, ReasoningPiece)]
    said = [event.text for event in events if isinstance(event, ContentPiece)]
    assert all(thought + said)
    return "".join(thought), "".join(said)


@pytest.mark.parametrize(
    ("begin", "text", "thought", "said"),
    [
        (UNDECIDED, "<think>\nHm, 1 < 2.\n</think>\n\nYes.", "Hm, 1 < 2.", "Yes."),
        (UNDECIDED, "\n<think>\n\n</think>\n\nYes.", "", "Yes."),
        (UNDECIDED, " Yes. <think>no</think>", "", " Yes. <think>no</think>"),
        (UNDECIDED, "<thi", "", "<thi"),
        (UNDECIDED, "", "", ""),
        (UNDECIDED, "<think>cut o", "cut o", ""),
        (UNDECIDED, "<think>cut </thi", "cut </thi", ""),
        (THINKING, "Hm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        (THINKING, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        (THINKING, "a </think> b </think> c", "a", "b </think> c"),
        (THINKING, "\n a \n\n b ", "a \n\n b", ""),
        (ANSWERING, "\n\nYes.", "", "Yes."),
        (ANSWERING, "<think>x</think>", "", "<think>x</think>"),
    ],
)
def test_reasoning_and_content_are_told_apart(
    begin: ThinkingState, text: str, thought: str, said: str
) -> None:
    assert read(begin, text) == (thought, said)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = (text[:first], text[first:second], text[second:])
            assert read(begin, *pieces) == (thought, said), pieces


@given(
    st.sampled_from(list(ThinkingState)),
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</th", "think>", " ", "\n", "so", "\u00e4"]),
        max_size=12,
    ),
)
def test_any_answer_is_read_alike_in_any_pieces(begin: ThinkingState, pieces: list[str]) -> None:
    text = "".join(pieces)
    thought, said = read(begin, *pieces)
    assert (thought, said) == read(begin, text) == read(begin, *text)
    bare = text.replace("<think>", "").replace("</think>", "")
    letters = [char for char in thought + said if char not in "<think>/ \n"]
    assert letters == [char for char in bare if char not in "<think>/ \n"]


def test_prompts_say_how_an_answer_begins() -> None:
    for prompt, state in (
        ("<|im_start|>assistant\n", UNDECIDED),
        ("<|im_start|>assistant\n<think>\n", THINKING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ANSWERING),
        ("<think>a</think><|im_start|>assistant\n", UNDECIDED),
    ):
        assert TAGS.begin(prompt) is state
        assert ALWAYS.begin(prompt) is (THINKING if state is UNDECIDED else state)


def test_reasoning_is_given_as_it_comes_and_calls_are_read_behind_it() -> None:
    parser = ReasoningParser(THINKING, HermesParser(["find"], lambda: "an id"))
    assert list(parser.push("I could <tool_call>")) == [ReasoningPiece("I could <tool_call>")]
    call = '</think>\n\n<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    kinds = [type(event).__name__ for event in (*parser.push(call), *parser.end())]
    assert kinds == ["CallStart", "ArgumentsPiece", "CallComplete"]
