"""The host that machines join: the enrolment service of `catenaryd up --host`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc.aio

from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_services.addresses import host_port
from catenary_services.errors import InvalidInput, Unavailable
from catenary_services.security.identity import Role
from catenaryd.enrolment.enrolment import Enrolment, EnrolmentHost
from catenaryd.enrolment.enrolment_server import EnrolmentServer
from catenaryd.enrolment.join_line import JoinLine, join_line_for
from catenaryd.enrolment.join_tokens import USUAL_LIFE_S, JoinTokens
from catenaryd.enrolment.machine_registry import MachineRegistry
from catenaryd.enrolment.private_files import read_json, write_json
from catenaryd.local.local_cluster import LocalCluster

_ANSWER_S = 3.0
_FOLDER = "enrolment"


def tokens_of(data_dir: Path) -> JoinTokens:
    """Returns the tokens of the host with a data folder."""
    return JoinTokens(data_dir / _FOLDER / "tokens.json")


def new_line(data_dir: Path, uses: int = 1, life_s: float = USUAL_LIFE_S) -> JoinLine:
    """Returns the line, with a new token, by which machines join the host with a data folder.

    Raises:
        InvalidInput: No `catenaryd up --host` was started with this folder, or a number is out of
            range.
    """
    known = read_json(data_dir / _FOLDER / "host.json", _known_host)
    if known is None:
        raise InvalidInput(
            "data_dir", f"{data_dir} is not of a cluster started with `catenaryd up --host`"
        )
    advertise, port, pin = known
    return join_line_for(advertise, port, pin, tokens_of(data_dir).create(uses, life_s))


class JoinService:
    """Serves machines that join a local cluster, from its start to its end."""

    def __init__(self, cluster: LocalCluster) -> None:
        """Prepares the service of a cluster with a public address."""
        assert cluster.public is not None
        assert cluster.certificates is not None
        self._cluster = cluster
        self._public = cluster.public
        options, folder = cluster.options, cluster.options.data_dir / _FOLDER
        self._folder = folder
        self._authority = cluster.certificates.authority
        names = {options.machine, "gateway-0", *cluster.agent_ids()}
        names |= {f"scheduler-{index}" for index in range(options.schedulers)}
        host = EnrolmentHost(
            frozenset(names),
            tuple(host_port(self._public.advertise, port) for port in cluster.scheduler_ports),
            options.groups,
        )
        enrolment = Enrolment(
            self._authority,
            tokens_of(options.data_dir),
            MachineRegistry(folder / "machines.json"),
            host,
            self._states,
        )
        files = cluster.certificates.files_of(Role.AUTHORITY, "enrolment")
        self._server = EnrolmentServer(enrolment, files)

    async def start(self, port: int) -> JoinLine:
        """Listens, and returns the line by which one machine joins within an hour.

        Raises:
            Unavailable: The port is in use.
        """
        port = await self._server.start(self._public.bind, port)
        pin = self._authority.signer_digest.hex()
        known = {"advertise": self._public.advertise, "port": port, "pin": pin}
        write_json(self._folder / "host.json", known)
        return new_line(self._cluster.options.data_dir)

    async def close(self) -> None:
        await self._server.close()

    async def _states(self) -> Mapping[str, str]:
        async with grpc.aio.insecure_channel(self._cluster.admin_target) as channel:
            try:
                status = await admin_pb2_grpc.AdminStub(channel).GetStatus(
                    admin_pb2.GetStatusRequest(), timeout=_ANSWER_S
                )
            except grpc.aio.AioRpcError as error:
                raise Unavailable(f"the cluster does not answer: {error.details()}") from error
        if status.scheduler_problem:
            raise Unavailable(f"no scheduler leads the cluster: {status.scheduler_problem}")
        states = {each.agent_id: each.state for each in status.agents}
        return {**dict.fromkeys(status.gateways, "ready"), **states}


def _known_host(document: Any) -> tuple[str, int, bytes]:
    return str(document["advertise"]), int(document["port"]), bytes.fromhex(document["pin"])
