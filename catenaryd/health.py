"""The command `catenaryd health`, with which container probes ask a process of this machine.

    python -m catenaryd.health ready     # it can take work, or stands by for it
    python -m catenaryd.health live      # it runs
    python -m catenaryd.health leader    # a scheduler that leads

It asks the plain gRPC health service of the process (`health_port`; see
`catenary_services.grpc.probes`). Exit code 0 is yes; 1 is no, with one sentence on stderr; 2 is bad
usage. A probe runs every few seconds beside the process it asks. Therefore this module imports only
what it needs, and takes the port from the process's environment instead of its settings class,
which takes a tenth of the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

QUESTIONS = ("live", "ready", "leader")
"""Names of the services in the process's health service."""
PORT_VARIABLE, USUAL_PORT = "CATENARY_HEALTH_PORT", "8005"


class Unhealthy(Exception):  # noqa: N818 - a negative answer, not an error of the tree
    """A process that does not answer as it should; the text says in which way."""


def ask(address: str, question: str, timeout_s: float) -> None:
    """Checks that the process at `address` ("host:port") answers yes.

    Raises:
        Unhealthy: The process answers no, or not in time.
    """
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service=question)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise Unhealthy(f"{address}: {_reason(error)}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unhealthy(f"{address} is not {question}")


def main(
    arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
) -> int:
    """Runs a probe and returns the exit code.

    Args:
        arguments: Arguments of the command line; None for those of this process.
        environment: Variables that name the port if no address is given.
    """
    parser = argparse.ArgumentParser(
        prog="catenaryd health",
        description="Asks a process of this machine, by its health port, whether it is well.",
        epilog="Example: catenaryd health ready --address 127.0.0.1:8005",
    )
    parser.add_argument("question", choices=QUESTIONS, nargs="?", default="ready")
    parser.add_argument("--address", help=f"host:port; default: ${PORT_VARIABLE} of this host.")
    parser.add_argument("--timeout-s", type=float, default=4.0, help="Default: %(default)s.")
    given = parser.parse_args(arguments)
    address = given.address or f"127.0.0.1:{environment.get(PORT_VARIABLE) or USUAL_PORT}"
    try:
        ask(address, given.question, given.timeout_s)
    except Unhealthy as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _reason(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)


if __name__ == "__main__":
    sys.exit(main())
