"""Chat templates, rendered exactly as `transformers` renders them, without that library.

Source: `transformers.utils.chat_template_utils` of release 5.23 (the environment, its filters and
globals) and `PreTrainedTokenizerBase.apply_chat_template` (dropped None values, special tokens).
Templates come from the model repository, conversations from strangers. A template sees only JSON
values of a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from catenary_gateway.generation.forms.conversations import Message
from catenary_services.errors import InvalidInput

_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles the source of a template.

        Raises:
            jinja2.TemplateSyntaxError: The source is not a valid template.
        """
        environment = _environment()
        self.source = source
        try:
            self._template = environment.from_string(source)
            names = list(environment.parse(source).find_all(jinja2.nodes.Name))
        except RecursionError:
            raise jinja2.TemplateSyntaxError("it is nested too deeply", 1) from None
        except SyntaxError as error:  # of the code that Jinja makes of it: a break outside loops
            raise jinja2.TemplateSyntaxError(error.msg, 1) from None
        self._special_tokens = dict(special_tokens)
        self.shows_tools = any(each.name == "tools" and each.ctx == "load" for each in names)
        """True if the template looks at the tools of a conversation."""

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns a conversation as text, up to the point where the answer begins.

        Args:
            messages: JSON objects with "role" and "content".
            variables: Further JSON values for the template ("enable_thinking").
            tools: Descriptions of tools, JSON objects.
            add_generation_prompt: False to leave out what stands before an answer.

        Raises:
            InvalidInput: The template refuses the conversation, or a variable has a reserved name.
        """
        chosen = dict(variables or {})
        for name in chosen.keys() & _RESERVED:
            raise InvalidInput("chat_template_kwargs", f"{name!r} cannot be chosen")
        plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            return self._template.render(
                {**self._special_tokens, **chosen},
                messages=plain,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise
        except Exception as error:
            # This includes errors of the template itself, such as for a role it does not expect.
            raise InvalidInput("messages", f"the model's chat template says: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks answers for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Returns the tag's content as a Jinja call block."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _render(self, caller: Any) -> str:
        return str(caller())


class _TemplateDict:
    """The part of `dict` that chat templates use."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """A Jinja `namespace` that refuses names with a leading underscore."""

    # As in Jinja, there is no parameter `self`, so that `namespace(self=...)` works.
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _TemplateNamespace._check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _TemplateNamespace._check_name(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would escape HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
