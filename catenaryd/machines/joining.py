"""Joining a cluster and leaving it: the steps, and what is told on the way."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from catenary_protos.catenary.v1 import enrolment_pb2 as pb
from catenary_services.errors import CatenaryError, InvalidInput, PermissionDenied, Unavailable
from catenary_services.security.certificate_requests import make_request
from catenary_services.security.x509 import is_signed_by, key_digest, new_key
from catenaryd.enrolment.enrolment import agent_names
from catenaryd.enrolment.join_line import JoinLine
from catenaryd.machines import preflight
from catenaryd.machines.enrolment_client import (
    EnrolmentConnection,
    HostInfo,
    HostTrust,
    authorities_in,
    connected,
    discover,
    link_rate,
    look_at,
    share_of_life_left,
)
from catenaryd.machines.joined_machine import JoinedMachine, MachineStore, with_facts

RATE_TOLD_BYTES_PER_S = 150e6
"""A faster link is not told from the time that TLS takes here: its agents keep their default."""
RENEWED_SHARE = 1 / 3
AGAIN_S = 1.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The wishes of the user for a machine that joins."""

    name: str
    devices: tuple[str, ...]
    bind: str | None = None
    advertise: str | None = None
    transport_port: int = 0
    model_repository: Path | None = None
    """None for `models` in the data folder."""
    memory_bytes: int = 0
    threads: int = 0
    link_bytes_per_second: int = 0
    """Speed of the machine's network; 0 to measure it."""


def check_same(machine: JoinedMachine, line: JoinLine | None, changes: dict[str, object]) -> None:
    """Checks that a machine that has joined is asked to join as it did.

    Raises:
        InvalidInput: It is another cluster, or the machine had another name or other devices.
    """
    if line is not None and not hmac.compare_digest(line.authority_digest.hex(), machine.pin):
        raise InvalidInput(
            "join line",
            f"is of another cluster than the one {machine.name} joined at {machine.host}; run"
            " `catenaryd leave` first",
        )
    for field, asked in changes.items():
        was = getattr(machine, field)
        if asked is not None and asked != was:
            shown = ", ".join(was) if isinstance(was, tuple) else was
            raise InvalidInput(
                field, f"was {shown} when this machine joined; run `catenaryd leave` to change it"
            )


async def enrol(
    folder: MachineStore, line: JoinLine, options: JoinOptions, tell: Tell
) -> JoinedMachine:
    """Joins a cluster: checks, certificates, measurement; returns what is kept of it.

    Raises:
        CatenaryError: A check failed, or the host refused; the message is one sentence. Nothing has
            been started.
    """
    if not line.token:
        raise InvalidInput(
            "join line", "has no token; `catenaryd token create` on the host prints one"
        )
    await preflight.check_devices(options.devices, options.memory_bytes)
    trust = await discover(line.host, line.port, line.authority_digest)
    async with connected(line.host, line.port, trust) as connection:
        facts = await look_at(connection)
        _tell_host(line, trust, facts, tell)
        preflight.check_version(facts.identity.software_version)
        preflight.check_clock(facts)
        bind, advertise, remark = preflight.addresses_for(
            options.bind, options.advertise, facts.local_address, facts.identity.observed_address
        )
        if remark:
            tell(remark)
        preflight.check_ports(bind, options.transport_port, len(options.devices))
        repository = options.model_repository or folder.data_dir / "models"
        machine = JoinedMachine(
            name=options.name,
            cluster=trust.cluster,
            host=line.host,
            port=line.port,
            pin=line.authority_digest.hex(),
            devices=options.devices,
            agents=tuple(agent_names(options.name, len(options.devices))),
            bind=bind,
            advertise=advertise,
            transport_port=options.transport_port,
            model_repository=str(repository.absolute()),
            scheduler_addresses=(),
            scheduler_groups=1,
            group=0,
            link_bytes_per_second=options.link_bytes_per_second,
            memory_bytes=options.memory_bytes,
            threads=options.threads,
        )
        machine = await _get_certificates(folder, connection, machine, line.token, facts)
    if not machine.link_bytes_per_second:
        machine = await _measure(folder, machine, facts.round_trip_s, tell)
    return machine


