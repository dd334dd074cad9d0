"""A trace exported over OTLP is one connected tree with gateway, scheduler and every agent hop."""

from __future__ import annotations

import threading
from concurrent import futures
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

import catenary
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.demo_models import preprocess, sample_photographs
from catenaryd.demo.plans import demo_placement
from cluster_harness import MODEL, running_cluster, wait_until
from fault_cluster import install_images


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span it is sent: (service name, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, object]] = []
        self.lock = threading.Lock()

    def Export(self, request, context):  # noqa: N802
        with self.lock:
            for resource in request.resource_spans:
                service = next(
                    item.value.string_value
                    for item in resource.resource.attributes
                    if item.key == "service.name"
                )
                for scope in resource.scope_spans:
                    self.spans += [(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def tree(self, trace_id: bytes) -> list[tuple[str, object]]:
        with self.lock:
            return [(service, span) for service, span in self.spans if span.trace_id == trace_id]


def test_one_request_is_one_tree_over_every_process(tmp_path: Path) -> None:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    key = install_images(tmp_path / "models")
    blocks = ModelRepository(tmp_path / "models").block_table(key).blocks
    telemetry = {"otlp_endpoint": f"http://127.0.0.1:{port}", "trace_sample_ratio": 1.0}
    config = dict.fromkeys(("gateway", "scheduler", "agent"), telemetry)
    try:
        with running_cluster(tmp_path, placement=demo_placement(blocks), config=config) as cluster:
            image = preprocess(sample_photographs()["chelsea"])
            with catenary.Client(cluster.grpc, admin_target=cluster.admin) as client:
                name = client.model_metadata(MODEL).inputs[0].name
                client.infer(MODEL, {name: image}, request_id="traced")
                trace_id = bytes.fromhex(client.trace("traced").trace_id)

            def complete() -> bool:
                hops = [s for s, span in collector.tree(trace_id) if span.name == "agent.hop"]
                services = {service for service, _ in collector.tree(trace_id)}
                return len(hops) == 3 and len(services) == 3

            wait_until(complete, 20, "the whole trace")
        spans = [span for _, span in collector.tree(trace_id)]
        ids = {span.span_id for span in spans}
        roots = [span for span in spans if span.parent_span_id not in ids]
        assert len(roots) == 1
        assert roots[0].parent_span_id == b""
        assert "ModelInfer" in roots[0].name
        names = {span.name for span in spans}
        assert {"scheduler.dispatch", "agent.hop", "agent.compute"} <= names
        slack_ns = 25_000_000
        for span in spans:
            assert span.start_time_unix_nano >= roots[0].start_time_unix_nano - slack_ns
            assert span.end_time_unix_nano <= roots[0].end_time_unix_nano + slack_ns
    finally:
        server.stop(None)
