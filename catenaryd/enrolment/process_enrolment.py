"""The authority of a cluster in containers: certificates for who knows the token of its role."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from catenary_protos.catenary.v1 import enrolment_pb2 as pb
from catenary_services.errors import InvalidInput, PermissionDenied
from catenary_services.log import get_logger
from catenary_services.security.authority import CertificateAuthority
from catenary_services.security.certificate_requests import key_of_request
from catenary_services.security.identity import Identity, Role
from catenary_services.security.x509 import pem_of
from catenary_services.version import software_version
from catenaryd.enrolment.enrolment import EnrolmentCaller
from catenaryd.enrolment.role_tokens import RoleTokens

log = get_logger(__name__)


class ProcessEnrolment:
    """Answers processes that enrol or renew; keys never leave them."""

    def __init__(
        self,
        authority: CertificateAuthority,
        tokens: RoleTokens,
        names: Mapping[Role, tuple[str, ...]],
    ) -> None:
        """Signs for the roles of `tokens`.

        Args:
            authority: What signs.
            tokens: The token of each role.
            names: DNS names and addresses in every certificate of a role, by which clients reach
                its processes.
        """
        self._authority = authority
        self._tokens = tokens
        self._names = names

    async def answer(
        self, request: pb.EnrolmentRequest, caller: EnrolmentCaller
    ) -> pb.EnrolmentAnswer:
        """Returns the answer to a request that kept its rules; see `Answerer`."""
        made = pb.EnrolmentAnswer()
        match request.WhichOneof("kind"):
            case "discover":
                made.cluster.CopyFrom(self._identity(request.discover, caller))
            case "process":
                made.issued.CopyFrom(await self._enrol(request.process, caller))
            case "renew":
                made.issued.CopyFrom(await self._renew(request.renew, caller))
            case _:
                raise InvalidInput("kind", "is none that this authority answers")
        return made

    def _identity(self, asked: pb.DiscoverCluster, caller: EnrolmentCaller) -> pb.ClusterIdentity:
        authorities = self._authority.trusted()
        return pb.ClusterIdentity(
            authorities=authorities.decode("ascii"),
            signer=self._authority.signer_digest,
            software_version=software_version(),
            unix_ns=time.time_ns(),
            observed_address=caller.address,
            proof=self._tokens.proof(asked.token_id, asked.nonce, authorities),
        )

    async def _enrol(
        self, request: pb.EnrolProcess, caller: EnrolmentCaller
    ) -> pb.CertificateIssued:
        role = self._tokens.role_of(request.token)
        identity = Identity.of(self._authority.cluster, role, request.name)
        issued = await self._issue(identity, request.csr)
        log.warning("process_enrolled", identity=str(identity), peer=caller.address)
        return issued

    async def _renew(
        self, request: pb.RenewCertificate, caller: EnrolmentCaller
    ) -> pb.CertificateIssued:
        identity = caller.identity
        if identity is None or identity.role not in self._tokens.roles:
            raise PermissionDenied("only processes that enrolled may ask this, with a certificate")
        if identity.cluster != self._authority.cluster:
            raise PermissionDenied(f"{identity} is of another cluster")
        issued = await self._issue(identity, request.csr)
        log.info("certificate_renewed", identity=str(identity), peer=caller.address)
        return issued

    async def _issue(self, identity: Identity, csr: bytes) -> pb.CertificateIssued:
        key = key_of_request(identity.name, csr)
        names = self._names.get(identity.role, ())
        made = await asyncio.to_thread(self._authority.sign, identity, key, names)
        return pb.CertificateIssued(
            agent_id=identity.name, certificate=pem_of([made]).decode("ascii")
        )
