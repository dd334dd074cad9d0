"""Settings of a gateway process, each with its default and a description."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pydantic import Field, model_validator

from catenary_services.addresses import check_advertised
from catenary_services.domain.groups import MOST_GROUPS
from catenary_services.settings import ModelFolderSettings

MEBIBYTE = 1024 * 1024


class GatewaySettings(ModelFolderSettings):
    """Settings of one gateway, read from its environment and configuration files."""

    gateway_id: str = Field(
        default="gateway-0",
        min_length=1,
        description="Name of this gateway, unique in the cluster.",
    )
    host: str = Field(default="127.0.0.1", description="Address every endpoint listens on.")
    grpc_port: int = Field(
        default=8001, ge=0, le=65535, description="Port of the gRPC endpoints; 0: any free port."
    )
    http_port: int = Field(
        default=8000, ge=0, le=65535, description="Port of the HTTP endpoints; 0: any free port."
    )
    admin_port: int = Field(
        default=8003, ge=0, le=65535, description="Port of the Admin service; 0: any free port."
    )
    scheduler_addresses: list[str] = Field(
        default=["127.0.0.1:8004"],
        min_length=1,
        description="host:port of every scheduler; the leader among them is found by asking.",
    )
    scheduler_groups: int = Field(
        default=1,
        ge=1,
        le=MOST_GROUPS,
        description="Scheduler groups of the cluster; requests go "
        "round robin to those that serve their model.",
    )
    model_repository: Path = Field(
        default=Path("models"),
        description="Folder that holds models/<name>/<version>/: tokenizers and chat templates. "
        "What is missing is fetched from peers that have it; what is here is served to them.",
    )
    api_keys_file: Path | None = Field(
        default=None, description="File of hashed API keys; unset: everyone is let in."
    )
    dashboard: bool = Field(
        default=True,
        description="Serve the dashboard on the HTTP port; behind TLS it needs API keys.",
    )
    endpoints_insecure: bool = Field(
        default=False,
        description="Endpoints for clients without TLS although the inside has it: behind a "
        "proxy that ends TLS, or on this machine only.",
    )
    endpoint_cert_file: Path | None = Field(
        default=None,
        description="PEM certificate chain the endpoints show to clients; unset: tls_cert_file.",
    )
    endpoint_key_file: Path | None = Field(
        default=None, description="PEM private key that belongs to endpoint_cert_file."
    )
    max_in_flight_bytes: int = Field(
        default=256 * MEBIBYTE,
        gt=0,
        description="Bytes of unanswered requests held at once; more are refused as overload.",
    )
    max_in_flight_requests: int = Field(
        default=4096, gt=0, description="Unanswered requests held at once."
    )
    max_request_bytes: int = Field(
        default=32 * MEBIBYTE,
        gt=0,
        description="Largest message an endpoint accepts; one client can make a gateway hold it.",
    )
    max_prompt_bytes: int = Field(
        default=8 * MEBIBYTE,
        gt=0,
        description="Largest message that asks for text; a prompt of 100 000 tokens has about half "
        "a million bytes.",
    )
    bad_requests_per_s: float = Field(
        default=100.0,
        gt=0.0,
        description="Requests one key, or one address without a key, may have refused as its own "
        "fault; a flood of them is answered with 429. One with a large body counts for many.",
    )
    max_stream_requests: int = Field(
        default=32,
        gt=0,
        description="Requests of one ModelStreamInfer stream worked on at the same time.",
    )
    cors_origins: list[str] = Field(
        default=[],
        description="Origins (https://page.example) whose pages may call the HTTP endpoints from a "
        "browser; '*': all of them, but without API keys only named ones may change the server.",
    )
    kept_response_bytes: int = Field(
        default=64 * MEBIBYTE,
        ge=0,
        description="Memory for answers of /v1/responses that may be continued; 0: none is kept.",
    )
    kept_response_s: float = Field(
        default=3600.0, gt=0.0, description="How long such an answer is kept."
    )
    shared_memory_prefix: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{2,63}$",
        description="Names of shared memory objects that clients on this machine may have tensors "
        "in begin with this; unset: none. Set it only where nothing forwards others' connections "
        "to loopback.",
    )
    max_shared_memory_bytes: int = Field(
        default=1024 * MEBIBYTE,
        gt=0,
        description="Bytes of all shared memory regions that clients may have registered.",
    )
    fair_share: bool = Field(
        default=True,
        description="Under overload refuse at once what cannot be answered in time, and divide the "
        "rest among API keys by their shares.",
    )
    max_first_token_wait_s: float = Field(
        default=60.0,
        gt=0.0,
        description="Under overload a generation that names no objective for its first token "
        "should not wait for it longer than this; more are refused.",
    )
    special_tokens_in_chats: bool = Field(
        default=False,
        description="Recognise special tokens in what clients write in conversations; else only "
        "the model's chat template makes them, and such texts stay text.",
    )
    transports: list[str] = Field(
        default=["shm", "tcp", "grpc"], description="Transports frames may use, best first."
    )
    transport_host: str = Field(
        default="127.0.0.1", description="Address that frames of agents are received at."
    )
    transport_port: int = Field(
        default=0, ge=0, le=65535, description="TCP port for frames of agents; 0: any free port."
    )
    advertise_host: str | None = Field(
        default=None,
        description="Address that agents are told instead of `transport_host`: behind address "
        "translation, or where that means all addresses of this machine.",
    )
    runtime_dir: Path = Field(
        default_factory=lambda: Path(tempfile.gettempdir()) / "catenary",
        description="Folder for the sockets of the shared-memory transport.",
    )
    progress_interval_s: float = Field(
        default=0.1,
        gt=0.0,
        description="How often the scheduler hears how far running generations are.",
    )
    generation_silence_s: float = Field(
        default=60.0,
        gt=0.0,
        description="An answer that gets no further token for so long is given up. There is no"
        " limit on the whole answer unless its client names one.",
    )
    unavailable_grace_s: float = Field(
        default=3.0,
        ge=0.0,
        description="How long the scheduler may be away before this gateway says it is not ready.",
    )

    @model_validator(mode="after")
    def _check_advertised(self) -> GatewaySettings:
        """Refuses an address that agents on other machines could not reach.

        Raises:
            ValueError: See `check_advertised`.
        """
        check_advertised(self.transport_host, self.advertise_host, self.scheduler_addresses)
        return self
