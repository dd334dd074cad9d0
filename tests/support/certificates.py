"""Real certificates for tests, made by the project's own authority."""

from __future__ import annotations

from pathlib import Path

from catenary_services.security.authority import (
    AUTHORITY_FILE,
    CertificateAuthority,
    CertificateRequest,
)
from catenary_services.security.identity import Identity
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.transport.settings import TransportSecurity


class Certificates:
    """The authority of one cluster in a folder, and who has a certificate of it."""

    def __init__(self, folder: Path, cluster: str = "main") -> None:
        self.folder = folder
        self.cluster = cluster
        self.authority = CertificateAuthority(folder, cluster)
        self.authority.ensure()

    @property
    def ca_file(self) -> Path:
        return self.folder / AUTHORITY_FILE

    def files(self, role: str, name: str, *names: str) -> dict[str, Path]:
        """Returns cert_file, key_file and ca_file, made if they are not there."""
        identity = Identity.of(self.cluster, role, name)
        issued = self.authority.issue(
            CertificateRequest(identity, names or ("localhost", "127.0.0.1"))
        )
        return {
            "cert_file": issued.cert_file,
            "key_file": issued.key_file,
            "ca_file": self.ca_file,
        }

    def settings(self, role: str, name: str) -> dict[str, object]:
        """Returns the settings of a process that has a certificate."""
        files = {f"tls_{key}": file for key, file in self.files(role, name).items()}
        return {"cluster": self.cluster, "insecure": False, **files}

    def client(self, role: str, name: str) -> ClientSecurity:
        return ClientSecurity(**self.files(role, name), cluster=self.cluster)  # type: ignore[arg-type]

    def server(self, role: str, name: str) -> ServerSecurity:
        return ServerSecurity(**self.files(role, name), cluster=self.cluster)  # type: ignore[arg-type]

    def transport(self, role: str, name: str) -> TransportSecurity:
        return TransportSecurity(self.server(role, name), self.client(role, name))
