"""A host that machines join, in this process: the real service over real TLS connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from catenary_services.security.authority import CertificateAuthority
from catenary_services.security.identity import Role
from catenaryd.enrolment.enrolment import Enrolment, EnrolmentHost
from catenaryd.enrolment.enrolment_server import EnrolmentServer
from catenaryd.enrolment.join_line import JoinLine
from catenaryd.enrolment.join_tokens import JoinTokens
from catenaryd.enrolment.machine_registry import MachineRegistry
from catenaryd.local.local_certificates import LocalCertificates
from catenaryd.machines.enrolment_client import EnrolmentConnection, connected, discover
from catenaryd.machines.joined_machine import MachineStore
from catenaryd.machines.joining import JoinOptions

HOST, SCHEDULER = "127.0.0.1", "10.0.0.5:8004"


@dataclass
class JoinHost:
    """A host with its parts, which tests may look into."""

    folder: Path
    groups: int = 1
    cluster: str | None = None
    states: dict[str, str] = field(default_factory=dict)
    """States of agents, as the cluster's status would say."""
    port: int = 0

    def __post_init__(self) -> None:
        certificates = LocalCertificates(self.folder / "certs", self.cluster)
        self.authority: CertificateAuthority = certificates.authority
        self.tokens = JoinTokens(self.folder / "tokens.json")
        self.machines = MachineRegistry(self.folder / "machines.json")
        taken = frozenset({"host", "gateway-0", "agent-0"})
        facts = EnrolmentHost(taken, (SCHEDULER,), self.groups)
        self.enrolment = Enrolment(
            self.authority, self.tokens, self.machines, facts, self._states_now
        )
        files = certificates.files_of(Role.AUTHORITY, "enrolment")
        self.server = EnrolmentServer(self.enrolment, files)

    async def _states_now(self) -> dict[str, str]:
        return self.states

    def line(self, token: str | None = None) -> JoinLine:
        token = self.tokens.create() if token is None else token
        return JoinLine(HOST, self.port, self.authority.signer_digest, token)

    @asynccontextmanager
    async def stranger(self) -> AsyncIterator[EnrolmentConnection]:
        """A connection that believes the pin and shows no certificate."""
        trust = await discover(HOST, self.port, self.authority.signer_digest)
        async with connected(HOST, self.port, trust) as connection:
            yield connection


@asynccontextmanager
async def join_host(
    folder: Path, prepare: Callable[[JoinHost], None] = lambda host: None, **options: object
) -> AsyncIterator[JoinHost]:
    """Serves machines that join, for the length of the block."""
    host = JoinHost(folder, **options)  # type: ignore[arg-type]
    prepare(host)
    host.port = await host.server.start(HOST, 0)
    try:
        yield host
    finally:
        await host.server.close()


def machine_folder(path: Path) -> MachineStore:
    return MachineStore(path)


def join_options(name: str = "pi4", **changes: object) -> JoinOptions:
    """Options of a machine on this one; peers are told an address that others could reach."""
    usual: dict[str, object] = {"devices": ("cpu",), "bind": HOST, "advertise": "10.0.0.7"}
    return JoinOptions(name, **{**usual, **changes})  # type: ignore[arg-type]
