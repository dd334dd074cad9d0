"""Certificates for every process of `catenaryd up --tls`, renewed while it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from catenary_services.errors import CatenaryError
from catenary_services.log import get_logger
from catenary_services.security.authority import (
    AUTHORITY_FILE,
    CertificateAuthority,
    CertificateRequest,
)
from catenary_services.security.identity import Identity, Role
from catenary_services.security.keys import SCOPE_ADMIN, add_key
from catenary_services.security.rotation import WatchedFiles, watched_files
from catenary_services.security.x509 import cluster_of, read_certificates
from catenary_services.settings import DEFAULT_CLUSTER

log = get_logger(__name__)

RENEW_EVERY_S = 3_600.0
_NAMES = ("localhost", "127.0.0.1", "::1")
_OPERATOR = "local"


class LocalCertificates:
    """The authority of a local cluster, in a folder, and the API key of its operator."""

    def __init__(self, folder: Path, cluster: str | None = None) -> None:
        """Makes the authority unless it exists.

        Args:
            folder: Folder of the authority and of the certificates.
            cluster: Name of the cluster; None for that of the authority, "main" for a new one.

        Raises:
            InvalidInput: The folder holds something other than a usable authority of this cluster.
        """
        if cluster is None:
            cluster = _cluster_of(folder) or DEFAULT_CLUSTER
        self._folder = folder
        self._cluster = cluster
        self._authority = CertificateAuthority(folder, cluster)
        self._authority.ensure()
        self._operator = self._issue(Role.OPERATOR, _OPERATOR)

    @property
    def authority(self) -> CertificateAuthority:
        return self._authority

    def files_of(self, role: Role, name: str) -> WatchedFiles:
        """Returns the certificate, key and authorities of a part of this very process."""
        files = self._issue(role, name)
        return watched_files(files["tls_cert_file"], files["tls_key_file"], files["tls_ca_file"])

    def settings(self, kind: str, name: str) -> dict[str, Any]:
        """Returns the settings that give a process its certificate."""
        files = self._issue(Role(kind), name)
        own: dict[str, Any] = {"insecure": False, "cluster": self._cluster, **files}
        if kind == "gateway":
            own["endpoints_insecure"] = True  # these ports listen on loopback only
        return own

    def operator_keys_file(self) -> Path:
        """Returns a file with the hash of the operator's API key, made if it does not exist.

        The scheduler asks for this key when the cluster is changed through a gateway.
        """
        keys, secret = self._folder / "operator-keys.json", self._folder / "operator-api-key"
        if not keys.exists() or not secret.exists():
            keys.unlink(missing_ok=True)
            secret.unlink(missing_ok=True)
            secret.touch(mode=0o600)
            secret.write_text(add_key(keys, "operator", [SCOPE_ADMIN]) + "\n", encoding="utf-8")
        return keys

    def facts(self) -> dict[str, str]:
        """Returns the paths for `catenaryd up --json`: the operator's certificate and API key."""
        facts = {name.removeprefix("tls_"): str(file) for name, file in self._operator.items()}
        secret = self._folder / "operator-api-key"
        return {**facts, "api_key_file": str(secret)} if secret.exists() else facts

    async def renew(self) -> None:
        """Renews certificates that end soon, every hour until cancelled.

        Processes read the new ones.
        """
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                for wanted in self._authority.requests():
                    self._authority.issue(wanted, renew=True)
            except (CatenaryError, OSError) as error:
                log.error("certificates_not_renewed", error=str(error))

    def _issue(self, role: Role, name: str) -> dict[str, Path]:
        wanted = CertificateRequest(Identity.of(self._cluster, role, name), _NAMES)
        issued = self._authority.issue(wanted, renew=True)
        return {
            "tls_cert_file": issued.cert_file,
            "tls_key_file": issued.key_file,
            "tls_ca_file": self._folder / AUTHORITY_FILE,
        }


def _cluster_of(folder: Path) -> str | None:
    """Returns the cluster of the authority in a folder; None if it holds none."""
    file = folder / AUTHORITY_FILE
    return cluster_of(read_certificates(file)[0]) if file.exists() else None
