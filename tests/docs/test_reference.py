"""The generated reference is complete: nothing one can call, set, read or get back is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor

import catenary
from catenary_gateway.openai_http.paths import ROUTES
from catenary_protos.catenary.v1 import (
    admin_pb2,
    agent_pb2,
    common_pb2,
    frame_pb2,
    generation_pb2,
    scheduler_pb2,
)
from catenary_protos.inference import grpc_predict_v2_pb2
from catenary_services import errors
from catenary_services.grpc import error_tables
from catenary_services.security import roles
from catenary_services.telemetry.metric_table import declared_metrics
from catenary_services.telemetry.metrics import Metrics
from catenaryd.command_line import cli
from cluster_harness import ROOT
from docs_build.pages import turned
from docs_build.reference.commands import client_command, leaves
from docs_build.reference.http import DESCRIPTIONS, served_routes
from docs_build.reference.settings import PROCESSES

PROTOCOLS = (
    admin_pb2,
    agent_pb2,
    common_pb2,
    frame_pb2,
    generation_pb2,
    scheduler_pb2,
    grpc_predict_v2_pb2,
)


@pytest.fixture(scope="module")
def pages(generated: dict[str, str]) -> dict[str, str]:
    return {place.removeprefix("reference/"): text for place, text in generated.items()}


def _row(page: str, start: str) -> str:
    """Returns the line of a table that begins with `start`."""
    found = [line for line in page.splitlines() if line.startswith(start)]
    assert len(found) == 1, f"{start!r} is there {len(found)} times"
    return found[0]


@pytest.mark.parametrize("module", PROTOCOLS, ids=lambda module: module.__name__)
def test_every_method_message_and_field_has_its_row(module, pages) -> None:
    file: FileDescriptor = module.DESCRIPTOR
    page = pages["grpc-" + file.name.removesuffix(".proto").replace("/", "-") + ".md"]
    for service in file.services_by_name.values():
        section = page.split(f"## Service `{service.full_name}`")[1].split("\n## ")[0]
        for method in service.methods:
            assert f"`{method.name}`" in section
    for message in _messages(file.message_types_by_name.values()):
        heading = message.full_name.removeprefix(f"{file.package}.")
        assert f"\n## {heading}\n" in page
        section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        for field in message.fields:
            _row(section, f"| {field.number} | `{field.name}` |")


def _messages(found) -> Iterator[Descriptor]:
    for message in found:
        if not message.GetOptions().map_entry:
            yield message
            yield from _messages(message.nested_types)


def test_comments_of_the_protos_are_there(pages) -> None:
    row = _row(pages["grpc-catenary-v1-admin.md"], '| <span id="admin-replan"></span>`Replan`')
    assert "Plans anew for the agents and the load there are now" in row


@pytest.mark.parametrize("section", PROCESSES)
def test_every_setting_has_type_default_variable_and_sentence(section, pages) -> None:
    page = pages["settings.md"]
    own = page.split(f"## {section.capitalize()}\n")[1].split("\n## ")[0]
    every = page.split("## Every process\n")[1].split("\n## ")[0]
    for name, field in PROCESSES[section].model_fields.items():
        row = _row(every + own, f"| `{name}` |")
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 5
        assert all(cells), row
        assert f"`CATENARY_{name.upper()}`" in cells
        assert field.description


def test_defaults_are_those_in_force(pages) -> None:
    assert "| `8004` |" in _row(pages["settings.md"].split("## Scheduler")[1], "| `port` |")
    assert "| must be given |" in _row(pages["settings.md"], "| `agent_id` |")


def test_every_metric_is_there_with_its_kind_and_labels(pages) -> None:
    page = pages["metrics.md"]
    families = list(Metrics().registry.collect())
    assert len(families) > 50
    for family in families:
        full = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"| {family.type}" in _row(page, f"| `{full}` |")
    for metric in declared_metrics().values():
        full = re.escape(f"{metric.prefix}_{metric.name}")
        (row,) = re.findall(rf"^\| `{full}(?:_total)?` \|.*$", page, re.M)
        assert all(f"`{label}`" in row for label in metric.labels)


def test_every_error_is_there_with_its_status(pages) -> None:
    def leaves_of(kind: type[errors.CatenaryError]) -> list[type[errors.CatenaryError]]:
        below = [leaf for child in kind.__subclasses__() for leaf in leaves_of(child)]
        return below or [kind]

    ours = [kind for kind in leaves_of(errors.CatenaryError) if kind.__module__ == errors.__name__]
    assert len(ours) > 12
    for kind in ours:
        row = _row(pages["errors.md"], f'| <span id="{kind.reason.lower()}"></span>`{kind.reason}`')
        status = error_tables.TABLE[kind]
        assert f"| `{status.grpc.name}` | {status.http} |" in row


def test_who_may_call_is_said_of_every_method_that_is_served(pages) -> None:
    page = pages["access.md"]
    for method, rule in roles.RULES.items():
        row = _row(page, f"| `{method.lstrip('/')}` |")
        assert all(role.value in row or "any process" in row for role in rule.roles)
    for module in PROTOCOLS:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert f"`{service.full_name}/{method.name}`" in page


def test_every_route_is_there_and_no_other(pages) -> None:
    assert set(DESCRIPTIONS) == set(served_routes())
    defined = [
        found
        for file in (ROOT / "gateway").rglob("*.py")
        for found in re.findall(r"web\.(?:get|post|put|patch|delete|route)\(", file.read_text())
    ]
    assert len(defined) + len(ROUTES) == len(DESCRIPTIONS)
    for method, path in DESCRIPTIONS:
        _row(pages["http.md"], f"| {method} | `{path}` |")


@pytest.mark.parametrize(
    ("page", "root"),
    [("catenaryd.md", cli), ("catenary.md", client_command())],
    ids=["catenaryd", "catenary"],
)
def test_every_command_is_there_with_its_options(page, root, pages) -> None:
    program = page.removesuffix(".md")
    commands = list(leaves(root, program))
    assert len(commands) > 10
    for path, command in commands:
        section = pages[page].split(f"## {path}\n")[1].split("\n## ")[0]
        shared = (
            pages[page].split("## Options of every command")[-1] if program == "catenary" else ""
        )
        for parameter in command.params:
            if parameter.opts[0].startswith("-") and not parameter.hidden:
                assert f"`{parameter.opts[0]}`" in section + shared, f"{path} {parameter.opts}"


def test_the_sdk_page_lists_everything_the_package_offers(pages) -> None:
    listed = re.findall(r"^::: catenary\.(\w+)$", pages["sdk.md"], re.M)
    assert sorted(listed) == sorted(catenary.__all__)


def test_links_that_leave_the_documents_say_where_the_file_is() -> None:
    text = "[the SDK](../client/README.md#errors), [make](../Makefile), [models](models.md#blocks)"
    assert turned(text, "docs/page.md", "page.md") == (
        "[the SDK](reference/sdk-guide.md#errors), make (`Makefile`), [models](models.md#blocks)"
    )
    assert turned("[no](../nothing.md)", "docs/page.md", "page.md") == "[no](../nothing.md)"


def test_every_generated_page_has_a_place_in_the_navigation(pages) -> None:
    navigation = Path(ROOT / "mkdocs.yml").read_text()
    assert [name for name in pages if f"reference/{name}" not in navigation] == []
