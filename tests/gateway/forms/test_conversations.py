"""Tools and earlier calls in prompts: as `transformers` has them, or as text where a template has
no place for them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from catenary_gateway.generation.forms.calls.hermes import HermesForm, HermesParser
from catenary_gateway.generation.forms.calls.llama import LlamaForm
from catenary_gateway.generation.forms.calls.mistral import MistralForm
from catenary_gateway.generation.forms.calls.plain_json import PlainJsonForm
from catenary_gateway.generation.forms.calls.tool_form import ToolForm
from catenary_gateway.generation.forms.conversations import written_out
from catenary_gateway.generation.forms.tool_use import ToolDefinition
from catenary_services.errors import InvalidInput
from chat_texts.tool_templates import DEEPSEEK, HERMES, LLAMA3, MISTRAL, QWEN3
from small_models.text_here import model_text
from small_models.tiny_tokenizer import TEMPLATE, text_model

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (
    ToolDefinition("weather", "Says the weather <there>.", CITY, strict=True),
    ToolDefinition("now"),
)
CALL = {
    "id": "call_0123456789",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich"}},
}
SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is it outside?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "name": "weather", "content": "12 °C"},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize("template", [HERMES, QWEN3, LLAMA3])
@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_templates_get_tools_and_calls_as_from_transformers(
    tmp_path: Path, template: str, tools: tuple[ToolDefinition, ...]
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = text_model(tmp_path, template=template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        SAID,
        tools=[tool.document for tool in tools] or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    text = model_text(folder).render(SAID, {}, tools)
    assert text == expected
    assert "Zürich" in text
    assert ("Says the weather <there>." in text) == bool(tools)
    assert "strict" not in text


def test_the_template_named_tool_use_is_for_tools_only(tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].function.name if tools else 'calls' }}"},
        {"name": "rag", "template": "{{"},
    ]
    config.write_text(json.dumps({"chat_template": named}))
    codec = model_text(folder)
    assert codec.render(SAID[:2], {}) == "plain"
    assert codec.render(SAID[:2], {}, TOOLS) == "weather"
    assert codec.render(SAID, {}) == "calls"


def test_ids_of_other_models_are_made_fit_for_a_template(tmp_path: Path) -> None:
    codec = model_text(text_model(tmp_path, template=MISTRAL))
    text = codec.render(SAID[1:], {}, TOOLS)
    (called,) = re.findall(r'"id": "(\w{9})"', text)
    assert f"12 °C{called}[/TOOL_RESULTS]" in text
    form = MistralForm(later=False)
    own = form.new_id(random.Random(4))
    assert form.own_id(own) == own
    assert len(own) == 9
    assert HermesForm().new_id(random.Random(4)).startswith("call_")


def test_a_template_without_tools_gets_them_as_text(tmp_path: Path) -> None:
    codec = model_text(text_model(tmp_path, template=TEMPLATE))
    text = codec.render(SAID, {}, TOOLS)
    system, user, call, result, last, answer = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n# Tools")
    assert json.dumps(TOOLS[0].document) in system
    assert "<tool_call>\n{" in system
    assert user == "user\nHow is it outside?<|im_end|>\n"
    events = HermesParser(["weather"], lambda: "").push(call)
    assert any(getattr(event, "text", "") == '{"city": "Zürich"}' for event in events)
    assert result == "user\n<tool_response>\n12 °C\n</tool_response><|im_end|>\n"
    assert (last, answer) == ("user\nAnd now?<|im_end|>\n", "assistant\n")
    # Without a system message there is one for the tools; without tools there is none.
    alone = codec.render(SAID[1:2], {}, TOOLS)
    assert alone.startswith("<|im_start|>system\n# Tools")
    assert "# Tools" not in codec.render(SAID, {})


def test_results_of_several_calls_are_one_message() -> None:
    calls = [CALL, CALL | {"id": "b"}]
    said = [
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": CALL["id"], "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]
    told = written_out(said, (), HermesForm())
    assert [message["role"] for message in told] == ["user", "assistant", "user"]
    assert str(told[1]["content"]).startswith("Let me see.\n<tool_call>")
    assert str(told[1]["content"]).count("<tool_call>") == 2
    assert told[2]["content"] == (
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    )


@pytest.mark.parametrize(
    "form", [HermesForm(), LlamaForm(), MistralForm(later=False), PlainJsonForm()]
)
def test_a_form_is_shown_as_it_is_read(form: ToolForm) -> None:
    (told, *_) = written_out([{"role": "user", "content": "x"}], TOOLS, form)
    shown = str(told["content"]).rpartition("exactly like this:\n")[2]
    pattern = f'{{"name": <function-name>, "{form.arguments_key}": <args-json-object>}}'
    assert shown == form.written([pattern])
    written = shown.replace("<function-name>", '"now"').replace("<args-json-object>", '{"a": 1}')
    parser = form.parser(["now"], lambda: "id")
    kinds = [type(event).__name__ for event in (*parser.push(written), *parser.end())]
    assert kinds == ["CallStart", "ArgumentsPiece", "CallComplete"]


def test_a_template_may_refuse_a_conversation_with_calls(tmp_path: Path) -> None:
    codec = model_text(text_model(tmp_path, template=LLAMA3))
    twice = [SAID[1], SAID[2] | {"tool_calls": [CALL, CALL]}]
    with pytest.raises(InvalidInput, match="one call at a time"):
        codec.render(twice, {}, TOOLS)


def test_reasoning_of_earlier_answers_is_the_templates_to_show(tmp_path: Path) -> None:
    said = [SAID[1], {"role": "assistant", "content": "Cold.", "reasoning_content": "Hm."}]
    text = model_text(text_model(tmp_path, template=QWEN3)).render(said, {})
    assert text.startswith("<think>\nHm.\n</think>")
    other = model_text(text_model(tmp_path, "other", template=DEEPSEEK)).render(said, {})
    assert "Hm." not in other
