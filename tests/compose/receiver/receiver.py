"""The smallest OTLP receiver: keeps the spans it is sent as lines of JSON, for the compose tests.

It stands where a collector would, as a container of its own, behind OpenTelemetry's own generated
gRPC service. No collector with an OTLP receiver can be installed from a package registry; the
profile `obs` runs the official one.
"""

from __future__ import annotations

import json
import sys
from concurrent import futures
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

FILE = Path("/tmp/spans.jsonl")
MOST_BYTES = 48 << 20


class Receiver(services.TraceServiceServicer):  # type: ignore[misc]
    """Appends every span, with what its process says about itself, to the file."""

    def Export(  # noqa: N802 - named by the protocol
        self, request: messages.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> messages.ExportTraceServiceResponse:
        """Keeps the spans of one export."""
        if FILE.exists() and FILE.stat().st_size > MOST_BYTES:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the file is full")
        lines = []
        for batch in request.resource_spans:
            resource = {each.key: each.value.string_value for each in batch.resource.attributes}
            for scope in batch.scope_spans:
                for span in scope.spans:
                    lines.append(
                        json.dumps(
                            {
                                "service": resource.get("service.name", ""),
                                "instance": resource.get("service.instance.id", ""),
                                "trace": span.trace_id.hex(),
                                "span": span.span_id.hex(),
                                "parent": span.parent_span_id.hex(),
                                "name": span.name,
                                "start_ns": span.start_time_unix_nano,
                                "end_ns": span.end_time_unix_nano,
                            }
                        )
                    )
        with FILE.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
        return messages.ExportTraceServiceResponse()


if __name__ == "__main__":
    server = grpc.server(futures.ThreadPoolExecutor(1), maximum_concurrent_rpcs=64)
    services.add_TraceServiceServicer_to_server(Receiver(), server)
    if server.add_insecure_port("0.0.0.0:4317") == 0:
        sys.exit("port 4317 is taken")
    server.start()
    server.wait_for_termination()
