"""The command `llm` with a model of `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from features import API_KEY, BASE_URL, CHAT_MODEL, feature, report

HOME = Path("llm")
HOME.mkdir()
COMMON = f"""\
  model_name: {CHAT_MODEL}
  api_base: {BASE_URL}/v1
  api_key_name: served
  supports_schema: true
  supports_tools: true
"""
(HOME / "extra-openai-models.yaml").write_text(
    f"- model_id: chat\n{COMMON}"
    f"- model_id: text\n{COMMON}  completion: true\n"
    f"- model_id: answers\n{COMMON}  responses: true\n"
)
SHORT = ("-o", "temperature", "0", "-o", "max_tokens", "8")
LONG = ("-o", "temperature", "0", "-o", "max_tokens", "200")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Paris", "Oslo"]}, "celsius": {"type": "boolean"}},
    "required": ["city", "celsius"],
    "additionalProperties": False,
}


def llm(*arguments: str) -> str:
    """Returns what the command prints."""
    environment = {**os.environ, "LLM_USER_PATH": str(HOME)}
    done = subprocess.run(
        ["llm", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout.strip()


llm("keys", "set", "served", "--value", API_KEY)


@feature("a prompt, streamed or with --no-stream, with --system and options")
def prompt() -> None:
    asked = ("-m", "chat", "Who are you?", *SHORT, "--system", "Be kind.")
    assert llm(*asked) == llm(*asked, "--no-stream") != ""


@feature("--continue, a conversation")
def conversation() -> None:
    llm("-m", "chat", "Who are you?", *SHORT)
    assert llm("--continue", "And me?", *SHORT)


@feature("--schema")
def schema() -> None:
    answer = json.loads(llm("-m", "chat", "Paris?", *LONG, "--schema", json.dumps(SCHEMA)))
    assert answer.keys() == {"city", "celsius"}


@feature(
    "--tool, --functions",
    partly="whether it calls is up to the model: llm cannot require a call",
)
def tools() -> None:
    functions = "def show_weather(city: str) -> str:\n    'Shows the weather.'\n    return '18'\n"
    assert llm("-m", "chat", "Paris?", *SHORT, "--functions", functions)


@feature("a model with `completion: true`")
def completions() -> None:
    assert llm("-m", "text", "The sky is", *SHORT)


@feature("a model with `responses: true`")
def responses() -> None:
    assert llm("-m", "answers", "Who are you?", "-o", "max_tokens", "16")


report("llm")
