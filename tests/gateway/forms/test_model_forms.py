"""The forms of a model are what its settings say, else what its template shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from catenary_gateway.generation.forms.calls.hermes import HermesForm
from catenary_gateway.generation.forms.calls.llama import LlamaForm
from catenary_gateway.generation.forms.calls.mistral import MistralForm
from catenary_gateway.generation.forms.calls.plain_json import PlainJsonForm
from catenary_gateway.generation.forms.model_forms import forms_of
from catenary_gateway.generation.forms.reasoning import ReasoningForm
from catenary_gateway.generation.text.text_codec import TextCodecs
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput, NoActivePlan
from catenary_services.models.model_repository import REASONING_PARSERS, TOOL_PARSERS
from chat_texts.tool_templates import (
    DEEPSEEK,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_LATER,
    QWEN3,
    THINKING,
    XML_CALLS,
)
from small_models.text_here import model_text
from small_models.tiny_tokenizer import MORE, TEMPLATE, text_model

TAGS, ALWAYS = ReasoningForm(assumed=False), ReasoningForm(assumed=True)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (TEMPLATE, HermesForm, None),
        (HERMES, HermesForm, None),
        (QWEN3, HermesForm, TAGS),
        (THINKING, HermesForm, TAGS),
        (LLAMA3, LlamaForm, None),
        (MISTRAL, MistralForm, None),
        (MISTRAL_LATER, MistralForm, None),
        (DEEPSEEK, HermesForm, ALWAYS),
        (XML_CALLS, PlainJsonForm, None),
    ],
)
def test_forms_are_recognised_from_the_template(
    tmp_path: Path, template: str, tools: type, reasoning: ReasoningForm | None
) -> None:
    forms = model_text(text_model(tmp_path, template=template)).forms
    assert type(forms.tools) is tools
    assert forms.reasoning == reasoning


async def test_settings_come_before_the_template(tmp_path: Path) -> None:
    settings = "tool_parser: mistral\nreasoning_parser: none"
    text_model(tmp_path, "set", template=QWEN3, settings=settings)
    forms = (await TextCodecs(tmp_path).of(ModelKey("set", "1"))).forms
    assert isinstance(forms.tools, MistralForm)
    assert forms.reasoning is None
    text_model(tmp_path, "off", template=QWEN3, settings="tool_parser: none")
    codec = await TextCodecs(tmp_path).of(ModelKey("off", "1"))
    assert codec.forms.tools is None
    assert codec.forms.reasoning == TAGS


async def test_settings_that_make_no_sense_are_the_models_and_not_the_callers(
    tmp_path: Path,
) -> None:
    text_model(tmp_path, "wrong", settings="tool_parser: smoke-signals")
    with pytest.raises(NoActivePlan) as caught:
        await TextCodecs(tmp_path).of(ModelKey("wrong", "1"))
    assert isinstance(caught.value.__cause__, InvalidInput)
    assert caught.value.__cause__.field == "wrong:1/model.yaml.tool_parser"


def test_every_name_of_the_settings_is_a_form() -> None:
    for name in TOOL_PARSERS:
        for other in REASONING_PARSERS:
            forms = forms_of("", {}, shows_tools=True, tool_parser=name, reasoning_parser=other)
            assert (forms.tools is None) == (name == "none")
            assert (forms.reasoning is None) == (other in ("none", "auto"))


def test_special_tokens_are_known_by_their_texts(tmp_path: Path) -> None:
    folder = text_model(tmp_path, template=MISTRAL, special=("[TOOL_CALLS]",))
    assert model_text(folder).forms.special_tokens["[TOOL_CALLS]"] == MORE
