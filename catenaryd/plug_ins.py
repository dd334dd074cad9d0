"""Plug-ins of the commands, which other packages register as entry points; imported when used.

catenary.simulations      a click command over scenario files, below `catenaryd simulate`
catenary.planners         a `PoolsPlanner` of pooled pipelines
catenary.planning_rules   a `Solve` of `catenary_scheduler.planning.pooled.solving.solving`
catenary.dispatchers      a `DispatcherFactory` of `catenary_simulator.options`
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

import click

from catenary_scheduler.planning.pooled.dataset import PlanningDataset
from catenary_scheduler.planning.pooled.planner import Clock
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_services.errors import InvalidInput

SIMULATIONS = "catenary.simulations"
PLANNERS = "catenary.planners"
PLANNING_RULES = "catenary.planning_rules"
DISPATCHERS = "catenary.dispatchers"


class PoolsPlanner(Protocol):
    """Makes a plan of pooled pipelines for an instance of a data set."""

    def __call__(
        self, dataset: PlanningDataset, instance: str, problem: PoolingProblem, clock: Clock, /
    ) -> PooledPlan:
        """Returns the plan of an instance.

        Args:
            dataset: The data set.
            instance: Id of the planning task in it.
            problem: The planning task, perhaps with other limits.
            clock: Clock for the plan's `seconds`.
        """
        ...


def names(group: str) -> list[str]:
    """Returns the names of a group's plug-ins in alphabetical order; imports none of them."""
    return sorted(entry_points(group=group).names)


def plug_in(group: str, name: str) -> Any:
    """Returns the object that a plug-in registers.

    Raises:
        InvalidInput: No installed package has this plug-in.
    """
    for each in entry_points(group=group, name=name):
        try:
            return each.load()
        except ModuleNotFoundError as error:
            if error.name != each.module.partition(".")[0]:
                raise
    raise InvalidInput("name", f"no package that is installed adds {name!r} to {group}")


if TYPE_CHECKING:
    _Text = click.ParamType[str]
else:
    _Text = click.ParamType  # not generic in older versions of click


class PlugInChoice(_Text):
    """A choice among the product's own names and those that plug-ins add to a group.

    Args:
        group: Group of entry points.
        own: Names that are always there.
    """

    name = "choice"

    def __init__(self, group: str, *own: str) -> None:
        self._group = group
        self._own = own

    @property
    def choices(self) -> tuple[str, ...]:
        """All names, the product's own first."""
        return (*self._own, *names(self._group))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Returns the placeholder for the value in help texts."""
        return f"[{'|'.join(self.choices)}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self._own and value not in self.choices:
            self.fail(f"{value!r} is not one of {', '.join(self.choices)}.", param, ctx)
        return str(value)


class PlugInGroup(click.Group):
    """A group of commands to which plug-ins add their own.

    Args:
        plug_ins: Group of entry points.
        *arguments: Passed on to click's group.
        **settings: Passed on to click's group.
    """

    def __init__(self, *arguments: Any, plug_ins: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._plug_ins = plug_ins

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the group's own commands and of those that plug-ins add."""
        return sorted({*super().list_commands(ctx), *names(self._plug_ins)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command, the group's own first; None if its package is not installed."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        try:
            added: click.Command = plug_in(self._plug_ins, cmd_name)
        except InvalidInput:
            return None
        return added
