"""The machines of a cluster, by its status."""

from __future__ import annotations

from dataclasses import replace

from catenary import AgentImpairment, AgentInfo, MachineInfo
from catenary.rpc.machines import idle_reason, machines_of
from catenary.rpc.messages import cluster_status
from catenary_protos.catenary.v1 import admin_pb2

PI = AgentInfo("pi4", "cpu", "cpu", "ready", (), 4 << 30, 0.0, server_id="pi4", address="10.0.0.7")
STATUS = cluster_status(
    admin_pb2.GetStatusResponse(
        models=[admin_pb2.ModelStatus(name="net", version="1")],
        agents=[
            admin_pb2.AgentStatus(
                agent_id="box-1", server_id="box", address="10.0.0.6", partitions=["net:1[4,8)"]
            ),
            admin_pb2.AgentStatus(
                agent_id="box-0",
                server_id="box",
                partitions=["net:1[0,4)", "llm:2[0,6)"],
                state="ready",
            ),
            admin_pb2.AgentStatus(agent_id="lone", state="ready"),
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
