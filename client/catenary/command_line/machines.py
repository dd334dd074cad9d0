"""The command `machines`: who is there, with what, and why a device is idle."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.console import Group
from rich.text import Text

from catenary.command_line.kit import CommandOptions, command, console, print_json, table
from catenary.rpc.machines import LINK_COLUMNS, MachineInfo, hardware_of, links_in_rows

_COLUMNS = ("MACHINE", "ADDRESS", "AGENT", "DEVICE", "CLASS", "STATE", "MEMORY GB", "HOSTS")


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command(epilog="Example: catenary machines")(machines)


@command
def machines(options: CommandOptions) -> None:
    """List the machines of the cluster: devices, memory, links, what they host, why one is idle."""
    with options.client() as client:
        found = client.machines()
    if options.as_json:
        print_json(found)
        return
    pages: list[object] = [table(_COLUMNS, _rows(found))]
    agents = [agent for machine in found for agent in machine.agents]
    if hardware := hardware_of(agents):
        pages += [Text(), table(("AGENTS", "DEVICE"), hardware)]
    if links := [link for machine in found for link in machine.links]:
        pages += [Text(), table(LINK_COLUMNS, links_in_rows(links))]
    pages += [
        Text(f"{agent} is idle: {why}") for machine in found for agent, why in machine.idle.items()
    ]
    console().print(Group(*pages))  # type: ignore[arg-type]


def _rows(found: list[MachineInfo]) -> Iterator[tuple[str, ...]]:
    for machine in found:
        for agent in machine.agents:
            memory = f"{agent.used_memory_bytes / 1e9:.1f} of {agent.memory_bytes / 1e9:.1f}"
            hosts = ", ".join(agent.partitions) or "-"
            yield (
                machine.machine,
                machine.address or "-",
                agent.agent_id,
                agent.device,
                agent.device_class,
                agent.state,
                memory,
                hosts,
            )
