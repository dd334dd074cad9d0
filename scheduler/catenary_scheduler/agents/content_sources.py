"""Names of the peers from which an agent fetches the model files that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from catenary_scheduler.agents.registry import AgentRegistry
from catenary_services.domain.ids import AgentId, ModelKey

_MEGABYTE = 1_000_000
_MOST = 16
"""More peers than this make nothing faster: their network card is not what is scarce."""


class ContentSources:
    """Knows who may have a model: gateways, and above all agents that have loaded some of it.

    Whoever is named and has not got a file says so, and another is asked.
    """

    def __init__(self, registry: AgentRegistry) -> None:
        """Looks for sources among the agents in `registry`, and among `gateways`."""
        self._registry = registry
        self.gateways: Callable[[], Iterable[str]] = lambda: ()
        """Returns the names of the gateways that are connected."""

    def of(self, model: ModelKey, agent: AgentId | None = None) -> list[str]:
        """Returns the peers that an agent, or any gateway, is to ask for a model's files.

        The best come first.
        """
        hosts: list[AgentId] = []
        rest: list[AgentId] = []
        for each, record in self._registry.items():
            if each == agent or record.session is None:
                continue
            has_some = any(key.model == model for key in record.loaded)
            (hosts if has_some else rest).append(each)
            if len(hosts) == _MOST:
                break
        # The first gateway comes first: where the cluster was started, it has the whole model.
        gateways = sorted(self.gateways())
        return [*gateways[:1], *hosts, *gateways[1:], *rest][:_MOST]

    def fetching(self, model: ModelKey) -> str:
        """Returns which agents are fetching a model's files, in words; empty if none is."""
        said = []
        for agent, record in self._registry.items():
            for each in record.fetches:
                if each.model == model and record.session is not None:
                    here, wanted, rate = (
                        round(number / _MEGABYTE)
                        for number in (
                            each.fetched_bytes,
                            each.wanted_bytes,
                            each.bytes_per_second,
                        )
                    )
                    said.append(f"{agent} has fetched {here} of {wanted} MB ({rate} MB/s)")
        return ", ".join(said)
