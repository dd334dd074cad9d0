"""Settings of the scheduler process, and the configuration objects derived from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from catenary_scheduler.dispatch import ChainedConfig, PooledConfig
from catenary_scheduler.observed.stuck_agents import StuckRules
from catenary_scheduler.packing.transfers.migration_budget import MigrationBudgetConfig
from catenary_scheduler.scaling import DemandPolicy, ReplanPolicy, ScalingPolicy, SessionLoad
from catenary_services.addresses import CONTROL_APART
from catenary_services.domain.groups import AUTO, MOST_GROUPS, chosen_group
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND
from catenary_services.domain.packing import PackingGoal
from catenary_services.errors import InvalidInput
from catenary_services.redis.redis_client import RedisAddress
from catenary_services.settings import USUAL_REPOSITORY, ProcessSettings


class SchedulerSettings(ProcessSettings):
    """Settings of one scheduler process.

    Schedulers with the same `redis_url` and `cluster` stand by for each other.
    """

    scheduler_id: str = Field(
        default="scheduler-0", description="Name in logs, status and the leader lease."
    )
    cluster: str = Field(
        default="main", description="Cluster this scheduler may lead; part of its keys in Redis."
    )
    scheduler_groups: int = Field(
        default=1,
        ge=1,
        le=MOST_GROUPS,
        description="Groups the cluster's agents are divided "
        "into, each led by one scheduler at a time; the same at gateways and agents.",
    )
    scheduler_group: str = Field(
        default=AUTO,
        description='Group this scheduler prefers to lead; "auto": by the number at '
        "the end of scheduler_id. It leads others too while nobody else does.",
    )
    takeover_grace_s: float = Field(
        default=0.5,
        ge=0.0,
        description="A group this scheduler does not prefer, and that nobody "
        "has led yet, is taken when it was free for this long; for each group more that it leads, "
        "this much longer.",
    )
    host: str = Field(default="127.0.0.1", description="Address gateways and agents connect to.")
    port: int = Field(
        default=8004, ge=0, le=65535, description="Port of gRPC there; 0: any free one."
    )
    control_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port there for the control streams of gateways and agents, which learn it "
        "over gRPC; 0: any free one, unset: `port` + 3, as 8007.",
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="File of hashed API keys, the same as at gateways; to change the "
        "cluster through a gateway takes an operator's key (scope admin) in it.",
    )
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="Redis that holds lease, plan and book; rediss:// with TLS.",
    )
    redis_password_file: Path | None = Field(
        default=None,
        description="File with the password of the user in redis_url; it is read for "
        "every new connection.",
    )
    redis_ca_file: Path | None = Field(
        default=None,
        description="PEM certificates of the authority that signed the Redis server; "
        "unset: tls_ca_file.",
    )
    redis_sentinels: list[str] = Field(
        default_factory=list,
        description="host:port of every Redis Sentinel; they say which "
        "server is the master, whatever host redis_url names.",
    )
    redis_sentinel_service: str = Field(
        default="catenary", description="Name the Sentinels know the master by."
    )
    redis_sentinel_password_file: Path | None = Field(
        default=None, description="File with the password of the Sentinels, if they have one."
    )
    model_repository: Path = Field(
        default=USUAL_REPOSITORY, description="Folder of the model repository."
    )
    models: list[str] = Field(
        default_factory=list, description='Models to serve, as "name" or "name:version".'
    )
    import_sources: list[str] = Field(
        default_factory=lambda: ["hf", "s3", "gs", "http", "https", "file"],
        description="Kinds of sources that operators may have models imported from into "
        "`model_repository`; `file` is paths of this machine. An empty list: none.",
    )
    plan_file: Path | None = Field(
        default=None, description="JSON placement to serve by; without one the planner decides."
    )
    planner: Literal["auto", "pooled", "even"] = Field(
        default="auto",
        description="auto: from profiles, data sheets and measurements, whatever serves most of "
        "what survives the loss of an agent; pooled: whatever serves most; even: whole models by "
        "their sizes alone.",
    )
    plan_margin: float = Field(
        default=0.4,
        ge=0.0,
        lt=1.0,
        description="Share of an SLO the pooled planner keeps free "
        "for queueing, noise and contention.",
    )
    plan_max_partitions: int = Field(
        default=3, ge=1, le=8, description="Most partitions of a pooled pipeline."
    )
    plan_shared_routes: bool = Field(
        default=True,
        description="Whether agents of pooled pipelines also load parts of other models, "
        "as memory allows, and compute these where a burst leaves their own pools no time.",
    )
    protected_share: float = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="A model that uses its pools more than all but this share leaves no time "
        "to others.",
    )
    chain_agents: int = Field(
        default=0,
        ge=0,
        description="Agents per chain of models that generate text, unless one is "
        "deployed otherwise; 0: as many as is best.",
    )
    split_prefill_agents: int | None = Field(
        default=None,
        ge=0,
        description="Agents of a model that generates text which only run prompts "
        "and hand the caches to the others (split phase); 0: all do both; unset: as is best.",
    )
    cache_oversubscription: float = Field(
        default=1.0,
        ge=1.0,
        le=64.0,
        description="Sessions at a time per session of full length "
        "that fits into memory, where agents take memory as caches grow; 1: every session may grow "
        "to its limit. With more, a session may have to wait while others are long.",
    )
    chain_policy: Literal["least-time", "slo", "jffc"] = Field(
        default="least-time",
        description="Who gets a session: of the chains that meet its objectives, if it has "
        "any, the one on which it delays the ends of all sessions least under the present load "
        "(least-time), or the one with the shortest steps (slo); or the fastest free chain (jffc).",
    )
    rebalance: bool = Field(
        default=False,
        description="Under least-time and slo, requests that are placed together change workers "
        "where answers turned out longer or shorter than predicted.",
    )
    packing: Literal["auto", "pack", "balance", "off"] = Field(
        default="auto",
        description="What running sessions are moved between chains for, of models "
        'that do not say: onto few chains ("pack"), evenly ("balance") or not at all ("off"); '
        "auto: pack if max_agents is set, so that agents can go, else off.",
    )
    move_link_share: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Share of a link's speed that sessions which move "
        "to other chains may take, as caches; the rest is for the tokens that go around.",
    )
    move_slowdown: float = Field(
        default=0.1,
        ge=0.0,
        le=10.0,
        description="Sessions may get their tokens so much more "
        "slowly (0.1: a tenth) while tokens of sessions that move to their chain are read again.",
    )
    max_moves: int = Field(
        default=32,
        ge=0,
        description="Running sessions that may be on their way to another chain "
        "at a time; 0: none is moved, and whoever drains an agent waits for its sessions to end.",
    )
    max_moves_per_agent: int = Field(
        default=8, ge=1, description="How many of them may leave or come to one agent."
    )
    move_timeout_s: float = Field(
        default=30.0, gt=0.0, description="A session that has not moved by then stays where it is."
    )
    expected_prompt_tokens: float = Field(
        default=256.0, ge=1.0, description="Mean length of prompts, until enough were seen."
    )
    expected_output_tokens: float = Field(
        default=128.0, ge=1.0, description="Mean length of answers, until enough were seen."
    )
    expected_sessions_per_s: float = Field(
        default=0.1,
        gt=0.0,
        description="Sessions per second until enough were seen; chains are composed for no less.",
    )
    recompose_factor: float = Field(
        default=2.0,
        gt=1.0,
        description="Chains are composed anew when the rate of sessions or "
        "their mean lengths are by this factor other than composed for.",
    )
    plan_time_limit_s: float = Field(
        default=10.0, gt=0.0, description="The solver, a process of its own, is ended after this."
    )
    expected_agents: int = Field(
        default=1,
        ge=1,
        description="The first plan waits for this many agents; with several "
        "groups, each for its share.",
    )
    min_agents: int = Field(
        default=1, ge=1, description="No agent is drained for want of load below so many."
    )
    max_agents: int = Field(
        default=0,
        ge=0,
        description="Most agents to ask for as load grows; agents that are not "
        "needed are drained. 0: agents are asked for without a limit and none is drained.",
    )
    retire_by_ordinal: bool = Field(
        default=False,
        description="Of agents named NAME-0, NAME-1, .. the one of the highest "
        "number goes first, as Kubernetes takes pods of a StatefulSet away; else whoever has least "
        "to move.",
    )
    scale_attainment: float = Field(
        default=0.95,
        gt=0.0,
        le=1.0,
        description="Share of the sessions that should meet their "
        "objectives; below it one more worker is asked for.",
    )
    scale_down_window_s: float = Field(
        default=30.0,
        gt=0.0,
        description="A worker must have been one too many for so long before it goes.",
    )
    scale_cold_start_s: float = Field(
        default=20.0,
        gt=0.0,
        description="From the order of a worker until it serves, before any was measured.",
    )
    settle_s: float = Field(
        default=1.0, ge=0.0, description="Quiet time after an agent came before planning anew."
    )
    replan_after_s: float = Field(
        default=5.0,
        ge=0.0,
        description="A plan is made anew without an agent that stayed away this long.",
    )
    replan_moved_share: float = Field(
        default=0.15,
        gt=0.0,
        le=1.0,
        description="A pooled plan is made anew when this share of "
        "the load moved from some models to others.",
    )
    replan_lasting_s: float = Field(
        default=10.0, ge=0.0, description="It must have moved for this long."
    )
    replan_interval_s: float = Field(
        default=30.0, ge=0.0, description="Plans made for the load are at least this far apart."
    )
    replan_every_s: float = Field(
        default=0.0, ge=0.0, description="Plan anew on a schedule, this far apart; 0: never."
    )
    link_look_s: float = Field(
        default=60.0,
        ge=1.0,
        description="The round trip of every link that chains pass is looked at this far apart.",
    )
    load_window_s: float = Field(
        default=30.0, gt=0.0, description="The load is what arrived about this long ago or less."
    )
    switch_timeout_s: float = Field(
        default=120.0,
        gt=0.0,
        description="A change of plan of whose progress nothing is heard for so long "
        "is rolled back.",
    )
    load_attempts: int = Field(
        default=1,
        ge=1,
        description="An agent that failed this often to load a partition is not "
        "waited for and planned around, while others can serve the model; it is asked again.",
    )
    recovery_s: float = Field(
        default=2.0,
        ge=0.0,
        description="After a change of leader, longest wait for the plan's "
        "agents to report before dispatching without them.",
    )
    claim_grace_s: float = Field(
        default=5.0,
        gt=0.0,
        description="After a change of leader, a session that agents hold and "
        "no gateway asks for is closed after this.",
    )
    load_timeout_s: float = Field(
        default=120.0,
        gt=0.0,
        description="An order to load of whose progress nothing is heard for so long has "
        "failed; others serve the model if they can, and the agent is asked again.",
    )
    lease_s: float = Field(
        default=2.0, gt=0.0, description="The leader lease ends this long after its last renewal."
    )
    heartbeat_s: float = Field(
        default=1.0, gt=0.0, description="Interval of heartbeats to gateways and agents."
    )
    silence_s: float = Field(
        default=3.0, gt=0.0, description="A gateway or agent silent for this long is lost."
    )
    audit_interval_s: float = Field(
        default=5.0,
        ge=0.0,
        description="Interval at which the book is compared with what agents "
        "hold and gateways wait for; 0: never.",
    )
    audit_grace_s: float = Field(
        default=3.0,
        gt=0.0,
        description="A frame is under way for less than this: what is "
        "reserved and nobody holds for longer is given back.",
    )
    max_waiting_requests: int = Field(
        default=10_000, ge=1, description="Requests that may wait for their model to be ready."
    )
    max_wait_s: float = Field(
        default=10.0, ge=0.0, description="Longest such wait, if the deadline allows it."
    )
    max_linger_ms: float = Field(
        default=2.0,
        ge=0.0,
        description="Longest wait for a full batch while a device is free; "
        '"inf" waits until the last moment that still meets the deadline, as in the paper.',
    )
    dispatch_window_ms: float = Field(
        default=20.0,
        ge=0.0,
        le=1000.0,
        description="Longest time for which a gateway may be granted a path to dispatch on by "
        "itself; 0: it asks for each request.",
    )
    safety_margin_ms: float = Field(
        default=1.0, ge=0.0, description="That last moment is this much earlier."
    )
    straggler_factor: float = Field(
        default=2.5,
        ge=0.0,
        description="An agent that takes so many times what others take of "
        "what is booked gets no new batches for a while, if others of its pools can; 0: never.",
    )
    stuck_s: float = Field(
        default=6.0,
        gt=0.0,
        description="An agent that computes a batch, or a step of generation, "
        "for longer than this and than `stuck_factor` times what is booked for it, is told to end; "
        "its work goes elsewhere at once.",
    )
    stuck_factor: float = Field(default=20.0, ge=1.0, description="See `stuck_s`.")
    stuck_load_s: float = Field(
        default=1800.0, gt=0.0, description="The same for loading or measuring a partition."
    )
    token_stall_s: float = Field(
        default=60.0,
        gt=0.0,
        description="A session that got no token for this long, though its "
        "agents seem well, is started again elsewhere; before its first one, for four times this.",
    )
    overdue_grace_ms: float = Field(
        default=100.0,
        ge=50.0,  # agents gather reports for 20 ms
        description="A batch later than this, and later than twice its "
        "planned time, is given up and dispatched again.",
    )

    @field_validator("packing", mode="before")
    @classmethod
    def _read_packing(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false

    @model_validator(mode="after")
    def _check_groups(self) -> SchedulerSettings:
        try:
            chosen_group(self.scheduler_group, self.scheduler_id, self.scheduler_groups)
        except InvalidInput as error:
            raise ValueError(error.message) from None
        if self.port_of_control > 65535:
            raise ValueError(f"control_port: there is none {CONTROL_APART} above {self.port}")
        if self.scheduler_groups > 1 and self.plan_file is not None:
            raise ValueError("plan_file: a plan of several scheduler groups cannot be given")
        return self

    @property
    def port_of_control(self) -> int:
        """The port of control streams; 0 for any free one."""
        if self.control_port is not None:
            return self.control_port
        return self.port + CONTROL_APART if self.port else 0

    def redis_address(self) -> RedisAddress:
        """Returns the address and the credentials of the Redis that holds lease, plan and book."""
        return RedisAddress(
            self.redis_url,
            password_file=self.redis_password_file,
            ca_file=self.redis_ca_file or self.tls_ca_file,
            cert_file=self.tls_cert_file,
            key_file=self.tls_key_file,
            sentinels=tuple(self.redis_sentinels),
            sentinel_service=self.redis_sentinel_service,
            sentinel_password_file=self.redis_sentinel_password_file,
        )

    def dispatching(self) -> PooledConfig:
        """Returns the limits and waiting times of the dispatcher of pooled pipelines."""
        forever = math.isinf(self.max_linger_ms)
        return PooledConfig(
            max_linger_ns=None
            if forever
            else round(self.max_linger_ms * NANOSECONDS_PER_MILLISECOND),
            safety_margin_ns=round(self.safety_margin_ms * NANOSECONDS_PER_MILLISECOND),
            overdue_grace_ns=round(self.overdue_grace_ms * NANOSECONDS_PER_MILLISECOND),
            longest_window_ns=round(self.dispatch_window_ms * NANOSECONDS_PER_MILLISECOND),
            protected_share=self.protected_share,
        )

    def stuck_rules(self) -> StuckRules:
        """Returns how old a step of an agent may be before it counts as one that never ends."""
        return StuckRules(
            int(self.stuck_s * NANOSECONDS_PER_SECOND),
            self.stuck_factor,
            int(self.stuck_load_s * NANOSECONDS_PER_SECOND),
        )

    def dispatching_sessions(self) -> ChainedConfig:
        """Returns the limits and waiting times of the dispatcher of sessions."""
        return ChainedConfig(
            claim_grace_ns=int(self.claim_grace_s * NANOSECONDS_PER_SECOND),
            rebalance=self.rebalance,
            stall_ns=int(self.token_stall_s * NANOSECONDS_PER_SECOND),
            max_moves=self.max_moves,
            max_moves_per_agent=self.max_moves_per_agent,
            move_deadline_ns=int(self.move_timeout_s * NANOSECONDS_PER_SECOND),
            migration_budget=MigrationBudgetConfig(
                link_share=self.move_link_share, slowdown=self.move_slowdown
            ),
        )

    def packing_goal(self) -> PackingGoal:
        """Returns the packing goal of models whose manifest and deployment name none."""
        if self.packing == "auto":
            return "pack" if self.max_agents > 0 else "off"
        return self.packing

    def demand_policy(self) -> DemandPolicy:
        """Returns when the demand for generated text is a reason to compose chains anew."""
        usual = SessionLoad(
            self.expected_sessions_per_s, self.expected_prompt_tokens, self.expected_output_tokens
        )
        return DemandPolicy(
            usual=usual,
            factor=self.recompose_factor,
            let_go=1.0 + 0.5 * (self.recompose_factor - 1.0),
            lasting_ns=int(self.replan_lasting_s * NANOSECONDS_PER_SECOND),
            interval_ns=int(self.replan_interval_s * NANOSECONDS_PER_SECOND),
        )

    def scaling_policy(self) -> ScalingPolicy:
        """Returns when workers (chains) are added and removed."""
        scale_down_window_ns = int(self.scale_down_window_s * NANOSECONDS_PER_SECOND)
        return ScalingPolicy(
            attainment=self.scale_attainment,
            scale_down_window_ns=scale_down_window_ns,
            window_ns=max(10 * NANOSECONDS_PER_SECOND, scale_down_window_ns),
            cooldown_ns=min(20 * NANOSECONDS_PER_SECOND, scale_down_window_ns),
            remember_ns=10 * scale_down_window_ns,
            queue_ns=min(2 * NANOSECONDS_PER_SECOND, scale_down_window_ns),
            cold_start_ns=int(self.scale_cold_start_s * NANOSECONDS_PER_SECOND),
        )

    def replan_policy(self) -> ReplanPolicy:
        """Returns when a change of load is a reason to plan anew."""

        def ns(seconds: float) -> int:
            return int(seconds * NANOSECONDS_PER_SECOND)

        return ReplanPolicy(
            moved_share=self.replan_moved_share,
            lasting_ns=ns(self.replan_lasting_s),
            interval_ns=ns(self.replan_interval_s),
            every_ns=ns(self.replan_every_s),
            time_constant_ns=ns(self.load_window_s),
        )
