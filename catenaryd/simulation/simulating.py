"""The group `catenaryd simulate`: what a plan would serve, on a virtual clock."""

from __future__ import annotations

import click

from catenaryd.plug_ins import SIMULATIONS, PlugInGroup
from catenaryd.simulation.simulating_pools import pools


@click.group("simulate", cls=PlugInGroup, plug_ins=SIMULATIONS)
def simulate_group() -> None:
    """Simulates a cluster around the scheduler's own planning and dispatch code.

    Example: catenaryd simulate pools --dataset tests/data/ppipe
    --instance maf19/0.3-0.33-0.37/G1/HC1-L
    """


simulate_group.add_command(pools)
