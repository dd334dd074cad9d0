"""The commands that only read: `status`, `models`, `top`, `requests` and `trace`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from catenary.client import Client
from catenary.command_line.kit import CommandOptions, command, console, fail, print_json, table
from catenary.recent import MOST_REQUESTS
from catenary.rpc.machines import LINK_COLUMNS, hardware_of, links_in_rows
from catenary.types import AgentInfo, ChainInfo, ClusterStatus, OutcomeCounts
from catenary.waterfall import render_waterfall, waterfall_markup

_FEWEST_REFRESH_S = 0.1
_BAR_CELLS = 20


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command(epilog="Example: catenary status --json")(status)
    app.command(epilog="Example: catenary models --target 127.0.0.1:8001")(models)
    app.command(epilog="Example: catenary top --interval 2")(top)
    app.command(epilog="Example: catenary requests --limit 10")(requests)
    app.command(epilog="Example: catenary trace 4f1c2a --json")(trace)


@command
def status(options: CommandOptions) -> None:
    """Show scheduler, agents and models at this moment."""
    with options.client() as client:
        found = client.status()
    if options.as_json:
        print_json(found)
    else:
        console().print(_status_page(found))


@command
def models(options: CommandOptions) -> None:
    """List the models of the server's repository."""
    with options.client() as client:
        found = client.models()
    if options.as_json:
        print_json(found)
    else:
        rows = ((m.name, m.version, m.ready, m.reason) for m in found)
        console().print(table(("MODEL", "VERSION", "READY", "REASON"), rows))


