"""What a scheduler can be told."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.settings import ProcessSettings


class SchedulerSettings(ProcessSettings):
    """Settings of one scheduler; several with one `redis_url` and `cluster` stand by each other."""

    scheduler_id: str = Field(
        default="scheduler-0", description="Name in logs, status and the leader lease."
    )
    cluster: str = Field(
        default="main", description="Cluster this scheduler may lead; part of its keys in Redis."
    )
    host: str = Field(default="127.0.0.1", description="Address gateways and agents connect to.")
    port: int = Field(default=8004, ge=0, le=65535, description="Port of it; 0: any free one.")
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0", description="Redis that holds lease, plan and book."
    )
    model_repository: Path = Field(
        default=Path("models"), description="Folder of the model repository."
    )
    models: list[str] = Field(
        default_factory=list, description='Models to serve, as "name" or "name:version".'
    )
    plan_file: Path | None = Field(
        default=None, description="JSON placement to serve by; without one models are split evenly."
    )
    expected_agents: int = Field(
        default=1, ge=1, description="The first even split waits for this many agents."
    )
    settle_s: float = Field(
        default=1.0, ge=0.0, description="Quiet time after an agent came before an even split."
    )
    replan_after_s: float = Field(
        default=5.0, ge=0.0, description="An evenly split model is split anew without an agent "
        "that stayed away this long.",
    )  # fmt: skip
    recovery_s: float = Field(
        default=2.0, ge=0.0, description="After a change of leader, longest wait for the plan's "
        "agents to report before dispatching without them.",
    )  # fmt: skip
    load_timeout_s: float = Field(
        default=120.0, gt=0.0, description="A partition not loaded by then is ordered again."
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
    max_waiting_requests: int = Field(
        default=10_000, ge=1, description="Requests that may wait for their model to be ready."
    )
    max_wait_s: float = Field(
        default=10.0, ge=0.0, description="Longest such wait, if the deadline allows it."
    )
