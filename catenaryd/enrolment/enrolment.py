"""Answers of the host to machines that join, renew their certificates or leave."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from catenary_protos.catenary.v1 import enrolment_pb2 as pb
from catenary_services.errors import (
    CatenaryError,
    InvalidInput,
    PermissionDenied,
)
from catenary_services.log import get_logger
from catenary_services.security.authority import CertificateAuthority
from catenary_services.security.certificate_requests import key_of_request
from catenary_services.security.identity import Identity, Role
from catenary_services.security.x509 import key_digest, pem_of
from catenary_services.version import software_version
from catenaryd.enrolment.join_tokens import JoinTokens
from catenaryd.enrolment.machine_registry import Machine, MachineRegistry

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EnrolmentCaller:
    """The sender of a request."""

    address: str
    identity: Identity | None = None
    """The identity in the certificate of the connection; None if it shows none."""
    key: str = ""
    """Digest of that certificate's public key, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class EnrolmentHost:
    """The facts of the host that machines are told."""

    taken_names: frozenset[str]
    """The host's own name, and those of its processes, running or not."""
    scheduler_addresses: tuple[str, ...]
    scheduler_groups: int = 1


AgentStates = Callable[[], Awaitable[Mapping[str, str]]]
"""Returns the state of every agent that the cluster knows ("joining", "ready", "draining" or
"lost") by its id, and "ready" for every gateway, whose names are of the same series; raises
`CatenaryError` if the cluster does not answer."""