@command
def top(
    options: CommandOptions,
    interval: Annotated[float, typer.Option(help="Seconds between refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
) -> None:
    """Watch how busy the cluster is; in a pipe or with --json it prints once."""
    if not interval >= _FEWEST_REFRESH_S:
        fail(f"--interval must be at least {_FEWEST_REFRESH_S} s", 2)
    with options.client() as client:
        if options.as_json:
            print_json(client.status())
        elif once or not sys.stdout.isatty():
            console().print(_top_page(client.status()))
        else:
            _watch(client, interval)


@command
def requests(
    options: CommandOptions,
    limit: Annotated[
        int, typer.Option(min=1, max=MOST_REQUESTS, help="How many, the newest first.")
    ] = 20,
) -> None:
    """List the latest requests of a gateway; `catenary trace ID` explains one."""
    with options.client() as client:
        found = client.requests(limit)
    if options.as_json:
        print_json(found)
        return
    rows = (
        (r.request_id, r.model, r.outcome, r.total_ns / 1e6, r.ended_ago_ns / 1e9) for r in found
    )
    console().print(table(("REQUEST", "MODEL", "OUTCOME", "MS", "SECONDS AGO"), rows))


@command
def trace(
    options: CommandOptions,
    request_id: Annotated[
        str, typer.Argument(help="Id of a recent request; the latest one if left out.")
    ] = "",
) -> None:
    """Show where the time of one request went, as a waterfall."""
    with options.client() as client:
        found = client.trace(request_id)
    out = console()
    if options.as_json:
        print_json(found)
    elif out.is_terminal:
        out.print(Text.assemble(*waterfall_markup(found, out.width)), end="")
    else:
        typer.echo(render_waterfall(found, out.width))


def _watch(client: Client, interval: float) -> None:
    with Live(console=console(), auto_refresh=False, screen=True) as live:
        while True:
            live.update(_top_page(client.status()), refresh=True)
            time.sleep(interval)


def _status_page(found: ClusterStatus) -> Group:
    if found.scheduler_problem:
        return Group(
            f"no scheduler answers: {found.scheduler_problem}; this is what"
            f" {', '.join(found.gateways)} last heard\n",
            table(
                ("MODEL", "VERSION", "READY", "REASON"),
                ((m.name, m.version, m.ready, m.reason) for m in found.models),
            ),
        )
    redis = "connected" if found.redis_connected else f"NOT connected ({found.redis_problem})"
    summary = (
        f"scheduler {found.scheduler_id or '-'}  epoch {found.epoch}  plan {found.plan_id or '-'}\n"
        f"redis {redis}  gateways {', '.join(found.gateways) or '-'}\n"
        f"{found.queued_requests} requests queued, {found.batches_in_flight} batches in flight, "
        f"{found.live_reservations} reservations, {found.sessions_in_flight} sessions\n"
    )
    moving = sum(m.sessions_moving for m in found.models)
    if moving or found.moves_done or found.moves_failed:
        summary += (
            f"{moving} sessions move to another chain; {found.moves_done} have moved, "
            f"{found.moves_failed} could not\n"
        )
    if found.leaks_mended:
        summary += f"{found.leaks_mended} leaks mended in {found.audits} audits of the book\n"
    for problem in found.takeover_problems:
        summary += f"taking over: {problem}\n"
    if found.quarantined_records:
        summary += f"{found.quarantined_records} unreadable records of Redis are in quarantine\n"
    summary += _versions_line(found)
    agents = (
        (
            f"{a.agent_id} (group {a.group})" if found.groups else a.agent_id,
            a.device,
            a.device_class,
            a.state,
            a.utilisation_ratio * 100,
            _caches(a),
            _slowdown(a),
            ", ".join(a.partitions),
        )
        for a in found.agents
    )
    deployed = (
        (
            m.name,
            m.version,
            m.ready,
            m.pipelines,
            m.queued_requests,
            m.packing if m.chains else "-",
            _shares(m.outcomes),
            m.reason,
        )
        for m in found.models
    )
    pages: list[Text | Table] = [
        Text(summary),
        table(
            ("AGENT", "DEVICE", "CLASS", "STATE", "BUSY %", "CACHES", "SLOWDOWN", "PARTITIONS"),
            agents,
        ),
        Text(),
        table(
            (
                "MODEL",
                "VERSION",
                "READY",
                "PIPELINES",
                "QUEUED",
                "PACKING",
                "OF ALL THAT ARRIVED",
                "REASON",
            ),
            deployed,
        ),
    ]
    if found.links:
        pages[2:2] = [Text(), table(LINK_COLUMNS, links_in_rows(found.links))]
    if hardware := hardware_of(found.agents):
        pages[2:2] = [Text(), table(("AGENTS", "DEVICE"), hardware)]
    if fetches := list(_fetches(found)):
        titles_of_fetches = ("AGENT", "SERVER", "FETCHES", "BYTES", "OF", "DONE", "MB/S")
        pages[2:2] = [Text(), table(titles_of_fetches, fetches)]
    if impaired := list(_impairments(found)):
        columns = ("AGENT", "SERVER", "IMPAIRED", "PARTITION", "FOR", "WHY")
        pages[2:2] = [Text(), table(columns, impaired)]
    chains = [
        (
            c.chain_id,
            c.role,
            ", ".join(f"{agent} [{a},{b})" for agent, a, b in c.hops),
            c.sessions,
            c.capacity,
            _cached(c),
            c.service_ns / 1e6,
        )
        for m in found.models
        for c in m.chains
    ]
    if found.groups:
        groups = (
            (
                str(g.group),
                g.scheduler_id or "nobody",
                g.epoch,
                g.agents,
                g.queued_requests,
                g.batches_in_flight,
                g.sessions_in_flight,
            )
            for g in found.groups
        )
        titles = ("GROUP", "SCHEDULER", "EPOCH", "AGENTS", "QUEUED", "BATCHES", "SESSIONS")
        pages[1:1] = [table(titles, groups), Text()]
    if chains:
        titles = ("CHAIN", "ROLE", "AGENTS", "SESSIONS", "CAPACITY", "TOKENS", "MEAN MS")
        pages += [Text(), table(titles, chains)]
    return Group(*pages)


def _fetches(found: ClusterStatus) -> Iterator[tuple[object, ...]]:
    """Yields one row for each model whose files an agent is fetching, for the status table."""
    for agent in found.agents:
        for each in agent.fetches:
            done = each.fetched_bytes / each.wanted_bytes if each.wanted_bytes else 1.0
            here, wanted = each.fetched_bytes, each.wanted_bytes
            rate = each.bytes_per_second / 1e6
            where = agent.server_id or "-"
            yield agent.agent_id, where, each.model, here, wanted, f"{done:.0%}", rate


def _shares(outcomes: OutcomeCounts) -> str:
    """Returns good, late and refused as shares of what arrived, without shares that are 0."""
    arrived = outcomes.arrived
    if not arrived:
        return "-"
    late, refused = outcomes.late, outcomes.refused
    words = [f"{_percent(outcomes.good, arrived)} good"]
    words += [f"{_percent(late, arrived)} late"] if late else []
    words += [f"{_percent(refused, arrived)} refused"] if refused else []
    return f"{', '.join(words)} (of {arrived} in {outcomes.seconds // 60} min)"


def _percent(part: int, whole: int) -> str:
    """Returns a share in per cent, rounded so that neither all nor nothing is said of some."""
    tenths = round(1000 * part / whole)
    if 0 < part < whole:
        tenths = min(999, max(1, tenths))
    return f"{tenths / 10:g} %"


def _impairments(found: ClusterStatus) -> Iterator[tuple[str, ...]]:
    """Yields one row for each impairment of an agent, for the status table."""
    for agent in found.agents:
        for each in agent.impairments:
            lasts = "-" if each.remaining_s is None else f"{each.remaining_s:.1f} s"
            kind = each.kind.replace("_", " ")
            where = agent.server_id or "-"
            yield agent.agent_id, where, kind, each.partition or "all", lasts, each.why


def _versions_line(found: ClusterStatus) -> str:
    """Returns a line with the version of all processes, or with the processes of each version."""
    by_version: dict[str, list[str]] = {}
    for each in found.versions:
        by_version.setdefault(each.version or "older", []).append(f"{each.role} {each.name}")
    if len(by_version) < 2:
        return f"version {next(iter(by_version))}\n" if by_version else ""
    lines = (f"{version}: {', '.join(who)}" for version, who in sorted(by_version.items()))
    return "versions differ:  " + ";  ".join(lines) + "\n"


def _caches(agent: AgentInfo) -> str:
    """Returns the used and all block slots of an agent, and the share of its cache that is full."""
    if not agent.block_slots:
        return "-"
    most = agent.most_block_tokens
    full = f" {agent.cached_block_tokens / most:.0%}" if most else ""
    return f"{agent.used_block_slots}/{agent.block_slots}{full}"


def _slowdown(agent: AgentInfo) -> str:
    return f"{agent.slowdown_ratio:.2f}x" if agent.slowdown_ratio else "-"


def _cached(chain: ChainInfo) -> str:
    most = f" of {chain.cache_tokens}" if chain.cache_tokens else ""
    return f"{chain.cached_tokens}{most}"


def _top_page(found: ClusterStatus) -> Group:
    summary = (
        f"epoch {found.epoch}  plan {found.plan_id or '-'}  queued {found.queued_requests}  "
        f"in flight {found.batches_in_flight}  reservations {found.live_reservations}\n"
    )
    models_page: Table = table(
        ("MODEL", "READY", "QUEUED"), ((m.name, m.ready, m.queued_requests) for m in found.models)
    )
    agents = ((a.agent_id, a.state, _bar(a.utilisation_ratio)) for a in found.agents)
    return Group(Text(summary), table(("AGENT", "STATE", "BUSY"), agents), Text(), models_page)


def _bar(ratio: float) -> str:
    filled = round(min(1.0, max(0.0, ratio)) * _BAR_CELLS)
    return "█" * filled + "·" * (_BAR_CELLS - filled) + f" {ratio * 100:3.0f} %"
