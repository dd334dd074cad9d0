"""Scenario files of server chains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from catenary_lab.scenarios.chains.schema_parts import (
    CommunicationSpec,
    FixedServer,
    GpuSpec,
    LiveChatsSpec,
    LiveSpec,
    ModelSpec,
    PolicyName,
    RandomServers,
    System,
    WorkloadSpec,
)
from catenary_lab.scenarios.placement.schema_parts import (
    LengthsSpec,
    NewsSpec,
    ObjectivesSpec,
    WorkerSpec,
)
from catenary_lab.scenarios.schema import Annotatable, Count, Load, Positive, ScenarioFiles

ChatsPolicyName = Literal["least-time", "slo", "jffc"]


class _Simulated(Annotatable):
    model: ModelSpec
    gpus: dict[str, GpuSpec] = Field(min_length=1, description="Kinds of GPUs by name.")
    servers: RandomServers | list[FixedServer] = Field(description="Who serves.")
    communication: CommunicationSpec = Field(
        default_factory=lambda: CommunicationSpec.model_validate({}), description="tau_c."
    )
    expected: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="Reference values by row and column of the table, to set beside.",
    )

    @model_validator(mode="after")
    def _known_gpus(self) -> _Simulated:
        servers = self.servers
        if isinstance(servers, RandomServers):
            named = [servers.big, servers.small]
        else:
            named = [server.gpu for server in servers]
            if not named:
                raise ValueError("servers: there must be one at least")
            if len({server.name for server in servers}) < len(servers):
                raise ValueError("servers: two have the same name")
        for gpu in named:
            if gpu not in self.gpus:
                raise ValueError(f"servers: no kind of GPU is called {gpu!r}")
        return self


class Serve(_Simulated):
    """Response times of whole systems (Fig. 8, Table 1)."""

    kind: Literal["serve"]
    systems: list[System] = Field(min_length=1, description="What is compared.")
    workloads: list[WorkloadSpec] = Field(min_length=1, description="One case each.")
    seeds: list[int] = Field([1], min_length=1, description="One run each, on fixed servers.")
    live: LiveSpec | None = Field(
        None, description="With --live: serve the same on real processes, too (systems of ours)."
    )


class Policies(_Simulated):
    """Response times of policies over one set of chains and a range of loads (Fig. 5)."""

    kind: Literal["policies"]
    policies: list[PolicyName] = Field(min_length=1, description="What is compared.")
    c: Count = Field(7, description="c of the chains.")
    loads: list[Load] = Field(min_length=1, description="Shares of the chains' total rate.")
    requests: Count = Field(description="Requests of one run.")


class Tuning(_Simulated):
    """The best c over a range of loads, beside the c that each measure chooses (Fig. 6, 7)."""

    kind: Literal["tuning"]
    rates_per_s: list[Positive] = Field(min_length=1, description="Loads.")
    curve_rate_per_s: Positive = Field(description="Load of which the whole curve is drawn.")
    stop: Literal["rate", "all"] = Field("all", description="As `stop` of a system.")
    target_load: Load = Field(0.7, description="rho_bar.")
    requests: Count = Field(description="Requests of one run.")


class Placement(_Simulated):
    """c K(c) of GBP-CR beside that of random placements (Fig. 3)."""

    kind: Literal["placement"]
    c: Count = Field(7, description="Sessions at a time per chain.")
    target_load: Load = Field(0.7, description="rho_bar.")
    rates_per_s: list[Positive] = Field(min_length=1, description="Loads; one case each.")
    placements: Count = Field(100, description="Random ones per topology.")


class Allocation(_Simulated):
    """Job servers that GCA needs for a rate, beside bounds and an integer program (Fig. 4)."""

    kind: Literal["allocation"]
    c: Count = Field(7, description="c of the placement.")
    loads: list[Load] = Field(
        min_length=1, description="lambda as shares of the chains' total rate."
    )
    target_load: Load = Field(0.7, description="rho_bar; lambda / rho_bar is the rate needed.")


class Chats(Annotatable):
    """Chats on unlike agents that hold the whole model each, under a few policies and loads."""

    kind: Literal["chats"]
    workers: dict[str, WorkerSpec] = Field(min_length=1, description="Kinds of agents by name.")
    agents: list[str] = Field(min_length=1, description="The kind of each agent; one chain each.")
    slots: Count = Field(32, description="Sessions at a time per chain.")
    chunk_tokens: int = Field(
        0, ge=0, description="Prompt tokens beside every decode step; 0: whole prompts, first."
    )
    objectives: ObjectivesSpec
    named: list[bool] = Field(
        [False, True],
        min_length=1,
        description="Whether requests name the objectives; else they are only measured by them.",
    )
    lengths: LengthsSpec
    arrivals: str = Field("poisson", description="poisson, gamma:CV, onoff:ON_S:OFF_S.")
    rates_per_s: list[Positive] = Field(min_length=1, description="Loads; one case each.")
    duration_s: Positive = Field(60.0, description="Chats begin so long, then all are served.")
    seeds: list[int] = Field([1], min_length=1, description="One run each.")
    policies: list[ChatsPolicyName] = Field(min_length=1, description="What is compared.")
    news: NewsSpec = Field(
        default_factory=lambda: NewsSpec.model_validate({}), description="Delays of messages."
    )
    live: LiveChatsSpec | None = Field(
        None, description="With --live: serve the same on real processes, too."
    )

    @model_validator(mode="after")
    def _known_agents(self) -> Chats:
        for name in self.agents:
            if name not in self.workers:
                raise ValueError(f"agents: no kind of agents is called {name!r}")
        kinds = [self.workers[name] for name in self.agents]
        if self.live and len({(each.weights_gb, each.token_bytes) for each in kinds}) > 1:
            raise ValueError("live: agents of one model have one weights_gb and token_bytes")
        return self


ComposedScenario = Serve | Policies | Tuning | Placement | Allocation
ChainsScenario = ComposedScenario | Chats
FILES: ScenarioFiles[ChainsScenario] = ScenarioFiles(
    Annotated[ChainsScenario, Field(discriminator="kind")]
)
