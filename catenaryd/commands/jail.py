"""The command `catenaryd jail`: the protections this machine has for readers of model files."""

from __future__ import annotations

import json

import click

from catenary_services.jail.orders import JailProtection
from catenary_services.jail.protections import offered
from catenaryd.shared_options import AS_JSON


@click.command("jail")
@AS_JSON
def show_jail(as_json: bool) -> None:
    """Says what confines a process that reads a model file on this machine.

    Example: catenaryd jail
    """
    found = {str(each): each in offered() for each in JailProtection}
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, is_there in found.items():
        click.echo(f"{name:<20} {'yes' if is_there else 'no'}")
