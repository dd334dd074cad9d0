"""The SDK, the command line, health and reflection against a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

import catenary
from catenaryd.demo.demo_models import labels, preprocess, sample_photographs
from cluster_harness import MODEL, RunningCluster, environment


def command(cluster: RunningCluster, *arguments: str) -> str:
    ports = ["--target", cluster.grpc, "--admin", cluster.admin]
    done = subprocess.run(
        [sys.executable, "-m", "catenary", *arguments, *ports],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_health_and_reflection_answer(cluster: RunningCluster) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert "inference.GRPCInferenceService" in services
    assert "grpc.health.v1.Health" in services


def test_http_health_and_metrics_answer(cluster: RunningCluster) -> None:
    for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
        assert urllib.request.urlopen(cluster.http + path, timeout=5).status == 200
    text = urllib.request.urlopen(cluster.facts["metrics"], timeout=5).read().decode()
    assert "catenary_" in text


def test_sdk_infers_and_traces_every_hop(cluster: RunningCluster) -> None:
    image = preprocess(sample_photographs()["coffee"])
    with catenary.Client(cluster.grpc, admin_target=cluster.admin) as client:
        model = client.model_metadata(MODEL)
        answer = client.infer(MODEL, {model.inputs[0].name: image}, request_id="sdk-1")
        best = int(answer.outputs[model.outputs[0].name][0].argmax())
        assert "espresso" in labels()[best].lower()
        trace = client.trace("sdk-1")
        status = client.status()
    assert trace.outcome == "OK"
    computes = [span for span in trace.spans if "compute" in span.name]
    assert len(computes) == 3
    assert {span.process for span in computes} >= {"agent-0"}
    assert sum(span.duration_ns for span in computes) < trace.total_ns
    assert all(
        span.start_ns + span.duration_ns <= trace.total_ns + 1_000_000 for span in trace.spans
    )
    assert [agent.state for agent in status.agents] == ["ready"] * 3
    assert status.redis_connected


def test_the_command_line_shows_status_models_and_a_waterfall(cluster: RunningCluster) -> None:
    status = json.loads(command(cluster, "status", "--json"))
    assert len(status["agents"]) == 3
    assert MODEL in command(cluster, "models")
    assert "agent-1" in command(cluster, "plan", "show")
    image = preprocess(sample_photographs()["rocket"])
    with catenary.Client(cluster.grpc, admin_target=cluster.admin) as client:
        name = client.model_metadata(MODEL).inputs[0].name
        client.infer(MODEL, {name: image}, request_id="cli-1")
    shown = command(cluster, "trace", "cli-1")
    assert "compute" in shown
    assert "agent-0" in shown
