"""Settings become flags and flags become settings, without loss."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from catenary_agent.settings import AgentSettings
from catenary_gateway.settings import GatewaySettings
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.settings import ProcessSettings
from catenaryd.process_options import command_line_of, given, settings_options


def parsed(cls: type[ProcessSettings], arguments: list[str]) -> dict[str, object]:
    seen: dict[str, object] = {}

    @click.command()
    @settings_options(cls)
    def command(**flags: object) -> None:
        seen.update(given(flags))

    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    return seen


@pytest.mark.parametrize("cls", [GatewaySettings, SchedulerSettings, AgentSettings])
def test_every_setting_is_an_option_with_a_description(cls: type[ProcessSettings]) -> None:
    @click.command()
    @settings_options(cls)
    def command(**flags: object) -> None: ...

    text = CliRunner().invoke(command, ["--help"]).output
    for name, field in cls.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert field.description


def test_flags_survive_the_way_through_a_command_line() -> None:
    flags: dict[str, object] = {
        "insecure": True,
        "log_json": False,
        "port": 8123,
        "models": ["a", "b:2"],
        "model_repository": Path("models"),
        "lease_s": 1.5,
        "scheduler_id": "s",
    }
    assert parsed(SchedulerSettings, command_line_of(flags)) == flags


def test_what_was_not_given_does_not_hide_other_sources() -> None:
    assert parsed(GatewaySettings, []) == {}
    assert command_line_of({"plan_file": None}) == []
