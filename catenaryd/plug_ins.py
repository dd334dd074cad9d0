"""What other packages add to the commands, by entry points; looked up only when they are asked for.

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
        """Returns the plan.

        Args:
            dataset: It.
            instance: Its task, by id.
            problem: The same, perhaps with other limits.
            clock: For the plan's `seconds`.
        """
        ...


def names(group: str) -> list[str]:
    """Returns what plug-ins add to a group, in order of the alphabet; imports none of them."""
    return sorted(entry_points(group=group).names)


def plug_in(group: str, name: str) -> Any:
    """Returns what a plug-in gives.

    Raises:
        InvalidInput: If none is installed that has it.
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
    """One of the product's own names, or of those that plug-ins add to a group.

    Args:
        group: Of entry points.
        own: Names that are always there.
    """

    name = "choice"

    def __init__(self, group: str, *own: str) -> None:
        self._group = group
        self._own = own

    @property
    def choices(self) -> tuple[str, ...]:
        """All of them, the product's own first."""
        return (*self._own, *names(self._group))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Returns what help shows for the value."""
        return f"[{'|'.join(self.choices)}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the name, if there is such a one."""
        if value not in self._own and value not in self.choices:
            self.fail(f"{value!r} is not one of {', '.join(self.choices)}.", param, ctx)
        return str(value)


class PlugInGroup(click.Group):
    """A group of commands to which plug-ins add their own.

    Args:
        plug_ins: Group of entry points.
        *arguments: As of click's groups.
        **settings: As of click's groups.
    """

    def __init__(self, *arguments: Any, plug_ins: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._plug_ins = plug_ins

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the group's own commands and of those that were added."""
        return sorted({*super().list_commands(ctx), *names(self._plug_ins)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command, the group's own first; None if its package is not there."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        try:
            added: click.Command = plug_in(self._plug_ins, cmd_name)
        except InvalidInput:
            return None
        return added
