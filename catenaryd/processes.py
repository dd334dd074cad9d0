"""The commands `catenaryd scheduler`, `gateway` and `agent`: one process each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from catenary_agent.settings import AgentSettings
from catenary_gateway.settings import GatewaySettings
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.lifecycle import Process, run_process
from catenary_services.log import configure_logging, get_logger
from catenary_services.settings import ProcessSettings, describe, load_settings
from catenaryd.process_options import given, settings_options

S = TypeVar("S", bound=ProcessSettings)


def _run(kind: str, settings: S, instance: str, make: Callable[[S], Process]) -> None:
    configure_logging(kind, instance, settings.log_level, settings.log_json)
    get_logger("catenaryd").info("settings", **describe(settings))
    sys.exit(run_process(make(settings), settings.drain_timeout_s))


@click.command()
@settings_options(SchedulerSettings)
@click.pass_obj
def scheduler(config: Path | None, /, **flags: Any) -> None:
    """Runs a scheduler: plans, reserves, dispatches; leader or standby by a lease in Redis.

    Example: catenaryd scheduler --redis-url redis://127.0.0.1:6379 --model-repository models
    --models efficientnet-lite0 --insecure
    """
    from catenary_scheduler.process import SchedulerProcess
    from catenaryd.sources.child_importer import ChildImporter

    settings = load_settings(
        SchedulerSettings, file=config, section="scheduler", flags=given(flags)
    )
    importer = ChildImporter(settings.model_repository, settings.import_sources)
    _run(
        "scheduler",
        settings,
        settings.scheduler_id,
        lambda given: SchedulerProcess(given, importer=importer),
    )


@click.command()
@settings_options(GatewaySettings)
@click.pass_obj
def gateway(config: Path | None, /, **flags: Any) -> None:
    """Runs a gateway: the Open Inference Protocol over gRPC and HTTP.

    Example: catenaryd gateway --scheduler-addresses 127.0.0.1:8004 --insecure
    """
    from catenary_gateway.process import GatewayProcess

    settings = load_settings(GatewaySettings, file=config, section="gateway", flags=given(flags))
    _run("gateway", settings, settings.gateway_id, GatewayProcess)


@click.command()
@settings_options(AgentSettings)
@click.pass_obj
def agent(config: Path | None, /, **flags: Any) -> None:
    """Runs an agent: hosts partitions of models on one device.

    Example: catenaryd agent --agent-id agent-0 --device cuda:0 --model-repository models --insecure
    """
    from catenary_agent.process import AgentProcess

    settings = load_settings(AgentSettings, file=config, section="agent", flags=given(flags))
    _run("agent", settings, settings.agent_id, AgentProcess)
