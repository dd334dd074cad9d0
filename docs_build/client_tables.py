"""The tables on docs/clients.md, from the record of what clients of others do.

`make ecosystem RECORD=1` runs the clients, writes the record and then, by
`python -m docs_build.client_tables`, the page.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from docs_build.reference.markdown import prose, replace_between, table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/clients.md"
RECORD = ROOT / "docs/clients.json"
BEGIN = "<!-- clients: written by docs_build/client_tables.py -->"
END = "<!-- end of clients -->"
STATES = ("works", "partly", "no")
TITLES = {
    "aiperf": "AIPerf",
    "anthropic": "anthropic",
    "guidellm": "GuideLLM",
    "instructor": "instructor",
    "kserve": "KServe",
    "langchain": "LangChain",
    "litellm": "LiteLLM",
    "llama_index": "LlamaIndex",
    "llm": "llm",
    "mlserver": "MLServer",
    "open_webui": "Open WebUI",
    "openai": "openai",
    "pydantic_ai": "Pydantic AI",
    "tritonclient": "tritonclient",
}
"""The name of each client as its makers write it, by that of its file of requirements."""


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one feature of a client; the reason is empty if it works."""

    feature: str
    state: Literal["works", "partly", "no", "failed"]
    reason: str = ""


class Client(msgspec.Struct, frozen=True):
    """A release of a client and all that was tried with it."""

    version: str
    features: tuple[Outcome, ...]


def clients() -> list[str]:
    """Returns the names of all clients: each has a file of requirements."""
    return sorted(file.stem for file in (ROOT / "requirements/ecosystem").glob("*.txt"))


def recorded() -> dict[str, Client]:
    """Returns the record: every client by its name."""
    return msgspec.json.decode(RECORD.read_bytes(), type=dict[str, Client])


def save(name: str, client: Client) -> None:
    """Replaces one client in the record."""
    found = recorded() | {name: client}
    ordered = {each: found[each] for each in sorted(found)}
    text = msgspec.json.format(msgspec.json.encode(ordered), indent=1)
    RECORD.write_bytes(text + b"\n")


def tables() -> str:
    """Returns the part of the page between its marks."""
    found = recorded()
    rows = []
    for name, client in found.items():
        counts: Counter[str] = Counter(each.state for each in client.features)
        counted = (str(counts[state]) for state in STATES)
        anchor = TITLES[name].lower().replace(" ", "-")
        rows.append((f"[{TITLES[name]}](#{anchor})", client.version, *counted))
    parts = [BEGIN, table(("client", "release", *STATES), rows)]
    for name, client in found.items():
        outcomes = [(prose(e.feature), e.state, prose(e.reason)) for e in client.features]
        head = (f"release {client.version}", "", "because")
        parts += [f"### {TITLES[name]}", table(head, outcomes)]
    return "\n\n".join([*parts, END])


if __name__ == "__main__":
    replace_between(PAGE, BEGIN, END, tables())