async def refresh(folder: MachineStore, machine: JoinedMachine) -> JoinedMachine:
    """Asks the host for its present facts and authorities, and renews certificates that need it.

    A certificate is renewed when a third of its life is left, or another key signs now.

    Raises:
        CatenaryError: The host does not answer, or refuses.
    """
    for agent in machine.agents:
        async with connected(
            machine.host, machine.port, folder.trust(machine, agent)
        ) as connection:
            asked = pb.EnrolmentRequest(discover=pb.DiscoverCluster())
            cluster = (await connection.ask(asked)).cluster
            folder.write_authorities(machine.cluster, cluster.authorities.encode("ascii"))
            certificate = folder.certificate_of(machine, agent)
            if share_of_life_left(certificate) < RENEWED_SHARE or not any(
                is_signed_by(certificate, each)
                for each in authorities_in(cluster.authorities.encode("ascii"), machine.cluster)
                if key_digest(each.public_key()) == cluster.signer
            ):
                key = new_key()
                csr = make_request(agent, key)
                answer = await connection.ask(
                    pb.EnrolmentRequest(renew=pb.RenewCertificate(csr=csr))
                )
                folder.write_pair(machine.cluster, agent, answer.issued.certificate, key)
    async with connected(
        machine.host, machine.port, folder.trust(machine, machine.agents[0])
    ) as connection:
        facts = (await connection.ask(pb.EnrolmentRequest(facts=pb.GetClusterFacts()))).facts
    fresh = with_facts(machine, facts)
    if fresh != machine:
        folder.write(fresh)
    return fresh


async def agent_states(folder: MachineStore, machine: JoinedMachine) -> dict[str, str]:
    """Returns the states of this machine's agents that the cluster knows.

    Raises:
        CatenaryError: The host does not answer, or refuses.
    """
    trust = folder.trust(machine, machine.agents[0])
    async with connected(machine.host, machine.port, trust) as connection:
        answer = await connection.ask(pb.EnrolmentRequest(facts=pb.GetClusterFacts()))
    return {each.agent_id: each.state for each in answer.facts.agents}


async def leave(folder: MachineStore, machine: JoinedMachine) -> str:
    """Tells the host that a machine, whose agents have ended, leaves, and forgets its certificates.

    Returns:
        Why the host could not be told; "" if it was.
    """
    why = ""
    try:
        trust = folder.trust(machine, machine.agents[0])
        async with connected(machine.host, machine.port, trust) as connection:
            await connection.ask(pb.EnrolmentRequest(leave=pb.LeaveCluster()))
    except PermissionDenied:
        pass  # the host has forgotten this machine before
    except CatenaryError as error:
        why = error.message
    folder.forget()
    return why


async def _get_certificates(
    folder: MachineStore,
    connection: EnrolmentConnection,
    machine: JoinedMachine,
    token: str,
    facts: HostInfo,
) -> JoinedMachine:
    keys = {agent: new_key() for agent in machine.agents}
    requests = [
        pb.AgentRequest(agent_id=agent, csr=make_request(agent, key)) for agent, key in keys.items()
    ]
    enrolling = pb.EnrolMachine(token=token, machine=machine.name, agents=requests)
    answer = await _ask_again(connection, machine, facts, pb.EnrolmentRequest(enrol=enrolling))
    issued = {each.agent_id: each.certificate for each in answer.enrolled.certificates}
    if issued.keys() != keys.keys():
        raise InvalidInput("certificates", "are not the ones that were asked for")
    for agent, key in keys.items():
        folder.write_pair(machine.cluster, agent, issued[agent], key)
    folder.write_authorities(machine.cluster, facts.identity.authorities.encode("ascii"))
    machine = with_facts(machine, answer.enrolled.facts)
    folder.write(machine)
    return machine


async def _ask_again(
    connection: EnrolmentConnection,
    machine: JoinedMachine,
    facts: HostInfo,
    request: pb.EnrolmentRequest,
) -> pb.EnrolmentAnswer:
    """Returns the answer to a request, sent again if a connection ends without one.

    The host counts the token once for the same request.
    """
    try:
        return await connection.ask(request)
    except Unavailable:
        await asyncio.sleep(AGAIN_S)
    trust = HostTrust(machine.cluster, facts.identity.authorities.encode("ascii"))
    async with connected(machine.host, machine.port, trust) as another:
        return await another.ask(request)


async def _measure(
    folder: MachineStore, machine: JoinedMachine, round_trip_s: float, tell: Tell
) -> JoinedMachine:
    trust = folder.trust(machine, machine.agents[0])
    async with connected(machine.host, machine.port, trust) as connection:
        rate = await link_rate(connection, round_trip_s)
    if rate >= RATE_TOLD_BYTES_PER_S:
        tell(f"link: {rate / 1e6:.0f} MB/s or more")
        return machine
    tell(f"link: {rate / 1e6:.1f} MB/s")
    machine = replace(machine, link_bytes_per_second=max(1, int(rate)))
    folder.write(machine)
    return machine


def _tell_host(line: JoinLine, trust: HostTrust, facts: HostInfo, tell: Tell) -> None:
    when = time.strftime("%H:%M:%S", time.gmtime(facts.identity.unix_ns / 1e9))
    tell(
        f"cluster {trust.cluster} at {line.address}: round trip {facts.round_trip_s * 1e3:.1f} ms,"
        f" clocks {abs(facts.clock_difference_s):.3f} s apart ({when} UTC there)"
    )
