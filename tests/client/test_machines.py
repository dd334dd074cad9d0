"""The machines of a cluster, by its status."""

from __future__ import annotations

from dataclasses import replace

from catenary import AgentImpairment, AgentInfo, DeviceFacts, MachineInfo
from catenary.rpc.machines import (
    LINK_COLUMNS,
    hardware_of,
    idle_reason,
    links_in_rows,
    machines_of,
)
from catenary.rpc.messages import cluster_status
from catenary_protos.catenary.v1 import admin_pb2, common_pb2

GPU = common_pb2.DeviceFacts(
    name="NVIDIA L4",
    total_bytes=24 * 10**9,
    compute_capability="8.9",
    cuda="13.0",
    driver="580.65.06",
    pcie_generation=4,
    pcie_width=16,
    power_limit_milliwatts=72_000,
    mig_mode="off",
)
PI = AgentInfo("pi4", "cpu", "cpu", "ready", (), 4 << 30, 0.0, server_id="pi4", address="10.0.0.7")
STATUS = cluster_status(
    admin_pb2.GetStatusResponse(
        models=[admin_pb2.ModelStatus(name="net", version="1")],
        agents=[
            admin_pb2.AgentStatus(
                agent_id="box-1",
                server_id="box",
                address="10.0.0.6",
                partitions=["net:1[4,8)"],
                device_facts=GPU,
            ),
            admin_pb2.AgentStatus(
                agent_id="box-0",
                server_id="box",
                partitions=["net:1[0,4)", "llm:2[0,6)"],
                state="ready",
                device_facts=GPU,
            ),
            admin_pb2.AgentStatus(agent_id="lone", state="ready"),
        ],
        links=[
            admin_pb2.LinkStatus(
                source_server_id="box",
                target_server_id="lone",
                round_trip_ns=42_500_000,
                bytes_per_second=6_100_000,
            )
        ],
    )
)


def test_agents_of_one_server_are_one_machine() -> None:
    box, lone = machines_of(STATUS)
    assert isinstance(box, MachineInfo)
    assert (box.machine, box.address, lone.machine) == ("box", "10.0.0.6", "lone")
    assert {agent.agent_id for agent in box.agents} == {"box-0", "box-1"}
    assert box.models == ("llm:2", "net:1")
    assert box.idle == {}


def test_a_machine_has_the_links_from_it() -> None:
    box, lone = machines_of(STATUS)
    assert lone.links == ()
    assert links_in_rows(box.links) == [("box", "lone", 42.5, 6.1)]
    assert len(LINK_COLUMNS) == 4


def test_alike_devices_are_told_once() -> None:
    assert STATUS.agents[2].device_facts is None
    assert hardware_of(STATUS.agents) == [
        (
            "box-1, box-0",
            "NVIDIA L4, 24.0 GB, compute capability 8.9, driver 580.65.06 CUDA 13.0, PCIe 4 x16, 72 W",
        )
    ]
    cpu = DeviceFacts("Some CPU", 8 * 10**9, cores=1, vector_instructions=("avx2", "fma"))
    assert str(cpu) == "Some CPU, 1 core, 8.0 GB, avx2, fma"
    part = DeviceFacts("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 * 10**9, cuda="12.8", mig_mode="on")
    assert str(part) == "NVIDIA A100-SXM4-40GB MIG 1g.5gb, 5.0 GB, driver CUDA 12.8, MIG"


def test_an_idle_agent_says_why() -> None:
    cannot = AgentImpairment("cannot_load", "net:1", None, "its runtime has no such operator")
    assert "plan explain" in idle_reason(PI, STATUS)
    assert idle_reason(replace(PI, state="lost"), STATUS) == "the cluster does not hear it"
    assert idle_reason(replace(PI, state="draining"), STATUS) == "it is draining"
    assert "joined" in idle_reason(replace(PI, state="joining"), STATUS)
    assert idle_reason(replace(PI, impairments=(cannot,)), STATUS) == (
        "cannot load net:1: its runtime has no such operator"
    )
    assert idle_reason(PI, replace(STATUS, models=())) == "no model is deployed"
    assert idle_reason(replace(PI, partitions=("net:1[0,4)",)), STATUS) == ""
