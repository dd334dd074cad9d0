"""Two emulated GPUs, each divided in two, serve for real; times are those of the profile."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

import catenary
from catenary_agent.profiling.profiler import ProfileOrder, profile_model
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_services.models.model_repository import PROFILE_FILE, ModelRepository
from cluster_harness import MODEL, running_cluster
from fault_cluster import install_images

pytestmark = pytest.mark.system


def test_virtual_gpus_are_reported_and_take_their_profiles_times(tmp_path: Path) -> None:
    key = install_images(tmp_path / "models")
    repository = ModelRepository(tmp_path / "models")
    order = ProfileOrder(None, levels=(2,), estimates=("T4",))
    profile = profile_model(repository, key, order, repository.folder(key) / PROFILE_FILE)
    whole_ns = profile.compute_ns("T4", 2, 0, profile.blocks)[0]
    with running_cluster(tmp_path, agents=4, device="emulated:T4", virtual_gpus=2) as cluster:
        with grpc.insecure_channel(cluster.admin) as channel:
            status = admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest())  # type: ignore[no-untyped-call]
        found = {each.agent_id: (each.virtual_level, each.device_id) for each in status.agents}
        assert found == {
            "agent-0": (2, "device-0"),
            "agent-1": (2, "device-0"),
            "agent-2": (2, "device-1"),
            "agent-3": (2, "device-1"),
        }
        assert {each.memory_bytes for each in status.agents} == {16 * 10**9 * 9 // 10 // 2}
        with catenary.Client(cluster.grpc) as client:
            answer = client.infer(MODEL, {"image": np.zeros((1, 3, 224, 224), np.float32)})
        assert answer is not None
        with grpc.insecure_channel(cluster.admin) as channel:
            trace = admin_pb2_grpc.AdminStub(channel).GetTrace(admin_pb2.GetTraceRequest())  # type: ignore[no-untyped-call]
        computed = sum(span.duration_ns for span in trace.spans if "compute" in span.name)
        assert computed >= whole_ns
