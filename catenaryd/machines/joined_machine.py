"""The folder of a machine that joined a cluster: facts, certificates and keys."""

from __future__ import annotations

import fcntl
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from catenary_protos.catenary.v1 import enrolment_pb2 as pb
from catenary_services.addresses import split_host_port
from catenary_services.errors import InvalidInput
from catenary_services.security.authority import AUTHORITY_FILE, pair_files
from catenary_services.security.identity import Identity, Role
from catenary_services.security.living_connections import revocation_lists
from catenary_services.security.x509 import (
    certificates_in,
    identity_of,
    is_for_key,
    key_digest,
    read_certificates,
    write_certificates,
    write_key,
    write_trusted,
)
from catenaryd.enrolment.private_files import read_json, write_json
from catenaryd.machines.enrolment_client import HostTrust, authorities_in, share_of_life_left


@dataclass(frozen=True, slots=True)
class JoinedMachine:
    """The facts of a machine that joined."""

    name: str
    cluster: str
    host: str
    """Address or name of the host, as in the join line."""
    port: int
    pin: str
    """Digest of the authority's public key in the join line, in hexadecimal digits."""
    devices: tuple[str, ...]
    agents: tuple[str, ...]
    """Names of the agents, one for each device."""
    bind: str
    advertise: str
    transport_port: int
    model_repository: str
    scheduler_addresses: tuple[str, ...]
    scheduler_groups: int
    group: int
    link_bytes_per_second: int = 0
    """Measured, or as the user said; 0 for the agent's default."""
    memory_bytes: int = 0
    threads: int = 0


class MachineStore:
    """The data folder of a machine that joined, or is about to."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.certificates = data_dir / "certs"
        self._file = data_dir / "machine.json"
        self._lock_file = data_dir / "join.lock"

    # ---- facts ----

    def read(self) -> JoinedMachine | None:
        """Returns the facts; None if the machine has joined no cluster.

        Raises:
            InvalidInput: The file is damaged.
        """
        return read_json(self._file, _machine)

    def write(self, machine: JoinedMachine) -> None:
        write_json(self._file, asdict(machine))

    # ---- certificates ----

    def write_pair(
        self, cluster: str, agent: str, pem: str, key: ec.EllipticCurvePrivateKey
    ) -> None:
        """Keeps an agent's certificate and its key.

        Raises:
            InvalidInput: The certificate is not of this agent and key.
        """
        identity = Identity.of(cluster, Role.AGENT, agent)
        certificate = certificates_in("certificate", pem.encode())[0]
        digest = key_digest(key.public_key())
        if identity_of(certificate) != identity or not is_for_key(certificate, digest):
            raise InvalidInput("certificate", f"is not the one asked for, of {identity}")
        self.certificates.mkdir(parents=True, exist_ok=True)
        cert_file, key_file = pair_files(self.certificates, identity)
        write_key(key_file, key)
        write_certificates(cert_file, [certificate])

    def write_authorities(self, cluster: str, pem: bytes) -> None:
        """Keeps the authorities that the host says are trusted.

        Raises:
            InvalidInput: They are not of this cluster.
        """
        found, lists = authorities_in(pem, cluster), revocation_lists(pem)
        self.certificates.mkdir(parents=True, exist_ok=True)
        file = self.certificates / AUTHORITY_FILE
        if not file.exists() or file.read_bytes() != pem:
            write_trusted(file, found, lists)

    def files_of(self, machine: JoinedMachine, agent: str) -> tuple[Path, Path, Path]:
        """Returns the paths of an agent's certificate, its key and the trusted authorities."""
        identity = Identity.of(machine.cluster, Role.AGENT, agent)
        return *pair_files(self.certificates, identity), self.certificates / AUTHORITY_FILE

    def certificate_of(self, machine: JoinedMachine, agent: str) -> x509.Certificate:
        """Returns an agent's certificate.

        Raises:
            InvalidInput: There is none, or it has ended.
        """
        certificate = read_certificates(self.files_of(machine, agent)[0])[0]
        if share_of_life_left(certificate) <= 0:
            raise InvalidInput(
                "certificates",
                f"of {agent} ended on {certificate.not_valid_after_utc:%Y-%m-%d}; join again with a"
                " new join line (`catenaryd token create` on the host prints one)",
            )
        return certificate

    def trust(self, machine: JoinedMachine, agent: str) -> HostTrust:
        """Returns the trust in the host, with the certificate of an agent to show.

        Raises:
            InvalidInput: A certificate is missing, or has ended.
        """
        self.certificate_of(machine, agent)
        cert_file, key_file, authorities = self.files_of(machine, agent)
        return HostTrust(machine.cluster, authorities.read_bytes(), cert_file, key_file)

    def forget(self) -> None:
        """Removes certificates, keys and facts."""
        for file in self.certificates.glob("*.pem"):
            file.unlink()
        self._file.unlink(missing_ok=True)

    # ---- one process at a time ----

    def lock(self) -> int | None:
        """Returns a descriptor that holds the folder for this process; None if another has it."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return descriptor

    def holder(self) -> int | None:
        """Returns the id of the process that holds the folder; None if none does."""
        descriptor = self.lock()
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.close(descriptor)
            return None
        text = self._lock_file.read_text(encoding="ascii", errors="replace")
        return int(text) if text.isdigit() else None


def with_facts(machine: JoinedMachine, facts: pb.ClusterFacts) -> JoinedMachine:
    """Returns a machine with what its cluster says of itself now.

    Raises:
        InvalidInput: The cluster has another name, or an address of a scheduler is none.
    """
    if facts.cluster != machine.cluster:
        raise InvalidInput("cluster", f"is {facts.cluster} now, and was {machine.cluster}")
    if not facts.scheduler_addresses:
        raise InvalidInput("scheduler_addresses", "the host names none")
    for address in facts.scheduler_addresses:
        split_host_port(address)
    known = {
        **asdict(machine),
        "scheduler_addresses": tuple(facts.scheduler_addresses),
        "scheduler_groups": facts.scheduler_groups,
        "group": facts.group,
    }
    return JoinedMachine(**known)


def _machine(entry: Any) -> JoinedMachine:
    sequences = ("devices", "agents", "scheduler_addresses")
    made = JoinedMachine(**{**entry, **{name: tuple(entry[name]) for name in sequences}})
    if len(made.agents) != len(made.devices) or not made.agents:
        raise ValueError("it names no agents, or not one for each device")
    for agent in made.agents:
        Identity.of(made.cluster, Role.AGENT, agent)
    return made
