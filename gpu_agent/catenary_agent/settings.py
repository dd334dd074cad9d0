"""The settings of an agent process: its device, its schedulers and its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from catenary_agent.executors.device import MOST_VIRTUAL_GPUS
from catenary_services.addresses import check_advertised
from catenary_services.domain.groups import AUTO, MOST_GROUPS
from catenary_services.domain.model import ENGINE_OF
from catenary_services.settings import USUAL_REPOSITORY, ModelFolderSettings


class AgentSettings(ModelFolderSettings):
    """The settings of one agent, which hosts partitions on one device or one share of it."""

    agent_id: str = Field(min_length=1, description="Name of this agent, unique in the cluster.")
    device: str = Field("cpu", description='Device to compute on: "cpu", "cuda:0", "emulated:p4".')
    device_class: str = Field(
        "", description="Name the planner knows the device by; empty: derived from the device."
    )
    virtual_level: int = Field(
        1,
        ge=1,
        le=MOST_VIRTUAL_GPUS,
        description="This agent is one of so many virtual GPUs of its device.",
    )
    device_id: str = Field(
        "",
        description="Virtual GPUs of one device name the same; empty: the server and the device.",
    )
    server_id: str = Field(
        "", description="Agents of one server share its network card; empty: the agent alone."
    )
    scheduler_addresses: list[str] = Field(
        default_factory=lambda: ["127.0.0.1:8004"],
        description="host:port of every scheduler, leader and standbys; one that leads is obeyed.",
    )
    scheduler_groups: int = Field(
        1,
        ge=1,
        le=MOST_GROUPS,
        description="Scheduler groups the cluster's agents are divided into.",
    )
    scheduler_group: str = Field(
        AUTO,
        description='Group this agent belongs to; "auto": by the number at the end of '
        "agent_id, else by a checksum of it.",
    )
    model_repository: Path = Field(
        USUAL_REPOSITORY,
        description="Folder that holds models/<name>/<version>/. It may be empty or absent: what "
        "is to be loaded is fetched from peers that have it, and kept here.",
    )
    threads: int = Field(
        0, ge=0, description="Compute threads of the executors; 0: the agent's share of the cores."
    )
    host_devices: int = Field(
        1, ge=1, description="So many CPU devices share this host's cores and memory."
    )
    cpu_cores: list[int] = Field(
        default_factory=list, description="Cores to keep to; empty: none in particular."
    )
    memory_bytes: int = Field(
        0, ge=0, description="Memory for partitions; 0: the agent's share of what the device has."
    )
    link_bytes_per_second: int = Field(
        2_000_000_000, gt=0, description="Speed of the server's network card, for the planner."
    )
    transports: list[str] = Field(
        default_factory=lambda: ["shm", "tcp", "grpc"],
        description="Transports offered to peers, best first: shm, tcp, grpc; nixl only where "
        "`trusted_network` is set.",
    )
    trusted_network: bool = Field(
        False,
        description="Nobody but the cluster's processes reaches this network, and each may do "
        "with the others what it likes. The transport nixl demands that, with TLS or without: it "
        "sends unencrypted, and who reaches the ports of its library can write into memory.",
    )
    transport_host: str = Field(
        "127.0.0.1", description="Address that frames of peers are received at."
    )
    transport_port: int = Field(
        0, ge=0, le=65535, description="TCP port for frames of peers; 0: any free port."
    )
    advertise_host: str | None = Field(
        None,
        description="Address that peers are told instead of `transport_host`: behind address "
        "translation, or where that means all addresses of this machine.",
    )
    runtime_dir: Path | None = Field(
        None, description="Folder for sockets of the shm transport; empty: the system's choice."
    )
    emulated_slowdown: float = Field(
        1.0, ge=0, description="An emulated device is this many times slower than this host."
    )
    emulated_profile: Path | None = Field(
        None, description="File with the block times of the emulated device; empty: slowdown only."
    )
    emulated_link: bool = Field(
        False, description="Frames between agents take as long as `link_bytes_per_second` says."
    )
    max_held_bytes: int = Field(
        1 << 30, gt=0, description="Bytes of received tensors held at a time; more is refused."
    )
    max_assemblies: int = Field(
        256, gt=0, description="Batches waiting for rows of other gateways at a time."
    )
    decoder: Literal["auto", "onnx", "torch", "vllm", "llama_server"] = Field(
        "auto",
        description="Library language models run on; auto: ONNX Runtime on a CPU, PyTorch on CUDA; "
        "vllm, llama_server: that engine serves them whole, as a child process.",
    )
    engine_python: Path | None = Field(
        None,
        description="Python of the virtual environment that has the engine of `decoder`: vLLM, or "
        "xllamacpp for llama_server; empty: the agent's own.",
    )
    engine_start_s: float = Field(
        300.0, gt=0, description="An engine that starts and says nothing for this long is given up."
    )
    decoder_numbers: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="What PyTorch keeps weights of language models in; auto: float32 on a CPU, "
        "float16 on CUDA. Caches are float16 beside bfloat16, too, which has a wider range and "
        "multiplies prompts twice. A CPU takes the memory of the small ones, but is slow in them.",
    )
    engine_cache_dir: Path | None = Field(
        None,
        description="Folder where TensorRT keeps the engines it builds for ONNX models on a GPU; "
        "empty: TensorRT is not used.",
    )
    canary: Literal["off", "on"] = Field(
        "off",
        description="on: a partition takes traffic only if it answers a fixed input as the first "
        "agent of its kind did.",
    )
    prefill_chunk_tokens: int = Field(
        0,
        ge=0,
        description="Most prompt tokens computed in one step; 0: 64 on a CPU, 512 on a GPU, and "
        "beside running sessions only as many as hold these up for 80 ms in a whole ring.",
    )
    draft_tokens: int = Field(
        8,
        ge=0,
        le=64,
        description="Most next tokens of an answer that are guessed from its own text and computed "
        "with the one that is known, where that is likely to pay; 0: none. Answers are the same.",
    )
    prefix_cache: Literal["off", "on"] = Field(
        "on",
        description="on: caches of sessions that are over are kept in the memory that others leave "
        "over, and a session that begins with the same tokens starts behind them.",
    )
    prefix_host_bytes: int = Field(
        0,
        ge=0,
        description="Most bytes of host memory for them beside each partition whose caches have "
        "memory of their own (PyTorch). Prompts are copied there as they are computed; 0: none is.",
    )
    row_numbers: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="What hidden states are on their way to agents on other machines. bfloat16: "
        "half the bytes on slow links, but answers may differ in a token from those of a chain on "
        "one machine, unless `decoder_numbers` is bfloat16 everywhere. All agents must be of this "
        "release or later.",
    )
    push_timeout_s: float = Field(
        2.0, gt=0, description="A peer that takes no byte of a frame for this long counts as lost."
    )
    heartbeat_s: float = Field(1.0, gt=0, description="Time between heartbeats to the scheduler.")
    silence_s: float = Field(
        3.0, gt=0, description="A scheduler silent for this long counts as gone."
    )

    stuck_s: float = Field(
        30.0,
        gt=0,
        description="A batch or a step of generation that takes longer than this, and "
        "than `stuck_factor` times what is booked for it, is taken to hang: the process ends.",
    )
    stuck_factor: float = Field(
        60.0, ge=1, description="See `stuck_s`; the scheduler has limits of its own, and is first."
    )
    stuck_load_s: float = Field(
        3600.0, gt=0, description="The same for loading a partition, and for measuring one."
    )
    faults_file: Path | None = Field(
        None,
        description="For tests only: what is computed hangs, fails or is slow as this file "
        "says (see `catenary_agent.supervision.faults`); refused without `allow_faults`.",
    )
    allow_faults: bool = Field(
        False, description="For tests only: `faults_file` may be given; never true in service."
    )

    @model_validator(mode="after")
    def _derive(self) -> AgentSettings:
        """Fills in fields that follow from others.

        Raises:
            ValueError: Fields contradict each other.
        """
        if not self.server_id:
            self.server_id = self.agent_id
        if not self.device_id:
            self.device_id = f"{self.server_id}/{self.device}"
        if not self.scheduler_addresses:
            raise ValueError("scheduler_addresses: at least one is needed")
        check_advertised(self.transport_host, self.advertise_host, self.scheduler_addresses)
        if self.decoder_numbers != "auto" and not self._runs_torch():
            raise ValueError("decoder_numbers: is for PyTorch; set decoder to torch")
        if self.engine_python is not None and self.decoder not in ENGINE_OF:
            raise ValueError("engine_python: is for an engine; set decoder to vllm or llama_server")
        if self.faults_file is not None and not self.allow_faults:
            raise ValueError("faults_file: is for tests only; allow_faults says that this is one")
        return self

    def _runs_torch(self) -> bool:
        on_cuda = self.device.startswith("cuda") and self.decoder == "auto"
        return self.decoder == "torch" or on_cuda
