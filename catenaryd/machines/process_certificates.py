"""A process's certificates from the authority of a cluster in containers: at first, and renewed."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from catenary_protos.catenary.v1 import enrolment_pb2 as pb
from catenary_services.addresses import host_port
from catenary_services.errors import CatenaryError, InvalidInput, Unauthenticated, Unavailable
from catenary_services.log import get_logger
from catenary_services.security.certificate_requests import make_request
from catenary_services.security.identity import Identity, Role
from catenary_services.security.living_connections import revocation_lists
from catenary_services.security.x509 import (
    certificates_in,
    cluster_of,
    identity_of,
    is_for_key,
    is_signed_by,
    key_digest,
    new_key,
    read_certificates,
    write_certificates,
    write_key,
    write_trusted,
)
from catenaryd.enrolment.role_tokens import proof_of
from catenaryd.machines.enrolment_client import (
    HostTrust,
    authorities_in,
    connected,
    share_of_life_left,
)

LOOK_EVERY_S = 60.0
"""Seconds between two looks at the authority: so late at most is known what it has revoked."""
RENEWED_SHARE = 1 / 3
AGAIN_S = 1.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessCertificate:
    """One process, the authority that certifies it, and the folder of its files."""

    role: Role
    name: str
    host: str
    port: int
    secret: str
    """The secret of the role's token."""
    folder: Path

    @property
    def cert_file(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key_file(self) -> Path:
        return self.folder / "tls.key"

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.crt"

    async def enrol(self, timeout_s: float) -> None:
        """Gets a certificate for a new key, unless a good one is there.

        Raises:
            PermissionDenied: The authority does not know the token.
            Unauthenticated: Whoever answers is not the authority.
            Unavailable: Nobody answers within `timeout_s`.
        """
        if self._is_good():
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            try:
                await self._enrol()
                return
            except Unavailable:
                if loop.time() >= until_s:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def keep(self) -> None:
        """Looks at the authority again and again until cancelled; renews what needs it."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.refresh()
            except (CatenaryError, OSError) as error:
                log.warning("certificate_not_renewed", why=str(error))

    async def refresh(self) -> None:
        """Takes over what is trusted by now, and renews the certificate if it needs it.

        Raises:
            CatenaryError: The authority does not answer, or refuses.
        """
        if not self._is_good():
            await self._enrol()
            return
        cluster = self._identity_held().cluster
        trust = HostTrust(cluster, self.ca_file.read_bytes(), self.cert_file, self.key_file)
        async with connected(self.host, self.port, trust) as connection:
            answer = await connection.ask(pb.EnrolmentRequest(discover=pb.DiscoverCluster()))
            pem = answer.cluster.authorities.encode("ascii")
            authorities = authorities_in(pem, cluster)
            if pem != self.ca_file.read_bytes():
                write_trusted(self.ca_file, authorities, revocation_lists(pem))
            certificate = read_certificates(self.cert_file)[0]
            signers = [
                each
                for each in authorities
                if key_digest(each.public_key()) == answer.cluster.signer
            ]
            is_of_signer = any(is_signed_by(certificate, each) for each in signers)
            if is_of_signer and share_of_life_left(certificate) > RENEWED_SHARE:
                return
            key = new_key()
            csr = make_request(self.name, key)
            issued = await connection.ask(pb.EnrolmentRequest(renew=pb.RenewCertificate(csr=csr)))
        self._write(cluster, issued.issued.certificate, key)

    async def _enrol(self) -> None:
        trust = await self._discover()
        key = new_key()
        request = pb.EnrolProcess(
            token=f"{self.role}.{self.secret}", name=self.name, csr=make_request(self.name, key)
        )
        async with connected(self.host, self.port, trust) as connection:
            answer = await connection.ask(pb.EnrolmentRequest(process=request))
        self.folder.mkdir(parents=True, exist_ok=True)
        authorities = authorities_in(trust.authorities, trust.cluster)
        write_trusted(self.ca_file, authorities, revocation_lists(trust.authorities))
        self._write(trust.cluster, answer.issued.certificate, key)

    async def _discover(self) -> HostTrust:
        """Returns the trust in the authority, which has proved that it knows the secret."""
        where = host_port(self.host, self.port)
        nonce = secrets.token_bytes(32)
        asked = pb.DiscoverCluster(token_id=str(self.role), nonce=nonce)
        async with connected(self.host, self.port, None) as connection:
            answer = await connection.ask(pb.EnrolmentRequest(discover=asked))
        pem = answer.cluster.authorities.encode()
        if not hmac.compare_digest(answer.cluster.proof, proof_of(self.secret, nonce, pem)):
            raise Unauthenticated(
                f"whoever answers at {where} does not know the secret of the role {self.role}: it"
                " is another cluster, somebody in between, or the tokens differ"
            )
        clusters = {cluster_of(each) for each in certificates_in("authorities", pem)}
        cluster = clusters.pop() if len(clusters) == 1 else None
        if cluster is None:
            raise Unauthenticated(f"{where} shows no authority of one cluster")
        return HostTrust(cluster, pem)

    def _write(self, cluster: str, pem: str, key: ec.EllipticCurvePrivateKey) -> None:
        made = certificates_in("certificate", pem.encode())
        if identity_of(made[0]) != Identity.of(cluster, self.role, self.name):
            raise InvalidInput("certificate", "names another process than the one that asked")
        if not is_for_key(made[0], key_digest(key.public_key())):
            raise InvalidInput("certificate", "is for another key than the one that was sent")
        write_key(self.key_file, key)
        write_certificates(self.cert_file, made)

    def _identity_held(self) -> Identity:
        held = identity_of(read_certificates(self.cert_file)[0])
        if held is None or (held.role, held.name) != (self.role, self.name):
            raise InvalidInput("out", f"{self.cert_file} is not of {self.role} {self.name}")
        return held

    def _is_good(self) -> bool:
        """Returns whether there is a certificate by which this process can renew it."""
        files = (self.cert_file, self.key_file, self.ca_file)
        if not all(file.exists() for file in files):
            return False
        self._identity_held()
        return share_of_life_left(read_certificates(self.cert_file)[0]) > 0
