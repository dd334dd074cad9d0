"""Chat templates and tokenizers against `transformers`, which everyone's models are made with."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_gateway.generation.text.jailed.chat_template import ChatTemplate
from catenary_gateway.generation.text.text_codec import TextCodecs
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput, NoActivePlan
from small_models.text_here import codec_of, model_text
from small_models.tiny_tokenizer import TEMPLATE, text_model, tokens_of

# The first test of all that asks for the model imports it.
pytestmark = pytest.mark.timeout(600)

CHATML = TEMPLATE
LLAMA2 = """{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = messages[0]['content'] %}
{% else %}
    {% set loop_messages = messages %}
    {% set system_message = false %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}{{- ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""
QWEN = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    {%- if message.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content|trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}{{ messages|tojson }}{{ ns.last }}{{ dict(a=1)|tojson }}"""

roles = st.sampled_from(["system", "user", "assistant"])
conversations = st.lists(
    st.fixed_dictionaries({"role": roles, "content": st.text(max_size=40)}),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, template in (("chatml", CHATML), ("llama2", LLAMA2), ("qwen", QWEN)):
        folder = text_model(tmp_path_factory.mktemp("models"), name)
        (folder / "chat_template.jinja").write_text(template)
        found[name] = folder
    return found


def reference(folder: Path):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", ["chatml", "llama2", "qwen"])
def test_conversations_become_the_text_and_tokens_of_transformers(
    folders: dict[str, Path], name: str
) -> None:
    theirs, ours = reference(folders[name]), model_text(folders[name])

    @settings(max_examples=60, deadline=None)
    @given(conversations, st.booleans())
    def check(messages: list[dict[str, str]], thinking: bool) -> None:
        variables = {"enable_thinking": thinking}
        try:
            expected = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **variables
            )
        except jinja2.TemplateError:
            with pytest.raises(InvalidInput, match="alternate"):
                ours.render(messages, variables)
            return
        text = ours.render(messages, variables)
        assert text == expected
        ids = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **variables
        )
        assert ours.encode(text, special_tokens=False) == ids

    check()


def test_the_demo_model_speaks_as_with_transformers() -> None:
    from language_model import KEY, shared_models
    from small_models.prompts import PROMPTS

    folder = shared_models().folder(KEY)
    theirs, ours = reference(folder), model_text(folder)
    assert ours.description().vocabulary_size == 49152
    turns = random.Random(4)
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        for _ in range(turns.randrange(3)):
            answer = turns.choice(["Yes — of course! 🙂", "```py\nprint('ä')\n```", " no "])
            messages += [{"role": "assistant", "content": answer}, messages[0]]
        if turns.random() < 0.5:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert ours.encode(ours.render(messages, {}), special_tokens=False) == expected
        assert ours.encode(prompt, special_tokens=True) == theirs(prompt)["input_ids"]


def test_a_template_cannot_leave_its_sandbox() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(InvalidInput, match="chat template says"):
            ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_what_a_template_trips_over_is_the_callers_mistake_to_see() -> None:
    for source in ("{{ messages[0].content + 1 }}", "{{ 1 / (messages|length - 1) }}"):
        with pytest.raises(InvalidInput, match="messages"):
            ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    with pytest.raises(InvalidInput, match="cannot be chosen"):
        ChatTemplate("x", {}).render([], {"messages": []})


def test_templates_are_found_wherever_transformers_keeps_them(tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    said = [{"role": "user", "content": "hi"}]
    for entry in ("A{{ eos_token }}", [{"name": "default", "template": "A{{ eos_token }}"}]):
        config.write_text(json.dumps({"eos_token": "</s>", "chat_template": entry}))
        assert model_text(folder).render(said, {}) == "A</s>"
    config.write_text("{}")
    codec = model_text(folder)
    assert not codec.description().chats
    with pytest.raises(InvalidInput, match="no chat template"):
        codec.render(said, {})


async def test_a_codec_is_read_once_and_again_after_a_failure(tmp_path: Path) -> None:
    codecs, key = TextCodecs(tmp_path), ModelKey("tiny", "1")
    with pytest.raises(NoActivePlan, match="tokenizer files"):
        await codecs.of(key)
    folder = text_model(tmp_path)
    codec = await codecs.of(key)
    (folder / "tokenizer.json").unlink()
    assert await codecs.of(key) is codec


async def test_expected_codecs_are_read_before_anyone_asks(tmp_path: Path) -> None:
    codecs, key = TextCodecs(tmp_path), ModelKey("tiny", "1")
    folder = text_model(tmp_path)
    codecs.expect([key, ModelKey("absent", "1")])
    await codecs._loads[key]
    (folder / "tokenizer.json").unlink()
    codecs.expect([key])
    assert (await codecs.of(key)).chats


async def test_files_that_make_no_sense_are_reported(tmp_path: Path) -> None:
    folder = text_model(tmp_path)
    for name, text in (
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% if %}"),
    ):
        kept = (folder / name).read_text()
        (folder / name).write_text(text)
        with pytest.raises(NoActivePlan):
            await TextCodecs(tmp_path).of(ModelKey("tiny", "1"))
        (folder / name).write_text(kept)


async def test_long_texts_are_encoded_as_short_ones(tmp_path: Path) -> None:
    codec = codec_of(model_text(text_model(tmp_path)))
    text = "Grüße " * 1000
    assert list(await codec.encode(text, special_tokens=False)) == tokens_of(text)