class Enrolment:
    """Decides who gets which certificate. Thread-safe where it must be: one event loop."""

    def __init__(
        self,
        authority: CertificateAuthority,
        tokens: JoinTokens,
        machines: MachineRegistry,
        host: EnrolmentHost,
        states: AgentStates,
    ) -> None:
        self._authority = authority
        self._tokens = tokens
        self._machines = machines
        self._host = host
        self._states = states
        self._turn = asyncio.Lock()
        """Held while names are checked and given, so that no two machines get one name."""

    async def answer(
        self, request: pb.EnrolmentRequest, caller: EnrolmentCaller
    ) -> pb.EnrolmentAnswer:
        """Returns the answer to a request that kept its rules; see `Answerer`."""
        made = pb.EnrolmentAnswer()
        match request.WhichOneof("kind"):
            case "discover":
                made.cluster.CopyFrom(self._identity(caller))
            case "enrol":
                made.enrolled.CopyFrom(await self._enrol(request.enrol, caller))
            case "renew":
                made.issued.CopyFrom(await self._renew(request.renew, caller))
            case "facts":
                made.facts.CopyFrom(await self._facts(self._machine(caller)))
            case "measure":
                self._machine(caller)
                made.payload.zeros = bytes(request.measure.bytes)
            case "leave":
                made.left.CopyFrom(await self._leave(caller))
            case _:
                raise InvalidInput("kind", "is none that this host knows")
        return made

    def _identity(self, caller: EnrolmentCaller) -> pb.ClusterIdentity:
        return pb.ClusterIdentity(
            authorities=self._authority.trusted().decode("ascii"),
            signer=self._authority.signer_digest,
            software_version=software_version(),
            unix_ns=time.time_ns(),
            observed_address=caller.address,
        )

    async def _enrol(self, request: pb.EnrolMachine, caller: EnrolmentCaller) -> pb.MachineEnrolled:
        digest = hashlib.sha256(request.machine.encode())
        for agent in request.agents:
            digest.update(hashlib.sha256(agent.csr).digest())
        what = digest.hexdigest()
        async with self._turn:
            # Whoever has no token learns nothing of names that are taken.
            await asyncio.to_thread(self._tokens.check, request.token, what)
            keys = _checked_agents(request, self._authority.cluster)
            digests = {agent: key_digest(key).hex() for agent, key in keys.items()}
            await self._check_free(request.machine, digests)
            await asyncio.to_thread(self._tokens.use, request.token, request.machine, what)
            group = self._machines.next_group(self._host.scheduler_groups)
            known = {agent: [key] for agent, key in digests.items()}
            machine = Machine(request.machine, group, time.time(), caller.address, known)
            await asyncio.to_thread(self._machines.add, machine)
            issued = [await self._issue(agent, key) for agent, key in keys.items()]
        log.warning(
            "machine_enrolled", machine=machine.name, agents=list(keys), peer=caller.address
        )
        return pb.MachineEnrolled(certificates=issued, facts=self._facts_of(machine, {}))

    async def _check_free(self, name: str, keys: dict[str, str]) -> None:
        if taken := sorted({name, *keys} & self._host.taken_names):
            raise PermissionDenied(
                f"the name {taken[0]!r} is taken: the host, or a process of it, is called so;"
                " choose another (--name)"
            )
        states = await self._states()
        connected = {agent for agent, state in states.items() if state != "lost"}
        self._machines.check_free(name, keys, connected)

    async def _renew(
        self, request: pb.RenewCertificate, caller: EnrolmentCaller
    ) -> pb.CertificateIssued:
        async with self._turn:
            machine = self._machine(caller)
            assert caller.identity is not None
            agent = caller.identity.name
            key = key_of_request(agent, request.csr)
            digest = key_digest(key).hex()
            await asyncio.to_thread(self._machines.renew, machine, agent, caller.key, digest)
            issued = await self._issue(agent, key)
        log.info("certificate_renewed", agent=agent, peer=caller.address)
        return issued

    async def _leave(self, caller: EnrolmentCaller) -> pb.MachineLeft:
        async with self._turn:
            machine = self._machine(caller)
            await asyncio.to_thread(self._machines.remove, machine)
        log.warning("machine_left", machine=machine.name, peer=caller.address)
        return pb.MachineLeft()

    async def _facts(self, machine: Machine) -> pb.ClusterFacts:
        try:
            states = await self._states()
        except CatenaryError:
            states = {}  # the rest is known nevertheless
        return self._facts_of(machine, states)

    def _facts_of(self, machine: Machine, states: Mapping[str, str]) -> pb.ClusterFacts:
        return pb.ClusterFacts(
            cluster=self._authority.cluster,
            scheduler_addresses=self._host.scheduler_addresses,
            scheduler_groups=self._host.scheduler_groups,
            group=machine.group % self._host.scheduler_groups,
            agents=[
                pb.MachineAgent(agent_id=agent, state=states[agent])
                for agent in machine.keys
                if agent in states
            ],
        )

    async def _issue(self, agent: str, key: ec.EllipticCurvePublicKey) -> pb.CertificateIssued:
        identity = Identity.of(self._authority.cluster, Role.AGENT, agent)
        made: x509.Certificate = await asyncio.to_thread(self._authority.sign, identity, key)
        return pb.CertificateIssued(agent_id=agent, certificate=pem_of([made]).decode("ascii"))

    def _machine(self, caller: EnrolmentCaller) -> Machine:
        """Returns the machine of the agent whose certificate a connection shows.

        Raises:
            PermissionDenied: It shows none of an agent, or one whose machine has left.
        """
        identity = caller.identity
        if identity is None or identity.role is not Role.AGENT:
            raise PermissionDenied("only machines that joined may ask this, with a certificate")
        if identity.cluster != self._authority.cluster:
            raise PermissionDenied(f"{identity} is of another cluster")
        return self._machines.machine_of(identity.name, caller.key)


def agent_names(machine: str, devices: int) -> list[str]:
    """Returns the names of a machine's agents: its own, with numbers if there are several."""
    return [machine] if devices == 1 else [f"{machine}-{number}" for number in range(devices)]


def _checked_agents(request: pb.EnrolMachine, cluster: str) -> dict[str, ec.EllipticCurvePublicKey]:
    """Returns the public key of each agent of a machine that joins.

    Raises:
        InvalidInput: The names are not the machine's, a key serves two agents, or a request for a
            certificate is not in order.
    """
    if [each.agent_id for each in request.agents] != agent_names(
        request.machine, len(request.agents)
    ):
        raise InvalidInput("agents", f"are not named after the machine {request.machine!r}")
    for each in request.agents:
        Identity.of(cluster, Role.AGENT, each.agent_id)
    keys = {each.agent_id: key_of_request(each.agent_id, each.csr) for each in request.agents}
    if len({key_digest(key) for key in keys.values()}) < len(keys):
        raise InvalidInput("agents", "two of them have the same key")
    return keys
